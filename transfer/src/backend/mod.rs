//! The seam between the engine and what moves bytes.
//!
//! A backend makes [`Link`]s: established connections to one peer. The engine calls a link from one thread at a
//! time, as a rule that peer's worker; the link calls the engine through [`LinkEvents`] from its receive thread. This
//! module is compiled for the model checker too, whose models implement `Link`; the backends are not.

#[cfg(not(kv_loom))]
pub(crate) mod channel;
#[cfg(not(kv_loom))]
#[allow(unsafe_code)]
pub(crate) mod cma;
#[cfg(not(kv_loom))]
mod establish;
#[cfg(not(kv_loom))]
pub(crate) mod handshake;
#[cfg(all(feature = "libfabric", not(kv_loom)))]
#[allow(unsafe_code)]
pub(crate) mod libfabric;
#[cfg(all(test, not(kv_loom)))]
mod link_tests;
#[cfg(not(kv_loom))]
pub(crate) mod local;
#[cfg(not(kv_loom))]
mod mailbox;
#[cfg(not(kv_loom))]
mod neighbour;
#[cfg(not(kv_loom))]
pub(crate) mod net;
#[cfg(not(kv_loom))]
mod parts;
#[cfg(not(kv_loom))]
pub(crate) mod process;
#[cfg(not(kv_loom))]
mod pulse;
#[cfg(not(kv_loom))]
pub(crate) mod reader;
#[cfg(not(kv_loom))]
mod reads;
#[cfg(not(kv_loom))]
mod refusal;
#[cfg(not(kv_loom))]
mod ring;
#[cfg(all(feature = "one-sided", not(kv_loom)))]
#[cfg_attr(not(any(feature = "ucx", feature = "libfabric")), allow(dead_code))]
pub(crate) mod rma;
mod runs;
#[cfg(not(kv_loom))]
#[allow(unsafe_code)]
pub(crate) mod shm;
#[cfg(all(feature = "sim", not(kv_loom)))]
pub(crate) mod sim;
#[cfg(not(kv_loom))]
pub(crate) mod socket;
#[cfg(not(kv_loom))]
pub(crate) mod tcp;
#[cfg(all(feature = "ucx", not(kv_loom)))]
#[allow(unsafe_code)]
pub(crate) mod ucx;

#[cfg(not(kv_loom))]
pub(crate) use runs::RunCursor;
pub use runs::RunPairs;
pub(crate) use runs::{PairGroup, PoolPair};

use std::{fmt, ops::Range};

use bytes::Bytes;

use crate::{
    Arrival,
    engine::Op,
    error::{Cause, Error, ErrorKind},
    ids::{OpId, PeerId, PoolId},
    landed::Landing,
    mem::{region::RegionHold, span::SlotRun},
    priority::Priority,
    stall::StallCause,
    sync::Arc,
    visibility::Visibility,
};

/// Which backend carries a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum BackendKind {
    /// Two agents of one process.
    Local,
    /// Two processes of one host that map each other's memory.
    Shm,
    /// Two processes of one host; the kernel copies between their memories.
    Cma,
    /// A stream socket.
    Tcp,
    /// UCX moves the bytes, a stream socket says so.
    Ucx,
    /// libfabric moves the bytes, a stream socket says so.
    Libfabric,
    /// The seeded simulation, or a model.
    Sim,
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Local => "local",
            Self::Shm => "shm",
            Self::Cma => "cma",
            Self::Tcp => "tcp",
            Self::Ucx => "ucx",
            Self::Libfabric => "libfabric",
            Self::Sim => "sim",
        })
    }
}

/// Most reads of one connection that a side has asked for and not got. The peer keeps so many requests.
pub(crate) const READ_WINDOW: usize = 8;

/// How operations reach the peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The peer resolves every operation, so it can refuse one after a revocation.
    Checked,
    /// Whoever posts holds a mapping or a key: a revocation needs its answer.
    Direct,
}

/// What a link can do.
#[derive(Clone, Copy, Debug)]
pub struct Caps {
    /// The level that its completions reach.
    pub completion: Visibility,
    /// Most descriptors in one operation.
    pub max_descriptors: u64,
    /// The arrival of a write travels with its bytes. Otherwise the engine calls
    /// [`Link::announce`] after [`Posted::Done`].
    pub arrival_in_band: bool,
    /// How its operations reach memory.
    pub access: Access,
}

/// Neighbouring slots of one pool of the peer, as this side names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteRun {
    /// The peer's pool.
    pub pool: PoolId,
    /// Registration generation of the pool's region that this side knows.
    pub generation: u32,
    /// First slot.
    pub slot: u32,
    /// Number of slots, at least one.
    pub slot_count: u32,
}

