//! libfabric: types and constants of its headers, and the library loaded at run time.
//!
//! Only what `kvgate-transfer` uses is here. Nothing of libfabric is needed to build: [`Fabric::load`]
//! opens the library when it is asked for, and an absent one is a [`LoadError`] that names every path.
//!
//! # Versions
//! The structs are those of libfabric 1.17 ([`API_VERSION`]), and the functions are bound by the version of
//! their symbol that belongs to these structs: a newer library exports newer ones, with longer structs,
//! under the same names. What is longer in a newer library all the same is either allotted by the library
//! (`fi_dupinfo`, tables of functions) or handed over as [`Padded`].
//!
//! Most of libfabric is inline functions over tables of functions; [`call!`] is one such call.
//!
//! # Example
//! ```
//! match kvgate_libfabric_sys::Fabric::load(&[]) {
//!     Ok(fabric) => println!("libfabric {} from {}", fabric.version(), fabric.path().display()),
//!     Err(absent) => println!("{absent}"),
//! }
//! ```

#![deny(missing_docs)]
#![cfg(target_os = "linux")]

#[allow(missing_docs, non_camel_case_types, non_upper_case_globals)]
mod bindings;
mod library;

pub use bindings::*;
pub use library::{API_VERSION, Attempt, Fabric, LoadError, SYSTEM_NAME, Version};

/// A struct that is handed over by pointer, with zeros behind it for the fields that a newer library may
/// look at.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Padded<T> {
    /// The struct of this version.
    pub value: T,
    room: [u64; 16],
}

impl<T> Padded<T> {
    /// `value` with room behind it.
    pub fn new(value: T) -> Self {
        Self {
            value,
            room: [0; 16],
        }
    }
}

/// Calls entry `name` of a table of functions: `call!(table, name, arguments…)`. An entry that the provider
/// left out answers `-FI_ENOSYS`.
///
/// # Safety
/// As the C function: the table belongs to a live object, the arguments are what its entry takes.
#[macro_export]
macro_rules! call {
    ($table:expr, $name:ident, $($argument:expr),* $(,)?) => {
        match (*$table).$name {
            Some(function) => function($($argument),*) as i64,
            None => -($crate::FI_ENOSYS as i64),
        }
    };
}
