//! [`Visibility`]: how far the bytes of an operation have come.

use std::fmt;

/// How far the bytes of an operation have come. Only the last level opens a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Visibility {
    /// The source may be reused. Nothing is said about the destination.
    LocalDone,
    /// The destination memory holds the bytes; a reader may still see old ones.
    RemoteDelivered,
    /// A reader that is ordered after this sees the bytes.
    RemoteVisible,
}

impl fmt::Display for Visibility {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LocalDone => "local-done",
            Self::RemoteDelivered => "remote-delivered",
            Self::RemoteVisible => "remote-visible",
        })
    }
}
