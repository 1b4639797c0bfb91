//! The engine behind an agent: peers, their workers, flights, events, shutdown.
//!
//! **Threads.** Each peer has one worker (`worker.rs`), which is the only caller of its link, and one
//! receive thread, which belongs to the link and calls `progress.rs`. Both sleep when there is nothing to
//! do. **What is protected by what.** `peers`, `flights`, `events`, `progress` each have one mutex.
//! **Lock order.** All are leaves: whoever needs two things copies an `Arc` out of the first. No lock is
//! held over a call into a link, a sink, a recorder, or over a copy.

pub(crate) mod flight;
pub(crate) mod handle;
mod measure;
pub(crate) mod notify;
pub(crate) mod peer;
pub(crate) mod prepared;
mod progress;
#[allow(unreachable_pub)] // Reachable for the models.
pub mod queue;
pub(crate) mod quiesce;
pub(crate) mod regions;
#[cfg(all(test, not(kv_loom)))]
#[allow(clippy::unwrap_used)]
mod seam_tests;
#[allow(unreachable_pub)] // Reachable for the models.
pub mod session;
mod shutdown;
pub(crate) mod stalls;
mod status;
mod worker;

use std::{collections::BTreeMap, time::Instant};

use bytes::Bytes;

pub(crate) use crate::op::Op;
pub use flight::ArrivalSink;
pub use handle::{Status, TransferHandle};
pub use prepared::PreparedTransfer;
pub use quiesce::{FlightLedger, Outstanding, Quiesced, Unquiet};
pub use shutdown::ShutdownReport;

use self::{
    flight::Flight,
    peer::Peer,
    queue::{FrameLimits, Queue},
    regions::RegionTable,
};
use crate::{
    agent::{
        events::{AgentEvent, EventQueue},
        metadata::{AgentMetadata, PoolInfo, RegionInfo},
    },
    arc_dyn,
    backend::{Link, LinkEvents},
    barrier::waiters::Waiters,
    config::TransferConfig,
    error::{Cause, Error, ErrorKind},
    ids::{Epoch, Incarnation, PeerId, PoolId, RegionId},
    mem::{
        Memory,
        region::{RegionCore, RegionHold},
        span::PoolSpan,
    },
    obs::{CounterCells, Event, Recorder, RefusedField},
    sync::{Arc, AtomicBool, AtomicU64, Mutex, Ordering, ProcessNumbers, thread},
};

/// Connections are numbered through the process: what one agent holds of a peer means nothing to another.
static PEERS: ProcessNumbers = ProcessNumbers::new();

/// Ended connections that stay known, so that a late question gets the cause.
const ENDED_PEERS_KEPT: usize = 1024;

pub(crate) struct Engine {
    pub(crate) name: String,
    pub(crate) incarnation: Incarnation,
    pub(crate) config: TransferConfig,
    pub(crate) app_metadata: Bytes,
    #[cfg_attr(kv_loom, allow(dead_code))]
    pub(crate) auth_token: Option<Vec<u8>>,
    #[cfg(all(feature = "one-sided", not(kv_loom)))]
    pub(crate) one_sided: crate::config::OneSided,
    /// Where sessions wait for their connectors, if any outlives its connection.
    #[cfg(not(kv_loom))]
    pub(crate) desk: Option<Arc<crate::backend::tcp::session::Desk>>,
    pub(crate) counters: CounterCells,
    pub(crate) regions: RegionTable,
    pub(crate) flights: Mutex<BTreeMap<Epoch, Arc<Flight>>>,
    pub(crate) events: Waiters<EventQueue>,
    /// Rings that a thread attends to which waits for something of this agent.
    #[cfg(not(kv_loom))]
    pub(crate) attendance: Arc<crate::attend::Attendance>,
    /// `false`: no threads; whoever owns the engine calls [`Engine::run_queued`].
    has_workers: bool,
    recorder: Option<Arc<dyn Recorder>>,
    #[cfg(all(feature = "metrics", not(kv_loom)))]
    pub(crate) metrics: Arc<crate::obs::metrics::Metrics>,
    peers: Mutex<Peers>,
    next_op: AtomicU64,
    progress: Mutex<ProgressClock>,
    is_stopping: AtomicBool,
    stalls: stalls::Stalls,
    workers: Waiters<WorkerSet>,
    at_shutdown: Mutex<Vec<ShutdownHook>>,
}

type ShutdownHook = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Peers {
    by_id: BTreeMap<PeerId, Arc<Peer>>,
}

#[derive(Default)]
struct ProgressClock {
    counter: u64,
    sent_at: Option<Instant>,
}

#[derive(Default)]
struct WorkerSet {
    running: usize,
    handles: Vec<thread::JoinHandle<()>>,
}

/// What an agent tells a peer in the handshake. While it lives, no region of it can be closed, so a
/// revocation cannot pass by a connection that is being made.
pub(crate) struct Described {
    pub(crate) metadata: AgentMetadata,
    /// Region, registration generation, memory: for peers that map it.
    #[cfg_attr(kv_loom, allow(dead_code))]
    pub(crate) memories: Vec<(RegionId, u32, Arc<Memory>)>,
    _holds: Vec<RegionHold>,
}

