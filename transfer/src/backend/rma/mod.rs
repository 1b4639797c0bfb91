//! Transfers over a one-sided transport of a library: a put or get moves the bytes, a TCP channel says so.
//!
//! The control channel is that of the tcp backend: handshake, messages, arrivals, goodbye, and the death of
//! the peer. The library carries payload only. After the handshake both sides hand over the address of
//! their endpoint and the keys of their regions (`card.rs`). An operation is then: requests into the
//! peer's memory, all of them over, a flush, and only then the arrival on the control channel: completion
//! on this side is not arrival on the other one.
//!
//! All of the library is used in one thread for each connection (`mover.rs`), which also makes the passive
//! side progress.
//!
//! Proof of quiescence: the peer's goodbye, which comes after its last transfer was flushed; or the end of
//! this side's endpoint, where the transport is carried out by the threads of both sides. An endpoint that
//! could not be ended proves nothing, whatever the peer says: what this side had under way gets no end, and
//! what was registered stays mapped, in regions that do not close.
//! Taking a key back proves nothing: revocation asks the peer ([`Access::Direct`]).

#[cfg(feature = "bare")]
pub(crate) mod bare;
mod card;
mod establish;
mod link;
mod mover;
mod requests;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod worker;

use std::os::fd::BorrowedFd;

use bytes::Bytes;

pub(crate) use self::card::Exchange;
pub(crate) use self::establish::{Refused, Wanted, available, establish};
pub(crate) use self::mover::LocalKey;
pub(crate) use self::requests::Request;

use super::BackendKind;
use crate::error::{Error, ErrorKind};
use crate::mem::Memory;

/// A library's half of one connection. Everything of it stays in the thread that made it, which ends it with
/// [`Fabric::end`]. Dropped instead is only one that has neither a peer nor memory.
pub(crate) trait Fabric: Sized {
    /// Which library.
    const KIND: BackendKind;
    /// How a peer reaches this endpoint.
    fn address(&mut self) -> Result<Bytes, Failure>;
    /// Makes the endpoint of the peer known, and the keys of its regions by their place. What it needs to
    /// reach the peer counts as a request.
    fn connect(&mut self, address: &[u8], keys: &[Bytes]) -> Result<(), Failure>;
    /// Makes `memory` known to the library, and keeps it mapped until it is unregistered. Gives back a handle.
    /// After an error nothing of it is known.
    fn register(&mut self, memory: &Memory) -> Result<usize, Failure>;
    /// What lets the peer reach the memory of `handle`.
    fn key(&mut self, handle: usize, memory: &Memory) -> Result<LocalKey, Failure>;
    /// After an error the library may still touch it, until [`Fabric::end`] says otherwise.
    fn unregister(&mut self, handle: usize) -> Result<(), Failure>;
    /// Starts one request; its local memory is registered under `handle` and stays so, and unused by
    /// others, until the request is over. `false` when there is no room now.
    fn post(&mut self, request: &Request, handle: usize) -> Result<bool, Failure>;
    /// Starts to wait until everything posted before is in the peer's memory; counts as a request.
    fn flush(&mut self) -> Result<(), Failure>;
    /// Requests that are not over.
    fn pending(&self) -> usize;
    /// Lets the library work; whether anything has moved. Any request that failed is an error.
    fn progress(&mut self) -> Result<bool, Failure>;
    /// Whether the caller may sleep on the descriptor now.
    fn arm(&mut self) -> Result<bool, Failure>;
    /// Readable when there is something to do.
    fn event_fd(&self) -> BorrowedFd<'_>;
    /// Longest request.
    fn largest_bytes(&self) -> usize;
    /// Ends whatever is under way, and everything of the library with it. `true` says that neither side's
    /// memory is touched by it from now on. `false` says that nobody knows: then it was left as it is, and
    /// the memory must be left, too.
    fn end(self) -> bool;
}

/// A call into a library that failed. The endpoint is of no more use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) backend: BackendKind,
    pub(crate) call: &'static str,
    pub(crate) code: i64,
    /// The library's own.
    pub(crate) words: String,
}

impl Failure {
    /// A state that the link never makes.
    fn inside(backend: BackendKind, words: impl Into<String>) -> Self {
        Self {
            backend,
            call: "request",
            code: 0,
            words: words.into(),
        }
    }

    /// As the end of a connection.
    pub(crate) fn lost(self) -> Error {
        let reason = Error::from(self).to_string();
        ErrorKind::PeerLost { reason }.into()
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let Failure {
            backend,
            call,
            code,
            words,
        } = failure;
        ErrorKind::Provider {
            backend,
            call,
            code,
            words,
        }
        .into()
    }
}