/// An operation that a link executes. The engine keeps the local memory registered and mapped until it
/// has been told the end, or the link is closed and proven quiet.
#[derive(Clone, Debug)]
pub struct PostedOp {
    /// Its name in [`LinkEvents::completed`].
    pub id: OpId,
    /// Which way the bytes go.
    pub op: Op,
    /// What to copy where.
    pub runs: Arc<RunPairs>,
    /// Whether somebody waits for it: for links that keep a queue of their own.
    pub priority: Priority,
    /// Bytes of all runs.
    pub bytes: u64,
    /// Of a write: told to the receiver once every byte is visible there. Of a read: the engine's own.
    pub arrival: Option<Arrival>,
    /// Where the link notes what has landed. A link that notes nothing leaves it unknown.
    pub landing: Arc<Landing>,
}

/// A read of the peer that this side has to answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// The connection it came by, where a link outlives its connections: no other one has its answer.
    pub connection: u64,
    /// The peer's name for it.
    pub id: u64,
    /// The bytes that the peer expects.
    pub payload_bytes: u64,
    /// Where they lie here, in the order in which they are wanted.
    pub runs: Vec<RemoteRun>,
}

/// How far [`Link::post`] came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Posted {
    /// The operation is over.
    Done(Visibility),
    /// [`LinkEvents::completed`] will tell, unless the link goes down first.
    Pending,
}

/// What [`Link::post`] of an operation would do to the thread that calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Readiness {
    /// It may wait for the peer or for a socket.
    Waits,
    /// It waits for nothing and calls the engine of the peer.
    Calls,
    /// It copies and waits for nothing.
    Copies,
}

/// Whether a lost peer can still write.
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub enum Quiesce {
    /// It cannot: nothing it has posted will land from now on.
    Proven,
    /// Nobody knows; memory it was told about stays quarantined.
    Unprovable(Cause),
}

/// Runs that a peer has named, checked, with the regions held.
#[derive(Debug)]
pub struct Resolved {
    pub(crate) runs: Vec<SlotRun>,
    /// While these live, the memory stays registered and mapped (I-21).
    pub(crate) _holds: Vec<RegionHold>,
}

/// One established connection to one peer.
///
/// `readiness`, `post`, `serve`, `announce`, `send` and `send_progress` are called from one thread at a time
/// (whoever has the turn of the peer's queue), `start` once before them; `close` and `quiesce` from any thread, at
/// any time.
pub trait Link: Send + Sync {
    /// Takes the peer's number and whom to tell, and starts to receive.
    ///
    /// # Errors
    /// When the receive thread cannot be started.
    fn start(&self, peer: PeerId, events: Arc<dyn LinkEvents>) -> Result<(), Error>;
    /// Which backend this is.
    fn kind(&self) -> BackendKind;
    /// What it can do.
    fn caps(&self) -> Caps;
    /// What `post` of this operation would do now. Asked by the thread that would call it.
    fn readiness(&self, op: &PostedOp) -> Readiness {
        let _ = op;
        Readiness::Waits
    }
    /// A short write with an arrival is about to be posted: a peer that sleeps may wake up meanwhile. From any
    /// thread; never waits. Nothing depends on it: it is woken again if it has fallen asleep.
    fn rouse(&self) {}
    /// Executes an operation, or hands it to hardware. May block; `close` ends that.
    ///
    /// # Errors
    /// The operation is over and has not landed (the link may be broken, or it was refused), and none of
    /// its bytes will be moved from now on.
    fn post(&self, op: &PostedOp) -> Result<Posted, Error>;
    /// Answers a read that [`LinkEvents::asked`] has queued: with the bytes of `source`, or with why not.
    ///
    /// # Errors
    /// The link is broken, or it is of a kind whose peers copy for themselves and ask for nothing.
    fn serve(&self, request: &ReadRequest, source: Result<Resolved, Error>) -> Result<(), Error> {
        let _ = (request, source);
        Err(ErrorKind::Closed.into())
    }
    /// Tells the receiver that bytes have come as far as `level`, after everything posted before.
    ///
    /// # Errors
    /// The link is broken.
    fn announce(&self, arrival: &Arrival, level: Visibility) -> Result<(), Error>;
    /// Sends a message after everything posted before.
    ///
    /// # Errors
    /// The link is broken.
    fn send(&self, message: &[u8]) -> Result<(), Error>;
    /// Tells the peer that this side is alive.
    ///
    /// # Errors
    /// The link is broken.
    fn send_progress(&self, counter: u64) -> Result<(), Error>;
    /// Whether a message counts as sent only once the peer has acknowledged it: [`LinkEvents::acknowledged`] tells.
    fn keeps_messages(&self) -> bool {
        false
    }
    /// Messages that were taken from the queue and not sent, or whose connection has broken before the peer has
    /// acknowledged them.
    fn unsent_messages(&self) -> usize {
        0
    }
    /// Sends what was kept over a break, after [`LinkEvents::resumed`]. By the thread that has the turn.
    fn go_on(&self) {}
    /// What an operation that does not go on waits for, as far as can be seen. From any thread; never waits.
    fn stalled_on(&self, op: &PostedOp) -> StallCause {
        let _ = op;
        StallCause::Transport
    }
    /// How long the peer has left a heartbeat unanswered, and asks for the next one; zero while it answers. `None`
    /// where it shares no word to beat with. From any thread; never waits.
    fn heartbeat(&self) -> Option<std::time::Duration> {
        None
    }
    /// Length of the pages of a region of the peer, where it is mapped here.
    fn granule_bytes(&self, region: crate::ids::RegionId) -> Option<u64> {
        let _ = region;
        None
    }
    /// Changes while the worker is busy with something of the peer.
    fn activity(&self) -> u64 {
        0
    }
    /// Whether the peer can still write here. Asked once the link is closed or down.
    fn quiesce(&self) -> Quiesce;
    /// Ends the connection: blocked calls return, the receive thread ends, no event comes after this
    /// returns except from a call that is under way on this very thread. Idempotent.
    fn close(&self);
    /// As [`Link::close`], for no longer than the deadline and a moment: `false` when the receive thread is inside of
    /// an event that does not return. It ends behind that event; what it may touch until then is not proven quiet.
    #[must_use]
    fn close_within(&self, deadline: crate::deadline::Deadline) -> bool {
        let _ = deadline;
        self.close();
        true
    }
}