/// The engine as links see it.
pub(crate) struct EngineEvents(pub(crate) Arc<Engine>);

pub(crate) struct EngineParts {
    pub(crate) name: String,
    pub(crate) incarnation: Incarnation,
    pub(crate) config: TransferConfig,
    pub(crate) app_metadata: Bytes,
    pub(crate) auth_token: Option<Vec<u8>>,
    #[cfg(all(feature = "one-sided", not(kv_loom)))]
    pub(crate) one_sided: crate::config::OneSided,
    pub(crate) recorder: Option<Arc<dyn Recorder>>,
    pub(crate) has_workers: bool,
}

impl Engine {
    pub(crate) fn new(parts: EngineParts) -> Arc<Self> {
        let events = EventQueue::new(parts.config.event_capacity);
        #[cfg(not(kv_loom))]
        let desk = crate::backend::tcp::session::Desk::new(&parts.config);
        #[cfg(not(kv_loom))]
        let spin = std::time::Duration::from_micros(parts.config.spin_us);
        Arc::new(Self {
            #[cfg(not(kv_loom))]
            desk,
            name: parts.name,
            incarnation: parts.incarnation,
            config: parts.config,
            app_metadata: parts.app_metadata,
            auth_token: parts.auth_token,
            #[cfg(all(feature = "one-sided", not(kv_loom)))]
            one_sided: parts.one_sided,
            counters: CounterCells::new(),
            regions: RegionTable::default(),
            flights: Mutex::new(BTreeMap::new()),
            events: Waiters::new(events),
            #[cfg(not(kv_loom))]
            attendance: Arc::new(crate::attend::Attendance::new(spin)),
            has_workers: parts.has_workers,
            recorder: parts.recorder,
            #[cfg(all(feature = "metrics", not(kv_loom)))]
            metrics: Arc::default(),
            peers: Mutex::new(Peers::default()),
            next_op: AtomicU64::new(0),
            progress: Mutex::new(ProgressClock::default()),
            is_stopping: AtomicBool::new(false),
            stalls: stalls::Stalls::new(),
            workers: Waiters::new(WorkerSet::default()),
            at_shutdown: Mutex::new(Vec::new()),
        })
    }

    /// What a handshake tells the peer. Keep it until [`Engine::attach`] has returned.
    pub(crate) fn describe(&self) -> Described {
        let mut described = Described {
            metadata: AgentMetadata {
                incarnation: self.incarnation,
                name: self.name.clone(),
                regions: Vec::new(),
                pools: Vec::new(),
                app: self.app_metadata.clone(),
            },
            memories: Vec::new(),
            _holds: Vec::new(),
        };
        for region in self.regions.all() {
            // Held first: a region that is held has its memory.
            let Some(hold) = RegionCore::hold(&region) else {
                continue;
            };
            let Some(memory) = region.memory() else {
                continue;
            };
            described._holds.push(hold);
            described.metadata.regions.push(RegionInfo {
                id: region.id,
                generation: region.generation,
                len_bytes: memory.len_bytes(),
                kind: memory.kind(),
            });
            described
                .memories
                .push((region.id, region.generation, memory));
            let pool = |(id, span): &(PoolId, PoolSpan)| PoolInfo {
                id: *id,
                region: region.id,
                geometry: *span.geometry(),
            };
            described
                .metadata
                .pools
                .extend(region.pools.iter().map(pool));
        }
        described
    }

    /// Takes an established link into service: a worker, a number, and `PeerUp` before any other event
    /// of it. `told` is what the handshake told the peer about this agent.
    pub(crate) fn attach(
        this: &Arc<Self>,
        link: Arc<dyn Link>,
        remote: AgentMetadata,
        told: &Described,
    ) -> Result<PeerId, Error> {
        let peer = {
            let mut peers = this.peers.lock();
            let Some(number) = PEERS.take(1) else {
                link.close();
                return Err(ErrorKind::Closed.into());
            };
            let id = PeerId(number);
            let frames = FrameLimits {
                capacity: this.config.message_capacity,
                bytes: this.config.message_bytes,
                are_kept: link.keeps_messages(),
            };
            let queue = Queue::with_frames(id, this.config.queue_capacity, frames);
            let peer = Arc::new(Peer::new(id, remote, link, queue));
            peers.by_id.insert(id, peer.clone());
            peer
        };
        let id = peer.id;
        this.record(|| Event::PeerUp {
            peer: id,
            incarnation: peer.incarnation(),
            backend: peer.link.kind(),
        });
        this.events
            .update(|events| events.push_always(AgentEvent::PeerUp { peer: id }));
        for (region, ..) in &told.memories {
            if let Some(region) = this
                .regions
                .get(*region)
                .filter(|region| region.is_revoked())
            {
                this.ask_to_let_go(&region, &peer);
            }
        }
        // The peer has been told where to write, so an agent that stops must remember it.
        if this.is_stopping() {
            this.fail_peer(&peer, Cause::Shutdown);
            return Err(ErrorKind::Closed.into());
        }
        let started = Self::spawn_worker(this, &peer).and_then(|()| {
            peer.link
                .start(id, arc_dyn!(EngineEvents(this.clone()) => dyn LinkEvents))
        });
        if let Err(error) = started {
            this.fail_peer(&peer, Cause::lost(&error));
            return Err(error);
        }
        // A shutdown that began meanwhile has not seen this peer.
        if this.is_stopping() {
            this.fail_peer(&peer, Cause::Shutdown);
            return Err(ErrorKind::Closed.into());
        }
        Ok(id)
    }

