//! [`Op`]: the two directions of a transfer.

use std::fmt;

/// What a transfer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Op {
    /// Copies local slots into slots of the peer.
    Write,
    /// Copies slots of the peer into local slots.
    ///
    /// The peer must have said that the source is complete ([`crate::SourceReady::announced`]) and keep it
    /// as it is until it is told that the read has ended: nothing of the transfer itself tells it. An
    /// [`crate::Arrival`] posted with a read is this side's own: its tickets are redeemed here, as if the peer had
    /// written, when every byte is visible here.
    Read,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Write => "write",
            Self::Read => "read",
        })
    }
}