/// The engine, as a link sees it. Called from the link's receive thread, or from a thread that attends to its ring;
/// none of these blocks for long.
pub trait LinkEvents: Send + Sync {
    /// Bytes of an operation have come as far as `level` in this process.
    fn arrived(&self, peer: PeerId, arrival: Arrival, level: Visibility);
    /// A message.
    fn message(&self, peer: PeerId, bytes: Bytes);
    /// The peer says that these slots of a pending operation are visible there.
    fn landed(&self, peer: PeerId, op: OpId, slots: Range<u64>) {
        let _ = (peer, op, slots);
    }
    /// Of a pending operation: what has landed was told, and nothing else of it will land.
    fn settled(&self, peer: PeerId, op: OpId) {
        let _ = (peer, op);
    }
    /// An operation that [`Link::post`] left pending is over.
    fn completed(&self, peer: PeerId, op: OpId, result: Result<Visibility, Error>);
    /// The peer is alive.
    fn progress(&self, peer: PeerId, counter: u64);
    /// The connection has broken, and the link tries to get another one. What is under way stays under way.
    fn suspended(&self, peer: PeerId, cause: Cause) {
        let _ = (peer, cause);
    }
    /// The link goes on over another connection: [`Link::go_on`] is to be called.
    fn resumed(&self, peer: PeerId) {
        let _ = peer;
    }
    /// The peer has so many more messages, of so many bytes.
    fn acknowledged(&self, peer: PeerId, message_count: usize, bytes: usize) {
        let _ = (peer, message_count, bytes);
    }
    /// Something that may have been sent before is sent again: a write of `op`, or a message.
    fn sent_again(&self, peer: PeerId, op: Option<OpId>) {
        let _ = (peer, op);
    }
    /// The peer has sent something that was handled before, and it was dropped.
    fn repeated(&self, peer: PeerId) {
        let _ = peer;
    }
    /// The connection has ended by itself. The link makes no further call.
    fn down(&self, peer: PeerId, cause: Cause, quiesce: Quiesce);
    /// The peer wants to read: the worker will call [`Link::serve`]. `false` when more requests than
    /// [`READ_WINDOW`] wait already, which no honest peer sends.
    #[must_use]
    fn asked(&self, peer: PeerId, request: ReadRequest) -> bool;
    /// Checks an operation of the peer against the registered pools and holds their regions.
    ///
    /// # Errors
    /// An unknown pool, a slot outside, a revoked or different registration: nothing may be touched.
    fn resolve(&self, peer: PeerId, runs: &[RemoteRun]) -> Result<Resolved, Error>;
    /// Threads that wait for something of this agent may attend to the ring of this peer; with `None` not any more.
    #[cfg(not(kv_loom))]
    fn attended(&self, peer: PeerId, ring: Option<Arc<dyn crate::attend::Station>>) {
        let _ = (peer, ring);
    }
    /// How long a receive thread looks for more before it sleeps.
    fn spin(&self) -> std::time::Duration {
        std::time::Duration::ZERO
    }
    /// A region of this side. The caller executes an operation that holds it.
    #[cfg(all(feature = "one-sided", not(kv_loom)))]
    fn region(&self, id: crate::ids::RegionId) -> Option<Arc<crate::mem::region::RegionCore>> {
        let _ = id;
        None
    }
}
