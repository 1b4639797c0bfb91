//! Why a connection did not become a link, for the listener's books and for the caller.

use super::handshake::HandshakeError;
#[cfg(feature = "one-sided")]
use super::rma;
use super::socket::StreamEnd;
use crate::agent::address::Address;
use crate::agent::wire::WireError;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind};
use crate::obs::RefusedField;

/// Why a connection did not become a link.
pub(super) enum Failure {
    Handshake(HandshakeError),
    System(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::System(error)
    }
}

impl From<HandshakeError> for Failure {
    fn from(error: HandshakeError) -> Self {
        Self::Handshake(error)
    }
}

#[cfg(feature = "one-sided")]
impl From<rma::Refused> for Failure {
    fn from(refused: rma::Refused) -> Self {
        match refused {
            rma::Refused::Handshake(error) => Self::Handshake(error),
            rma::Refused::Here(error) => Self::System(error),
        }
    }
}

impl Failure {
    pub(super) fn reason(&self) -> String {
        match self {
            Self::Handshake(error) => error.to_string(),
            Self::System(error) => error.to_string(),
        }
    }

    pub(super) fn field(&self) -> RefusedField {
        let Self::Handshake(error) = self else {
            return RefusedField::Here;
        };
        match error {
            HandshakeError::Stream(StreamEnd::Wire(WireError::Version { .. })) => {
                RefusedField::Version
            }
            HandshakeError::Stream(StreamEnd::TimedOut) => RefusedField::Time,
            HandshakeError::Stream(_) => RefusedField::Frames,
            HandshakeError::SecretMissing { .. } | HandshakeError::WrongSecret => {
                RefusedField::Secret
            }
            HandshakeError::ByPeer(_) => RefusedField::ByPeer,
            HandshakeError::ByUs(_) => RefusedField::Metadata,
            HandshakeError::Session { .. } => RefusedField::Session,
            HandshakeError::Probe(_) => RefusedField::Probe,
        }
    }

    pub(super) fn into_error(self, address: &Address, deadline: Deadline) -> Error {
        let address = address.to_string();
        match self {
            Self::System(error) => error,
            Self::Handshake(HandshakeError::Stream(StreamEnd::TimedOut)) => {
                too_late("handshake", deadline)
            }
            Self::Handshake(HandshakeError::Stream(StreamEnd::Wire(WireError::Version {
                ours,
                theirs,
            }))) => ErrorKind::VersionMismatch {
                address,
                ours,
                theirs,
            }
            .into(),
            // It has said nothing against this side; it is gone.
            Self::Handshake(HandshakeError::Stream(
                end @ (StreamEnd::Closed | StreamEnd::Cut | StreamEnd::PeerDead | StreamEnd::Io(_)),
            )) => ErrorKind::PeerLost {
                reason: format!("{end}, in the handshake with {address}"),
            }
            .into(),
            Self::Handshake(HandshakeError::Probe(failure)) => ErrorKind::ProbeFailed {
                address,
                pid: failure.pid,
                errno: failure.errno,
                ptrace_scope: failure.ptrace_scope,
            }
            .into(),
            Self::Handshake(error) => ErrorKind::HandshakeRefused {
                address,
                reason: error.to_string(),
            }
            .into(),
        }
    }
}

pub(super) fn too_late(what: &'static str, deadline: Deadline) -> Error {
    let deadline_ms = deadline.allowed_ms();
    ErrorKind::DeadlineExceeded { what, deadline_ms }.into()
}