    /// Ends a connection that is not to be used.
    #[cfg(not(kv_loom))]
    pub(crate) fn drop_peer(&self, id: PeerId, cause: Cause) {
        if let Ok(peer) = self.peer(id) {
            self.fail_peer(&peer, cause);
        }
    }

    /// Runs what is queued for a peer, on this thread. For engines without workers.
    #[cfg(any(kv_loom, feature = "sim"))]
    pub(crate) fn run_queued(&self, id: PeerId) {
        let Ok(peer) = self.peer(id) else { return };
        while let Some(item) = peer.queue.try_next() {
            self.execute(&peer, item);
        }
    }

    pub(crate) fn peer(&self, id: PeerId) -> Result<Arc<Peer>, Error> {
        let peer = self.peers.lock().by_id.get(&id).cloned();
        peer.ok_or_else(|| ErrorKind::UnknownPeer { peer: id }.into())
    }

    pub(crate) fn all_peers(&self) -> Vec<Arc<Peer>> {
        self.peers.lock().by_id.values().cloned().collect()
    }

    pub(crate) fn next_op(&self) -> crate::ids::OpId {
        crate::ids::OpId(self.next_op.fetch_add(1, Ordering::Relaxed))
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.is_stopping.load(Ordering::Acquire)
    }

    /// Tells every peer that this side is alive, unless it was told a moment ago.
    pub(crate) fn report_progress(&self) {
        let counter = {
            let mut clock = self.progress.lock();
            let now = Instant::now();
            let interval = self.config.progress_interval();
            if clock
                .sent_at
                .is_some_and(|at| now.duration_since(at) < interval)
            {
                return;
            }
            clock.sent_at = Some(now);
            clock.counter += 1;
            clock.counter
        };
        for peer in self.all_peers() {
            peer.queue.push_progress(counter);
        }
    }

    /// Runs `hook` when the agent shuts down: how a listener is told to stop.
    #[cfg_attr(kv_loom, allow(dead_code))]
    pub(crate) fn on_shutdown(&self, hook: impl FnOnce() + Send + 'static) {
        self.at_shutdown.lock().push(Box::new(hook));
        // A shutdown that ran before the push has not seen the hook.
        if self.is_stopping() {
            self.run_shutdown_hooks();
        }
    }

    pub(crate) fn run_shutdown_hooks(&self) {
        let hooks = std::mem::take(&mut *self.at_shutdown.lock());
        for hook in hooks {
            hook();
        }
    }

    /// A connection that was refused before it became a peer.
    #[cfg_attr(kv_loom, allow(dead_code))]
    pub(crate) fn refuse(&self, address: String, field: RefusedField, reason: String) {
        crate::obs::add(&self.counters.refused_connections, 1);
        self.record(|| Event::ConnectionRefused { field });
        self.events
            .update(|events| events.push(AgentEvent::Refused { address, reason }));
    }

    pub(crate) fn record(&self, event: impl FnOnce() -> Event) {
        let has_metrics = cfg!(all(feature = "metrics", not(kv_loom)));
        if self.recorder.is_none() && !cfg!(feature = "tracing") && !has_metrics {
            return;
        }
        let event = event();
        #[cfg(all(feature = "metrics", not(kv_loom)))]
        self.metrics.record(&event);
        #[cfg(feature = "tracing")]
        tracing::debug!(target: "kvgate_transfer", agent = %self.name, ?event);
        if let Some(recorder) = &self.recorder {
            recorder.record(&event);
        }
    }

    /// Forgets the oldest ended connections, but none whose peer may still write: a region that is closed
    /// later must know of it (I-21).
    fn trim_ended_peers(&self) {
        let is_ended = |peer: &Arc<Peer>| peer.is_down();
        let ended: Vec<_> = self.all_peers().into_iter().filter(is_ended).collect();
        let surplus = ended.len().saturating_sub(ENDED_PEERS_KEPT);
        let oldest = ended.iter().filter(|peer| !peer.may_still_write());
        let oldest: Vec<PeerId> = oldest.take(surplus).map(|peer| peer.id).collect();
        let mut peers = self.peers.lock();
        for id in oldest {
            peers.by_id.remove(&id);
        }
    }

    /// At the shutdown, but for those that may still write (I-21).
    pub(super) fn forget_peers(&self) {
        let ended = self.all_peers();
        let over = ended.iter().filter(|peer| !peer.may_still_write());
        let over: Vec<PeerId> = over.map(|peer| peer.id).collect();
        let mut peers = self.peers.lock();
        for id in over {
            peers.by_id.remove(&id);
        }
    }
}
