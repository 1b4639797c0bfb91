//! What the tests share. Each of them uses a part of it.
#![allow(dead_code, unused_macros)]

use std::ffi::CStr;
use std::ptr::without_provenance_mut;

use kvgate::kv_last_error_message;

/// Calls and demands a status.
macro_rules! is {
    ($status:ident, $call:expr) => {{
        // SAFETY: live handles and local values.
        let status = unsafe { $call };
        let expected = kv_status::$status;
        assert_eq!(status, expected, "{}: {}", stringify!($call), message());
    }};
    ($status:ident, $what:expr, $call:expr) => {{
        is!($status, $call);
        assert!(message().contains($what), "{}", message());
    }};
}

/// The message of the last failure of this thread.
pub(crate) fn message() -> String {
    // SAFETY: the string of this thread, which nothing replaces meanwhile.
    unsafe { CStr::from_ptr(kv_last_error_message()) }
        .to_str()
        .unwrap()
        .to_owned()
}

/// How long a test waits for what has to come.
pub(crate) const PATIENCE_MS: u64 = 10_000;

/// Handles that do not exist: small numbers, odd ones, and an address of the stack.
pub(crate) fn made_up<T>() -> [*mut T; 4] {
    let place = 0_u64;
    [
        without_provenance_mut(1),
        without_provenance_mut(0x10_000 * 16 + 3),
        without_provenance_mut(usize::MAX),
        without_provenance_mut((&raw const place).addr()),
    ]
}

/// The call is refused, and its message says `what`.
macro_rules! refused {
    ($what:literal, $call:expr) => {{
        // SAFETY: pointers are NULL, made up (and never followed, since handles are numbers), or of
        // local values.
        let status = unsafe { $call };
        let message = $crate::support::message();
        let (expected, call) = (kvgate::kv_status::InvalidArgument, stringify!($call));
        assert_eq!(status, expected, "{call}");
        assert!(message.contains($what), "{call}: {message}");
    }};
}

/// The call succeeds.
macro_rules! done {
    ($call:expr) => {{
        // SAFETY: local values and live handles.
        let status = unsafe { $call };
        let (expected, call) = (kvgate::kv_status::Ok, stringify!($call));
        assert_eq!(status, expected, "{call}: {}", $crate::support::message());
    }};
}

/// Releasing takes NULL and refuses what is no handle.
macro_rules! releases {
    ($($release:ident($name:literal)),+ $(,)?) => {$(
        done!($release(null_mut()));
        for handle in $crate::support::made_up() {
            refused!($name, $release(handle));
        }
    )+};
}

/// A versioned struct, zero but for these fields.
macro_rules! sized {
    ($type:ident { $($field:ident: $value:expr),* $(,)? }) => {{
        // SAFETY: numbers and pointers, for which all zero is a value.
        let mut value: $type = unsafe { std::mem::zeroed() };
        value.struct_bytes = size_of::<$type>() as u32;
        $(value.$field = $value;)*
        value
    }};
}

pub(crate) mod side;
pub(crate) mod world;
