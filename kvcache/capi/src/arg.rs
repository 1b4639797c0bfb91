//! Reading and writing what C passes by pointer. The unsafe part of every call goes through here.
//!
//! The contract is that of the header, and each function here repeats it: a pointer that is not NULL
//! points to memory of the type and count given, which nobody else changes during the call.

use std::ffi::{CStr, c_char};
use std::marker::PhantomData;

use kvgate_transfer::Incarnation;

use crate::status::{Failure, Outcome};

/// A struct whose first field is `struct_bytes: u32`, of plain numbers and pointers: every pattern of
/// bits is a value.
///
/// # Safety
/// `Self` is `repr(C)`, begins with that field, and all its fields are as said.
pub(crate) unsafe trait Versioned: Copy {
    const NAME: &'static str;
}

/// Where a call puts its answer. Written only when the call succeeds.
pub(crate) struct Out<'a, T> {
    place: *mut T,
    _borrow: PhantomData<&'a mut T>,
}

impl<T> Out<'_, T> {
    pub(crate) fn set(self, value: T) {
        // SAFETY: `out` has checked the pointer, and its caller has promised the rest.
        unsafe { self.place.write(value) };
    }
}

fn check<T>(pointer: *const T, what: &str) -> Outcome<()> {
    if pointer.is_null() {
        return Err(Failure::argument(format!("{what} is NULL")));
    }
    if !pointer.is_aligned() {
        return Err(Failure::argument(format!(
            "{what} is not aligned: {pointer:p}"
        )));
    }
    Ok(())
}

/// A place for an answer.
///
/// # Safety
/// Not NULL: writable, for one `T`, until the call ends.
pub(crate) unsafe fn out<'a, T>(pointer: *mut T, what: &str) -> Outcome<Out<'a, T>> {
    check(pointer, what)?;
    Ok(Out {
        place: pointer,
        _borrow: PhantomData,
    })
}

/// A place for an answer that the caller may not want.
///
/// # Safety
/// As [`out`].
pub(crate) unsafe fn optional_out<'a, T>(
    pointer: *mut T,
    what: &str,
) -> Outcome<Option<Out<'a, T>>> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    unsafe { out(pointer, what) }.map(Some)
}

/// A place for a versioned struct, whose `struct_bytes` the caller has set.
///
/// # Safety
/// As [`out`], with the first field initialised.
pub(crate) unsafe fn versioned_out<'a, T: Versioned>(pointer: *mut T) -> Outcome<Out<'a, T>> {
    check(pointer, T::NAME)?;
    // SAFETY: the caller's promise: the first field can be read, and it is a u32 by `Versioned`.
    let struct_bytes = unsafe { pointer.cast::<u32>().read() };
    check_bytes::<T>(struct_bytes)?;
    Ok(Out {
        place: pointer,
        _borrow: PhantomData,
    })
}

/// A versioned struct.
///
/// # Safety
/// Not NULL: points to `struct_bytes` initialised bytes, at least to that field.
pub(crate) unsafe fn versioned<T: Versioned>(pointer: *const T) -> Outcome<T> {
    check(pointer, T::NAME)?;
    // SAFETY: the caller's promise, and `Versioned`.
    let struct_bytes = unsafe { pointer.cast::<u32>().read() };
    check_bytes::<T>(struct_bytes)?;
    // SAFETY: the caller says that so many bytes are there; every pattern of bits is a `T`.
    Ok(unsafe { pointer.read() })
}

fn check_bytes<T: Versioned>(struct_bytes: u32) -> Outcome<()> {
    let expected = size_of::<T>();
    if struct_bytes as usize == expected {
        return Ok(());
    }
    let message = format!(
        "{}.struct_bytes is {struct_bytes}, this version of the library expects {expected}",
        T::NAME
    );
    Err(Failure::argument(message))
}

/// `count` values that the call reads; NULL is allowed for none.
///
/// # Safety
/// Not NULL: `count` initialised values that nobody changes during `'a`.
pub(crate) unsafe fn slice<'a, T: Copy>(
    pointer: *const T,
    count: usize,
    what: &str,
) -> Outcome<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    check(pointer, what)?;
    if count > isize::MAX as usize / size_of::<T>() {
        return Err(Failure::argument(format!(
            "{what} cannot have {count} elements"
        )));
    }
    // SAFETY: not NULL, aligned, of possible length; the rest is the caller's promise.
    Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
}

/// A text that ends with a zero byte.
///
/// # Safety
/// Not NULL: ends with a zero byte, and nobody changes it during `'a`.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, what: &str) -> Outcome<&'a str> {
    check(pointer, what)?;
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str()
        .map_err(|error| Failure::argument(format!("{what} is not UTF-8: {error}")))
}

