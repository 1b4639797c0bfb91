//! [`Agent`]: the handle that everything else is reached by.

#[cfg(not(kv_loom))]
pub(crate) mod address;
#[cfg(not(kv_loom))]
pub(crate) mod auth;
#[cfg(not(kv_loom))]
pub(crate) mod contact;
#[cfg_attr(kv_loom, allow(dead_code))]
mod encode;
pub(crate) mod events;
pub(crate) mod expect;
#[cfg_attr(kv_loom, allow(dead_code))]
pub(crate) mod fields;
#[cfg(all(any(test, feature = "fuzzing"), not(kv_loom)))]
#[allow(unreachable_pub)] // Reachable with the feature.
pub(crate) mod fuzz;
#[cfg(not(kv_loom))]
pub(crate) mod host;
#[cfg(not(kv_loom))]
mod links;
#[cfg_attr(kv_loom, allow(dead_code))]
pub(crate) mod metadata;
#[cfg(kv_loom)]
mod model;
mod post;
mod region;
#[cfg(all(feature = "status", not(kv_loom)))]
mod serve;
#[cfg_attr(kv_loom, allow(dead_code))]
pub(crate) mod wire;
#[cfg(all(test, not(kv_loom)))]
mod wire_tests;

use std::{
    fmt,
    task::{Context, Poll},
    time::Instant,
};

use bytes::Bytes;

pub use events::AgentEvent;
pub use expect::{Draining, Expectation};
#[cfg(kv_loom)]
pub use model::ModelPeer;
pub use post::{PostError, PostOptions};
pub use region::MemoryRegion;
#[cfg(not(kv_loom))]
pub use {
    address::Address,
    contact::{Contact, PathChoice},
    host::HostId,
};

use crate::{
    backend::BackendKind,
    barrier::Barrier,
    config::TransferConfig,
    deadline::Deadline,
    desc::DescriptorList,
    engine::{ArrivalSink, Engine, EngineParts, Op, PreparedTransfer, ShutdownReport, notify},
    error::{Cause, Error, ErrorKind},
    ids::{ChunkId, Epoch, Incarnation, PeerId, PoolId, StageId, WriterRank},
    mem::{Memory, PoolGeometry},
    obs::{Counters, Recorder},
    status::AgentStatus,
    sync::Arc,
};

/// What a receiver is told when every byte of an operation is visible in its process: the peer by a write,
/// this side by a read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrival {
    /// The flight.
    pub epoch: Epoch,
    /// The chunks that this operation completes.
    pub tickets: Vec<(StageId, ChunkId)>,
    /// Opaque to this crate; goes to the [`ArrivalSink`] of the flight.
    pub note: Bytes,
}

/// A connected process as this agent sees it.
#[derive(Clone, Debug)]
pub struct PeerInfo {
    /// The name it was built with.
    pub name: String,
    /// Which life of it this connection belongs to.
    pub incarnation: Incarnation,
    /// What carries the connection.
    pub backend: BackendKind,
    /// What its application says about itself.
    pub app_metadata: Bytes,
    /// The pools it had registered when it was connected.
    pub pools: Vec<RemotePoolInfo>,
    /// When something was last heard from it, a progress report or anything else.
    pub last_progress: Instant,
    /// Whether the connection stands.
    pub state: PeerState,
}

/// A pool of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemotePoolInfo {
    /// Its name there.
    pub pool: PoolId,
    /// Its slots.
    pub geometry: PoolGeometry,
}

/// Whether a connection stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerState {
    /// It does.
    Up,
    /// It has broken, and another one may take its place ([`AgentEvent::PeerSuspended`]).
    Suspended(Cause),
    /// It has ended and will not come back; a new connection gets another number.
    Down(Cause),
}

/// Makes an [`Agent`].
pub struct AgentBuilder {
    name: String,
    config: TransferConfig,
    app_metadata: Bytes,
    auth_token: Option<Vec<u8>>,
    #[cfg(all(feature = "one-sided", not(kv_loom)))]
    one_sided: crate::config::OneSided,
    recorder: Option<Arc<dyn Recorder>>,
    has_workers: bool,
}

/// One life of one participant: registered memory, connections, flights.
///
/// A clone is another handle of the same agent. When the last handle is dropped the agent shuts down as by
/// [`Agent::shutdown`] with [`TransferConfig::drop_deadline_ms`].
#[derive(Clone)]
pub struct Agent {
    owner: Arc<Owner>,
}

/// Shuts the engine down when the last handle goes; workers and links hold the engine, not this.
struct Owner {
    engine: Arc<Engine>,
    #[cfg(not(kv_loom))]
    listening: crate::sync::Mutex<Vec<Address>>,
}

