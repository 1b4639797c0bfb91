//! Errors of the kernels: shapes and page tables that do not fit together.

use std::fmt;

/// What a kernel refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A page table names a slot outside its pool.
    SlotOutOfRange,
    /// A page does not hold the rows its encoding asks for.
    PageTooSmall,
    /// A view without pages, or with a zero row count.
    EmptyView,
    /// A row was read or written with another channel count than its encoding has.
    ChannelCount,
    /// A row before the first one that may be written.
    SharedRow,
    /// Two operands do not have the shape the operation needs.
    Shape,
}

/// A refused kernel call: the kind, the quantity, the value found and the value expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelError {
    /// Why the call was refused.
    pub kind: ErrorKind,
    /// The quantity that is wrong.
    pub what: &'static str,
    /// Its value.
    pub got: u64,
    /// The value, or the limit, that was expected.
    pub expected: u64,
}

impl KernelError {
    pub(crate) fn new(kind: ErrorKind, what: &'static str, got: usize, expected: usize) -> Self {
        Self {
            kind,
            what,
            got: got as u64,
            expected: expected as u64,
        }
    }
}

impl fmt::Display for KernelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let relation = match self.kind {
            ErrorKind::SlotOutOfRange => "must be below",
            ErrorKind::PageTooSmall => "needs at least",
            ErrorKind::EmptyView | ErrorKind::SharedRow => "must be at least",
            ErrorKind::ChannelCount | ErrorKind::Shape => "must be",
        };
        write!(
            f,
            "{} is {}, {relation} {}",
            self.what, self.got, self.expected
        )
    }
}

impl std::error::Error for KernelError {}

/// Refuses an operand of another length than the operation needs.
pub(crate) fn expect_len(
    what: &'static str,
    got: usize,
    expected: usize,
) -> Result<(), KernelError> {
    if got == expected {
        Ok(())
    } else {
        Err(KernelError::new(ErrorKind::Shape, what, got, expected))
    }
}
