//! [`SourceReady`]: the witness that the bytes to be moved have been written (I-7).

use crate::{
    ids::PeerId,
    sync::{Ordering, fence},
};

/// Proof that the producer of the source bytes is ordered before whoever gets this value.
///
/// [`crate::Agent::post`] takes one by value, so an operation cannot be posted without somebody having
/// said, in code, what orders the producer before it. There is no default, no `Clone` and no way to build
/// one from its parts. `kvgate-kvcache` mints it from the witness of a committed layer.
///
/// Posting takes it:
/// ```
/// # use kvgate_transfer::{Agent, PostOptions, PreparedTransfer, SourceReady};
/// fn send(agent: &Agent, x: &PreparedTransfer) {
///     let _ = agent.post(x, SourceReady::host_written(), PostOptions::default());
/// }
/// ```
/// and nothing else does:
/// ```compile_fail,E0308
/// # use kvgate_transfer::{Agent, PostOptions, PreparedTransfer, SourceReady};
/// fn send(agent: &Agent, x: &PreparedTransfer) {
///     let _ = agent.post(x, (), PostOptions::default());
/// }
/// ```
/// It cannot be forged:
/// ```compile_fail,E0423
/// let forged = kvgate_transfer::SourceReady(None);
/// ```
/// nor doubled:
/// ```
/// let one = kvgate_transfer::SourceReady::host_written();
/// let other = one;
/// # drop(other);
/// ```
/// ```compile_fail,E0599
/// let one = kvgate_transfer::SourceReady::host_written();
/// let other = one.clone();
/// # drop(other);
/// ```
#[derive(Debug)]
#[must_use = "a source witness is for posting"]
pub struct SourceReady(Option<PeerId>);

impl SourceReady {
    /// The calling thread has written the source bytes, or has synchronised with the thread that did.
    ///
    /// A release fence stands here; the queue hands the operation to the worker, which so sees the bytes.
    pub fn host_written() -> Self {
        fence(Ordering::Release);
        Self(None)
    }

    /// See `SourceReady::announced`, which stands with the events of the agent.
    pub(crate) fn word_of(peer: PeerId) -> Self {
        fence(Ordering::Acquire);
        Self(Some(peer))
    }

    /// Who has announced the source; `None` for bytes that were written here.
    pub(crate) fn announced_by(&self) -> Option<PeerId> {
        self.0
    }
}