impl AgentBuilder {
    /// Limits and intervals.
    pub fn config(mut self, config: TransferConfig) -> Self {
        self.config = config;
        self
    }

    /// Bytes that peers see in [`PeerInfo::app_metadata`].
    pub fn app_metadata(mut self, app_metadata: impl Into<Bytes>) -> Self {
        self.app_metadata = app_metadata.into();
        self
    }

    /// The secret that both sides of a connection beyond this host must know.
    pub fn auth_token(mut self, auth_token: Option<Vec<u8>>) -> Self {
        self.auth_token = auth_token;
        self
    }

    /// How connections over [`Address::Ucx`] are made.
    #[cfg(all(feature = "ucx", not(kv_loom)))]
    pub fn ucx(mut self, config: crate::config::UcxConfig) -> Self {
        self.one_sided.ucx = config;
        self
    }

    /// How connections over [`Address::Libfabric`] are made.
    #[cfg(all(feature = "libfabric", not(kv_loom)))]
    pub fn libfabric(mut self, config: crate::config::LibfabricConfig) -> Self {
        self.one_sided.libfabric = config;
        self
    }

    /// Gets every event.
    pub fn recorder(mut self, recorder: Arc<dyn Recorder>) -> Self {
        self.recorder = Some(recorder);
        self
    }

    /// No threads: queues are run by whoever owns the agent.
    #[cfg(any(kv_loom, feature = "sim", feature = "bare"))]
    pub(crate) fn without_workers(mut self) -> Self {
        self.has_workers = false;
        self
    }

    /// The agent, with a fresh incarnation.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for an empty or overlong name, for metadata over 1 MiB and for a
    /// capacity of zero; [`ErrorKind::System`] without a source of randomness.
    pub fn build(self) -> Result<Agent, Error> {
        self.config.check()?;
        if self.name.is_empty() || self.name.len() > metadata::NAME_LIMIT_BYTES {
            return Err(ErrorKind::InvalidArgument {
                what: "agent name",
                value: self.name,
            }
            .into());
        }
        if self.app_metadata.len() > metadata::APP_LIMIT_BYTES {
            let (bytes, limit) = (
                self.app_metadata.len() as u64,
                metadata::APP_LIMIT_BYTES as u64,
            );
            let what = "application metadata";
            return Err(ErrorKind::TooLong {
                what,
                bytes,
                limit_bytes: limit,
            }
            .into());
        }
        let engine = Engine::new(EngineParts {
            incarnation: draw_incarnation()?,
            name: self.name,
            config: self.config,
            app_metadata: self.app_metadata,
            auth_token: self.auth_token,
            #[cfg(all(feature = "one-sided", not(kv_loom)))]
            one_sided: self.one_sided,
            recorder: self.recorder,
            has_workers: self.has_workers,
        });
        Ok(Agent {
            owner: Arc::new(Owner {
                engine,
                #[cfg(not(kv_loom))]
                listening: Default::default(),
            }),
        })
    }
}

impl Agent {
    /// Starts to build an agent. The name is for people; peers tell lives apart by [`Incarnation`].
    pub fn builder(name: impl Into<String>) -> AgentBuilder {
        AgentBuilder {
            name: name.into(),
            config: TransferConfig::default(),
            app_metadata: Bytes::new(),
            auth_token: None,
            #[cfg(all(feature = "one-sided", not(kv_loom)))]
            one_sided: Default::default(),
            recorder: None,
            has_workers: true,
        }
    }

    /// Which life this is.
    pub fn incarnation(&self) -> Incarnation {
        self.engine().incarnation
    }

    /// The name it was built with.
    pub fn name(&self) -> &str {
        &self.engine().name
    }

    /// Makes memory available to transfers, as pools of equal slots. Peers that connect later learn of
    /// it; register before connecting.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidGeometry`] when a pool does not fit, [`ErrorKind::InvalidArgument`] for no
    /// pool, [`ErrorKind::Closed`] after a shutdown.
    pub fn register(
        &self,
        memory: Arc<Memory>,
        pools: &[PoolGeometry],
    ) -> Result<MemoryRegion, Error> {
        if self.engine().is_stopping() {
            return Err(ErrorKind::Closed.into());
        }
        let core = self.engine().regions.register(memory, pools)?;
        Ok(MemoryRegion::new(self.engine().clone(), core))
    }