/// Copies `bytes` to a buffer of `capacity`, and says how long they are, also when they do not fit.
///
/// # Safety
/// `buffer` not NULL: writable for `capacity` bytes; `length` as in [`out`].
pub(crate) unsafe fn copy_out<T: Copy>(
    bytes: &[T],
    buffer: *mut T,
    capacity: usize,
    length: *mut usize,
) -> Outcome<()> {
    // SAFETY: the caller's promise.
    let length = unsafe { out(length, "the length") }?;
    length.set(bytes.len());
    if capacity < bytes.len() {
        let message = format!("a buffer of {capacity} for {}", bytes.len());
        return Err(Failure::argument(message));
    }
    if bytes.is_empty() {
        return Ok(());
    }
    check(buffer, "the buffer")?;
    // SAFETY: not NULL and aligned; the caller has promised `capacity` writable elements.
    unsafe { buffer.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    Ok(())
}

/// A number that is a name of at most 16 bits.
pub(crate) fn small(value: u32, what: &str) -> Outcome<u16> {
    u16::try_from(value)
        .map_err(|_| Failure::argument(format!("{what} is {value}, at most 65535 exists")))
}

/// A field that later versions may give a meaning.
pub(crate) fn zero(value: u32, what: &str) -> Outcome<()> {
    match value {
        0 => Ok(()),
        _ => Err(Failure::argument(format!("{what} is {value}, not zero"))),
    }
}

/// One life of one agent, drawn at random when the agent is made: 16 bytes without meaning.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct kv_incarnation {
    /// The bytes.
    pub bytes: [u8; 16],
}

impl From<Incarnation> for kv_incarnation {
    fn from(incarnation: Incarnation) -> Self {
        Self {
            bytes: incarnation.0.to_le_bytes(),
        }
    }
}

impl From<kv_incarnation> for Incarnation {
    fn from(incarnation: kv_incarnation) -> Self {
        Incarnation(u128::from_le_bytes(incarnation.bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Pair {
        struct_bytes: u32,
        value: u32,
    }
    // SAFETY: two numbers, the first of them `struct_bytes`.
    unsafe impl Versioned for Pair {
        const NAME: &'static str = "pair";
    }

    #[test]
    fn structs_of_another_size_are_refused() {
        let mut pair = Pair {
            struct_bytes: 8,
            value: 3,
        };
        // SAFETY: a local value.
        assert_eq!(unsafe { versioned(&raw const pair) }.unwrap().value, 3);
        for wrong in [0, 4, 12, u32::MAX] {
            pair.struct_bytes = wrong;
            // SAFETY: as above.
            let refused = unsafe { versioned(&raw const pair) }.err().unwrap();
            assert!(
                format!("{refused:?}").contains("pair.struct_bytes"),
                "{wrong}"
            );
        }
    }

    #[test]
    fn pointers_that_cannot_be_right_are_refused() {
        let bytes = [0_u8; 16];
        let odd = bytes.as_ptr().wrapping_add(1 - bytes.as_ptr().addr() % 2);
        // SAFETY: refused before it is read.
        assert!(unsafe { versioned(odd.cast::<Pair>()) }.is_err());
        // SAFETY: as above.
        assert!(unsafe { slice(std::ptr::null::<u8>(), 1, "bytes") }.is_err());
        // SAFETY: as above.
        assert!(unsafe { slice(bytes.as_ptr().cast::<u8>(), usize::MAX, "bytes") }.is_err());
        // SAFETY: nothing is read.
        let none = unsafe { slice(std::ptr::null::<u8>(), 0, "bytes") };
        assert!(none.unwrap().is_empty());
        // SAFETY: a constant.
        assert!(unsafe { text(c"\xff".as_ptr(), "name") }.is_err());
    }

    #[test]
    fn a_short_buffer_learns_the_length_and_stays_as_it_was() {
        let (mut buffer, mut length) = ([9_u8; 4], 0);
        // SAFETY: local values of these lengths.
        let refused = unsafe { copy_out(b"hello", buffer.as_mut_ptr(), 4, &raw mut length) };
        assert!(refused.is_err());
        assert_eq!((buffer, length), ([9; 4], 5));
        // SAFETY: as above.
        unsafe { copy_out(b"hey", buffer.as_mut_ptr(), 4, &raw mut length) }.unwrap();
        assert_eq!((&buffer, length), (b"hey\x09", 3));
    }
}
