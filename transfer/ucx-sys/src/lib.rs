//! UCP, the protocol layer of UCX: types and constants of its header, and the library loaded at run time.
//!
//! Only what `kvgate-transfer` uses is here. Nothing of UCX is needed to build: [`Ucp::load`] opens the
//! library when it is asked for, and an absent one is a [`LoadError`] that names every path.
//!
//! # Versions
//! The structs are those of UCX 1.22, the least version is [`LEAST_VERSION`]. Structs with a `field_mask`
//! only grow, so the larger one, zeroed first, serves every version in between. Each function here exists
//! in all of them.
//!
//! # Example
//! ```
//! match kvgate_ucx_sys::Ucp::load(&[]) {
//!     Ok(ucp) => println!("UCX {} from {}", ucp.version(), ucp.path().display()),
//!     Err(absent) => println!("{absent}"),
//! }
//! ```

#![deny(missing_docs)]
#![cfg(target_os = "linux")]

#[allow(missing_docs, non_camel_case_types, non_upper_case_globals)]
mod bindings;
mod library;

pub use bindings::*;
pub use library::{Attempt, LEAST_VERSION, LoadError, SYSTEM_NAME, Ucp, Version};

/// Whether a returned pointer is a status: the last hundred addresses are negated codes.
pub fn status_of(request: ucs_status_ptr_t) -> Option<ucs_status_t> {
    let address = request as isize;
    (-100..0)
        .contains(&address)
        .then_some(address as ucs_status_t)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_addresses_are_codes() {
        assert_eq!(status_of(std::ptr::null_mut()), None);
        assert_eq!(status_of(-1isize as ucs_status_ptr_t), Some(-1));
        assert_eq!(status_of(-100isize as ucs_status_ptr_t), Some(UCS_ERR_LAST));
        assert_eq!(status_of(-101isize as ucs_status_ptr_t), None);
        assert_eq!(status_of(4096 as ucs_status_ptr_t), None);
    }
}