    /// Listens until the agent is shut down. Whoever finishes the handshake becomes a peer
    /// ([`AgentEvent::PeerUp`]), whoever does not is closed, counted and named
    /// ([`AgentEvent::Refused`]). Gives back the bound address, with the port that the system chose.
    ///
    /// # Errors
    /// [`ErrorKind::AuthRequired`] for an address beyond this host without a token,
    /// [`ErrorKind::AddressInUse`], [`ErrorKind::InvalidArgument`], [`ErrorKind::System`],
    /// [`ErrorKind::Closed`] after a shutdown.
    #[cfg(not(kv_loom))]
    pub fn listen(&self, address: &Address) -> Result<Address, Error> {
        let bound = links::listen(self.engine(), address)?;
        self.owner.listening.lock().push(bound.clone());
        Ok(bound)
    }

    /// Connects to an agent that listens, one attempt. Blocks until the handshake is done; the peer then
    /// knows what was registered here before.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`] (retryable) when nobody listens, [`ErrorKind::VersionMismatch`] and
    /// [`ErrorKind::HandshakeRefused`] with the reason of either side, [`ErrorKind::PeerLost`] when the other
    /// one ended, [`ErrorKind::DeadlineExceeded`], [`ErrorKind::InvalidArgument`], [`ErrorKind::System`],
    /// [`ErrorKind::Closed`].
    #[cfg(not(kv_loom))]
    pub fn connect(&self, address: &Address, deadline: Deadline) -> Result<PeerId, Error> {
        links::connect(self.engine(), address, None, deadline)
    }

    /// Connects two agents of this process. Returns the number of `b` as `a` sees it, and of `a` as `b`
    /// sees it.
    ///
    /// # Errors
    /// [`ErrorKind::Closed`] when one of them is shut down, [`ErrorKind::System`] without a thread.
    #[cfg(not(kv_loom))]
    pub fn connect_local(a: &Self, b: &Self) -> Result<(PeerId, PeerId), Error> {
        crate::backend::local::connect(a.engine(), b.engine())
    }

    /// What is known of a connection; `None` for a number that was never given out, or long ago.
    pub fn peer(&self, peer: PeerId) -> Option<PeerInfo> {
        let peer = self.engine().peer(peer).ok()?;
        let pools = &peer.metadata.pools;
        Some(PeerInfo {
            name: peer.metadata.name.clone(),
            incarnation: peer.incarnation(),
            backend: peer.link.kind(),
            app_metadata: peer.metadata.app.clone(),
            pools: pools
                .iter()
                .map(|p| RemotePoolInfo {
                    pool: p.id,
                    geometry: p.geometry,
                })
                .collect(),
            last_progress: peer.last_progress(),
            state: match (peer.down(), peer.suspended()) {
                (Some((cause, _)), _) => PeerState::Down(cause),
                (None, Some(cause)) => PeerState::Suspended(cause),
                (None, None) => PeerState::Up,
            },
        })
    }

    /// Checks a transfer once, so that it can be posted many times: both lists name existing slots of
    /// equal size, pair by pair, no destination twice, and the remote list is for this incarnation.
    ///
    /// # Errors
    /// [`ErrorKind`] names the pair that does not fit, with its numbers. Nothing is retryable but
    /// [`ErrorKind::PeerDown`] after a new connection.
    pub fn prepare(
        &self,
        op: Op,
        local: &DescriptorList,
        remote: &DescriptorList,
        peer: PeerId,
    ) -> Result<PreparedTransfer, Error> {
        let peer = self.engine().peer(peer)?;
        if let Some((cause, _)) = peer.down() {
            return Err(peer.down_error(cause));
        }
        PreparedTransfer::check(self.engine(), &peer, op, local, remote)
    }

    /// Waits for the arrivals of a flight: from now on, completions of `barrier`'s epoch by `writers` are
    /// weighed and redeemed. Call it before anybody is told where to write. `sink` hears of each arrival
    /// first.
    ///
    /// A writer that is lost before all of its chunks have landed fails every stage at once.
    ///
    /// The writer of chunks that this side *reads* is the peer they are read from. Count the reads in
    /// [`Expectation::ledger`]; then nothing else of that writer is to be awaited, and
    /// [`Draining::writer_answered`] may say so once the last read is posted.
    ///
    /// # Errors
    /// [`ErrorKind::WriterMismatch`] unless `writers` are exactly the writers of the plan,
    /// [`ErrorKind::EpochInUse`], [`ErrorKind::UnknownPeer`], [`ErrorKind::PeerDown`].
    pub fn expect(
        &self,
        barrier: &Arc<Barrier>,
        writers: &[(PeerId, WriterRank)],
        sink: Option<Arc<dyn ArrivalSink>>,
    ) -> Result<Expectation, Error> {
        if self.engine().is_stopping() {
            return Err(ErrorKind::Closed.into());
        }
        Expectation::new(self.engine(), barrier, writers, sink)
    }

