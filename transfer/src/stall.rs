//! Why an operation does not go on, as far as this side can see.

use std::fmt;

use crate::ids::OpId;

/// What an operation that does not go on waits for: the most specific thing that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StallCause {
    /// The process of the peer is stopped, by a signal or a debugger.
    PeerStopped,
    /// Its process lives, and nobody there attends to what this side sends: a thread that is stuck, or gets no
    /// processor. Only where both share memory.
    PeerSilent,
    /// The socket or the ring takes no more bytes: the peer, or what lies between, does not read.
    SocketFull,
    /// Everything was sent, and the peer has not answered.
    NotAnswered,
    /// The connection has broken, and there is no other one yet.
    Suspended,
    /// It has not begun: the worker of the connection is busy with something else.
    NotBegun,
    /// It has not begun, or waits in order, behind this operation, which does not go on either.
    Behind {
        /// The operation in front.
        op: OpId,
    },
    /// The copy between two processes of this host takes so long.
    Copy,
    /// The transport has it and does not say why.
    Transport,
}

impl StallCause {
    /// One word, as a label.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::PeerStopped => "peer_stopped",
            Self::PeerSilent => "peer_silent",
            Self::SocketFull => "socket_full",
            Self::NotAnswered => "not_answered",
            Self::Suspended => "suspended",
            Self::NotBegun => "not_begun",
            Self::Behind { .. } => "behind",
            Self::Copy => "copy",
            Self::Transport => "transport",
        }
    }
}

impl fmt::Display for StallCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PeerStopped => f.write_str("the process of the peer is stopped"),
            Self::PeerSilent => f.write_str("the peer leaves its heartbeat unanswered"),
            Self::SocketFull => f.write_str("the peer takes nothing from its socket or ring"),
            Self::NotAnswered => f.write_str("the peer does not answer"),
            Self::Suspended => {
                f.write_str("the connection has broken, and there is no other one yet")
            }
            Self::NotBegun => f.write_str("the worker is busy with something else"),
            Self::Behind { op } => write!(f, "behind operation {op}"),
            Self::Copy => f.write_str("the copy is not over"),
            Self::Transport => f.write_str("the transport does not say why"),
        }
    }
}