    /// Queues a control message: in order with everything posted to that peer before, delivered once, also over a
    /// connection that breaks and is made again in time ([`TransferConfig::reconnect_ms`]). Never blocks.
    ///
    /// # Errors
    /// [`ErrorKind::QueueFull`] (retryable) when too many wait or are not acknowledged, [`ErrorKind::TooLong`], [`ErrorKind::UnknownPeer`],
    /// [`ErrorKind::PeerDown`].
    pub fn send(&self, peer: PeerId, message: impl AsRef<[u8]>) -> Result<(), Error> {
        let message = message.as_ref();
        if message.len() >= wire::MESSAGE_LIMIT_BYTES {
            let (bytes, limit) = (message.len() as u64, wire::MESSAGE_LIMIT_BYTES as u64 - 1);
            return Err(ErrorKind::TooLong {
                what: "message",
                bytes,
                limit_bytes: limit,
            }
            .into());
        }
        self.engine()
            .peer(peer)?
            .queue
            .push_frame(notify::encode_message(message))
    }

    /// The next event; blocks until there is one, the agent is shut down, or the deadline passes. Meanwhile this
    /// thread takes what peers of this host send, as in [`Barrier::wait`], here whichever peers they are: while a
    /// sink that it calls runs, what up to seven others have sent waits.
    pub fn next_event(&self, deadline: Deadline) -> Option<AgentEvent> {
        self.engine().wait_for_event(deadline)
    }

    /// [`Agent::next_event`] for a task: without an event, the waker is called when one may be there.
    /// `None` after a shutdown, when all events have been taken.
    pub fn poll_event(&self, cx: &mut Context<'_>) -> Poll<Option<AgentEvent>> {
        self.engine().events.poll(cx, |events| events.pop())
    }

    /// Says "I am alive and doing something" to every peer, at most once per
    /// [`TransferConfig::progress_interval_ms`]. Never blocks; call it as often as is convenient.
    pub fn report_progress(&self) {
        self.engine().report_progress();
    }

    /// What was counted so far.
    pub fn counters(&self) -> Counters {
        self.engine().sweep_regions();
        let mut counters = self.engine().counters.snapshot();
        let regions = self.engine().regions.all();
        counters.draining_regions =
            regions.iter().filter(|region| region.is_revoked()).count() as u64;
        counters
    }

    /// What is in flight at this moment. Takes every lock of the agent once, one after the other, and reads
    /// `/proc/self/smaps`: for people and tools, not for a loop.
    #[must_use]
    pub fn status(&self) -> AgentStatus {
        self.engine().status()
    }

    /// What this agent has done, as Prometheus text (format 0.0.4, `text/plain; version=0.0.4`). Serve it
    /// under an own path for each agent: the names do not say which one it was.
    ///
    /// Times are in seconds, amounts of data in bytes. The label `backend` is the path that the bytes
    /// took; a series of it appears with its first connection. What a build or a version does not have
    /// has no series.
    #[cfg(all(feature = "metrics", not(kv_loom)))]
    #[must_use]
    pub fn metrics_text(&self) -> String {
        let engine = self.engine();
        engine
            .metrics
            .text(&self.counters(), &engine.oldest_in_flight())
    }

    /// Ends the agent: nothing is admitted any more, flights that miss something fail with
    /// [`Cause::Shutdown`], queues are drained, connections closed, threads joined; all of it within the
    /// deadline. A peer that is suspended with messages for it gets half of the time to come back; what it does not
    /// take is in the report. A second call finds little to do.
    pub fn shutdown(&self, deadline: Deadline) -> ShutdownReport {
        self.engine().shutdown(deadline)
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.owner.engine
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let deadline = Deadline::after_ms(self.engine.config.drop_deadline_ms);
        // The report names leaks, which stay counted; nobody is left to read it here.
        let _ = self.engine.shutdown(deadline);
    }
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent")
            .field("name", &self.name())
            .field("incarnation", &self.incarnation())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for AgentBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgentBuilder")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

fn draw_incarnation() -> Result<Incarnation, Error> {
    let mut bytes = [0u8; 16];
    getrandom::fill(&mut bytes).map_err(|error| {
        let errno = error.raw_os_error().unwrap_or(0);
        Error::with_source(
            ErrorKind::System {
                call: "getrandom",
                errno,
            },
            error,
        )
    })?;
    Ok(Incarnation(u128::from_le_bytes(bytes)))
}
