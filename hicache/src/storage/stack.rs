//! [`Storage`]: the tiers, their workers, and what both share.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::time::{Duration, Instant};

use kvgate_kvcache::Hit;
use kvgate_kvcache::identity::{BlockKey, KeyChain, Namespace};
use kvgate_kvcache::schema::PAGE_TOKENS;
use kvgate_transfer::Deadline;
use kvgate_transfer::sync::{Arc, AtomicBool, Mutex, Ordering, thread};

use super::fetch::{self, Fetch, FetchJob};
use super::gate::TierGate;
use super::store::{self, StoreJob};
use super::{
    Claims, CostConfig, CostModel, CostRates, Queue, StorageCounts, StorageTierCounts, TierLimits,
};
use crate::error::{Error, ErrorKind};
use crate::host::HostLease;
use crate::record::RecordShape;
use crate::side::Side;
use crate::tier::{Tier, check_tier};

/// Most ends whose origin or sightings are remembered. What is forgotten costs a figure or a store, no data.
const REMEMBERED_ENDS: usize = 1 << 16;

/// How far away a tier is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// On this machine.
    Local,
    /// Behind a network.
    Remote,
}

/// One storage tier.
#[derive(Clone)]
pub struct StorageTier {
    /// The tier.
    pub tier: Arc<dyn Tier>,
    /// Where it is.
    pub place: Place,
}

/// Which prefixes of the host tier are stored, and when.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WritePolicy {
    /// Every one, when it has come into the host tier.
    #[default]
    WriteThrough,
    /// Those that were seen so often: the backup is one sighting, every lookup that goes on from it another.
    Selective {
        /// Sightings; 2 is admission by second sight.
        sightings: u32,
    },
    /// When the host tier runs short of room, oldest first, and at the shutdown. Best effort: what the host tier gives up
    /// before is not stored.
    WriteBack,
}

/// How long a lookup waits for the storage tiers. Its own deadline ends it in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefetchPolicy {
    /// Not at all: a fetch goes on for whoever asks next. For hosts that ask for a prefix when its request comes in
    /// ([`crate::Hicache::prefetch`]) and look it up when its turn has come.
    BestEffort,
    /// As long as the deadline of the lookup allows.
    Wait,
    /// A time that grows with what is asked for. Then the fetch begins no further read, and publishes what it has.
    Timeout {
        /// For any prefix, in milliseconds.
        base_ms: u64,
        /// For every 1,024 tokens, in milliseconds.
        per_1024_tokens_ms: u64,
    },
}

impl Default for PrefetchPolicy {
    /// 1 s, and 0.25 s for every 1,024 tokens.
    fn default() -> PrefetchPolicy {
        PrefetchPolicy::Timeout {
            base_ms: 1_000,
            per_1024_tokens_ms: 250,
        }
    }
}

/// How the storage tiers are used.
#[derive(Clone)]
pub struct StorageConfig {
    /// The tiers, nearest first.
    pub tiers: Vec<StorageTier>,
    /// What is stored.
    pub write: WritePolicy,
    /// How long a lookup waits.
    pub prefetch: PrefetchPolicy,
    /// Whether what came from a tier is stored in those before it too.
    pub has_promotion: bool,
    /// Tokens that a fetch must bring at least; fewer are not worth it.
    pub least_tokens: u32,
    /// Prefixes that may wait to be stored. Each keeps its pages of the host tier.
    pub store_queue: usize,
    /// Lookups that may wait for a worker.
    pub fetch_queue: usize,
    /// Threads that store, at least 1. Several of them share the syncs of a log.
    pub store_threads: usize,
    /// Threads that fetch, at least 1.
    pub fetch_threads: usize,
    /// Time that one record may take to be stored, in milliseconds.
    pub store_deadline_ms: u64,
    /// Whether a prefix is loaded or computed is decided by measured rates; `None`: it is always loaded.
    pub cost: Option<CostConfig>,
    /// What each tier may take and give, nearest first. Those behind the last of these have no limit.
    pub limits: Vec<TierLimits>,
}

impl StorageConfig {
    /// These tiers, nearest first, and the defaults: write-through, [`PrefetchPolicy::default`], promotion, two threads
    /// each way, loads weighed, no limits.
    pub fn new(tiers: Vec<StorageTier>) -> StorageConfig {
        StorageConfig {
            tiers,
            write: WritePolicy::default(),
            prefetch: PrefetchPolicy::default(),
            has_promotion: true,
            least_tokens: PAGE_TOKENS,
            store_queue: 32,
            fetch_queue: 64,
            store_threads: 2,
            fetch_threads: 2,
            store_deadline_ms: 10_000,
            cost: Some(CostConfig::default()),
            limits: Vec::new(),
        }
    }
}

/// What an orderly end left.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StorageEnd {
    /// Whether every store that was begun is over.
    pub is_drained: bool,
    /// Prefixes that were not stored any more.
    pub dropped: u64,
    /// The last counts of the storage tiers.
    pub counts: StorageCounts,
    /// The last rates by which loads were weighed, if they were.
    pub rates: Option<CostRates>,
}

/// What the workers and the callers share.
pub(super) struct Shared {
    pub(super) config: StorageConfig,
    pub(super) namespace: Namespace,
    pub(super) host: Arc<Side>,
    pub(super) block: RecordShape,
    pub(super) claims: Arc<Claims>,
    pub(super) stores: Queue<StoreJob>,
    pub(super) fetches: Queue<FetchJob>,
    /// Set once nothing more is to be begun.
    pub(super) is_ending: AtomicBool,
    /// Set when a worker is still inside a tier at the end: nobody waits for the workers any more.
    is_left: AtomicBool,
    pub(super) memory: Mutex<Memory>,
    pub(super) counts: Mutex<StorageCounts>,
    pub(super) cost: Option<CostModel>,
    /// One for each tier.
    pub(super) gates: Vec<TierGate>,
}

/// What is remembered of prefixes. **Lock order.** A leaf, like that of the counts.
#[derive(Default)]
pub(super) struct Memory {
    /// Fetches that wait or run, by the last block that they may bring.
    pub(super) flying: HashMap<BlockKey, Arc<Fetch>>,
    /// Stores that wait or run, and since when; by a number of their own.
    storing: BTreeMap<u64, Instant>,
    next_store: u64,
    /// Ends that came out of a tier and nobody has gone on from yet, with the number of the tier.
    arrivals: HashMap<BlockKey, usize>,
    sightings: HashMap<BlockKey, u32>,
    /// Prefixes of the host tier that are not stored.
    dirty: VecDeque<Arc<[u32]>>,
}

impl Memory {
    fn begin_store(&mut self) -> u64 {
        let number = self.next_store;
        self.next_store += 1;
        self.storing.insert(number, Instant::now());
        number
    }
}

/// The storage tiers of one cache. Dropped without a shutdown, it begins nothing more and waits for what its workers have
/// begun, each record at most as long as a tier is allowed to take.
pub(crate) struct Storage {
    shared: Arc<Shared>,
    workers: Vec<thread::JoinHandle<()>>,
}

impl Storage {
    /// # Errors
    /// `InvalidConfig` without a tier or a thread, `ComponentRefused` for a tier that cannot hold every record,
    /// `Cache` for a namespace that is not that of the host tier, `Unavailable` when no thread can be had.
    pub(crate) fn start(
        host: &Arc<Side>,
        namespace: Namespace,
        config: StorageConfig,
    ) -> Result<Storage, Error> {
        for (field, value) in [
            ("tiers", config.tiers.len()),
            ("store_threads", config.store_threads),
            ("fetch_threads", config.fetch_threads),
        ] {
            if value == 0 {
                let expected = "1 and more".to_owned();
                let value = 0;
                return Err(Error::new(ErrorKind::InvalidConfig {
                    field,
                    value,
                    expected,
                }));
            }
        }
        let schema = host.pools().schema();
        for StorageTier { tier, .. } in &config.tiers {
            check_tier(&**tier, schema, PAGE_TOKENS)?;
        }
        let tier_counts = |tier: &StorageTier| StorageTierCounts {
            name: tier.tier.name().to_owned(),
            ..StorageTierCounts::default()
        };
        let counts = StorageCounts {
            tiers: config.tiers.iter().map(tier_counts).collect(),
            ..StorageCounts::default()
        };
        let shared = Arc::new(Shared {
            block: RecordShape::block(schema, PAGE_TOKENS)?,
            claims: Arc::new(Claims::new()),
            stores: Queue::new(config.store_queue),
            fetches: Queue::new(config.fetch_queue),
            is_ending: AtomicBool::new(false),
            is_left: AtomicBool::new(false),
            memory: Mutex::new(Memory::default()),
            counts: Mutex::new(counts),
            cost: config
                .cost
                .map(|cost| CostModel::new(cost, config.tiers.len())),
            gates: gates_of(&config),
            host: Arc::clone(host),
            namespace,
            config,
        });
        let mut storage = Storage {
            shared,
            workers: Vec::new(),
        };
        let (stores, fetches) = {
            let config = &storage.shared.config;
            (config.store_threads, config.fetch_threads)
        };
        for _ in 0..stores {
            storage.spawn("kvgate store", store::work)?;
        }
        for _ in 0..fetches {
            storage.spawn("kvgate fetch", fetch::work)?;
        }
        Ok(storage)
    }

    fn spawn(&mut self, name: &str, work: fn(&Shared)) -> Result<(), Error> {
        let shared = Arc::clone(&self.shared);
        let worker = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || work(&shared));
        let worker = worker.map_err(|error| {
            Error::new(ErrorKind::Unavailable {
                store: name.to_owned(),
                reason: error.to_string(),
            })
        })?;
        self.workers.push(worker);
        Ok(())
    }

    /// Begins to bring the longest prefix of `tokens` that is worth it into the host tier, or joins a fetch of it.
    /// `None` when there is nothing to bring or no worker for it.
    pub(crate) fn prefetch(&self, tokens: &[u32], known_tokens: u32) -> Option<Arc<Fetch>> {
        fetch::begin(&self.shared, tokens, known_tokens)
    }

    /// Brings what is more than `known_tokens`, and waits for it as the policy says, at most until `deadline`.
    pub(crate) fn bring(&self, tokens: &[u32], known_tokens: u32, deadline: Deadline) {
        let Some(fetch) = self.prefetch(tokens, known_tokens) else {
            return;
        };
        let until = match self.shared.config.prefetch {
            PrefetchPolicy::BestEffort => return,
            PrefetchPolicy::Wait => deadline,
            PrefetchPolicy::Timeout { .. } => deadline.min(fetch.deadline()),
        };
        if fetch.wait(until).is_none() {
            // The wait ends here; the slots are kept until the read is over.
            self.shared.counts.lock().fetches.late += 1;
        }
    }

    /// A prefix has come into the host tier.
    pub(crate) fn landed(&self, tokens: &[u32]) {
        match self.shared.config.write {
            WritePolicy::WriteThrough => self.store(tokens),
            WritePolicy::Selective { .. } => self.sighted(tokens),
            WritePolicy::WriteBack => {
                let mut memory = self.shared.memory.lock();
                if memory.dirty.len() == REMEMBERED_ENDS {
                    memory.dirty.pop_front();
                }
                memory.dirty.push_back(tokens.into());
            }
        }
    }

    /// A request went on from the prefix that is exactly `tokens`, or it was backed up.
    pub(crate) fn sighted(&self, tokens: &[u32]) {
        let WritePolicy::Selective { sightings } = self.shared.config.write else {
            return;
        };
        let Some(end) = self.end_of(tokens) else {
            return;
        };
        let mut memory = self.shared.memory.lock();
        if memory.sightings.len() >= REMEMBERED_ENDS {
            // Whoever comes often is soon counted again.
            memory.sightings.clear();
        }
        let seen = memory.sightings.entry(end).or_default();
        *seen = seen.saturating_add(1);
        let is_due = *seen >= sightings;
        if is_due {
            memory.sightings.remove(&end);
        }
        drop(memory);
        if is_due {
            self.store(tokens);
        }
    }

    /// Puts a prefix of the host tier into the queue. What is there already is found out by the worker.
    fn store(&self, tokens: &[u32]) {
        self.shared.store(tokens, self.shared.config.tiers.len());
    }

    /// With [`WritePolicy::WriteBack`]: stores the oldest prefixes while the host tier is short of room.
    pub(crate) fn relieve(&self) {
        if self.shared.config.write != WritePolicy::WriteBack {
            return;
        }
        let pages = self.shared.host.pools().stats().pages;
        if u64::from(pages.free) * 4 >= u64::from(pages.capacity) {
            return;
        }
        let oldest = self.shared.memory.lock().dirty.pop_front();
        if let Some(tokens) = oldest {
            self.store(&tokens);
        }
    }

    /// The place that the prefix of exactly `tokens` came from, for the first one who goes on from it.
    pub(crate) fn take_origin(&self, tokens: &[u32]) -> Option<Place> {
        if self.shared.memory.lock().arrivals.is_empty() {
            return None;
        }
        let end = self.end_of(tokens)?;
        let tier = self.shared.memory.lock().arrivals.remove(&end)?;
        let mut counts = self.shared.counts.lock();
        counts.tiers[tier].hits += 1;
        counts.tiers[tier].hit_tokens += tokens.len() as u64;
        Some(self.shared.config.tiers[tier].place)
    }

    fn end_of(&self, tokens: &[u32]) -> Option<BlockKey> {
        KeyChain::of(&self.shared.namespace, tokens)
            .keys()
            .last()
            .copied()
    }

    /// Counts since the start.
    pub(crate) fn counts(&self) -> StorageCounts {
        let mut counts = self.shared.counts.lock().clone();
        for (tier, gate) in counts.tiers.iter_mut().zip(&self.shared.gates) {
            (tier.today_bytes, tier.bytes_per_day) = gate.wear();
        }
        counts
    }

    /// A prompt was computed.
    pub(crate) fn note_prefill(&self, tokens: u32, elapsed: Duration) {
        if let Some(cost) = &self.shared.cost {
            cost.note_prefill(tokens, elapsed);
        }
    }

    /// The rates by which loads are weighed; `None` when they are not.
    pub(crate) fn rates(&self) -> Option<CostRates> {
        self.shared.cost.as_ref().map(CostModel::rates)
    }

    /// The tiers, nearest first.
    pub(crate) fn tiers(&self) -> &[StorageTier] {
        &self.shared.config.tiers
    }

    /// Stores and fetches that wait or run.
    pub(crate) fn open(&self) -> (usize, usize) {
        let sum = |(waiting, running): (usize, usize)| waiting + running;
        (
            sum(self.shared.stores.counts()),
            sum(self.shared.fetches.counts()),
        )
    }

    /// Ages of the oldest store and the oldest fetch that wait or run.
    pub(crate) fn oldest(&self) -> (Option<Duration>, Option<Duration>) {
        let memory = self.shared.memory.lock();
        let stores = memory.storing.values().map(Instant::elapsed).max();
        let fetches = memory.flying.values().map(|fetch| fetch.age()).max();
        (stores, fetches)
    }

    /// Blocks until nothing is on its way in or out. `false` at the deadline, which changes nothing.
    pub(crate) fn wait_idle(&self, deadline: Deadline) -> bool {
        // A fetch may leave a store behind.
        self.shared.fetches.wait_idle(deadline) && self.shared.stores.wait_idle(deadline)
    }

    /// Stores what the policy has put off, waits for the queues, and takes nothing more. A worker that is still inside a
    /// tier ends when that returns: whoever is the last to let go of this does not wait for it.
    pub(crate) fn shutdown(&self, deadline: Deadline) -> StorageEnd {
        loop {
            let oldest = self.shared.memory.lock().dirty.pop_front();
            let Some(tokens) = oldest else { break };
            // Without room in time the store is dropped.
            let _has_room = self.shared.stores.wait_room(deadline);
            self.store(&tokens);
        }
        let is_drained = self.wait_idle(deadline);
        let dropped = self.end();
        // What was begun in between is seen here, and from here on nothing is.
        let is_idle = self.wait_idle(deadline);
        self.shared.is_left.store(!is_idle, Ordering::Release);
        StorageEnd {
            is_drained: is_drained && is_idle,
            dropped,
            counts: self.counts(),
            rates: self.rates(),
        }
    }

    /// Takes nothing more. Answers how many stores that makes.
    fn end(&self) -> u64 {
        let shared = &self.shared;
        shared.is_ending.store(true, Ordering::Release);
        shared.gates.iter().for_each(TierGate::close);
        for job in shared.fetches.close() {
            fetch::give_up(shared, &job);
        }
        let jobs = shared.stores.close();
        jobs.iter().for_each(|job| shared.end_store(job.number));
        let dropped = jobs.len() as u64;
        shared.counts.lock().stores.dropped += dropped;
        dropped
    }
}

fn gates_of(config: &StorageConfig) -> Vec<TierGate> {
    let limits = config.limits.iter().copied();
    let limits = limits.chain(std::iter::repeat(TierLimits::default()));
    let limits = limits.take(config.tiers.len());
    limits.map(TierGate::new).collect()
}

impl Shared {
    /// Puts the prefix that is exactly `tokens` into the queue for the first `tier_count` tiers.
    pub(super) fn store(&self, tokens: &[u32], tier_count: usize) {
        let lease = match self.host.tree().boundary(tokens) {
            Hit::Ready { lease, .. } => HostLease::new(lease),
            // Gone again, or not whole yet.
            Hit::Pending { .. } | Hit::Miss => {
                self.counts.lock().stores.dropped += 1;
                return;
            }
        };
        let chain = KeyChain::of(&self.namespace, tokens);
        let number = self.memory.lock().begin_store();
        let job = StoreJob {
            number,
            lease,
            keys: chain.keys().to_vec(),
            tier_count,
        };
        let outcome = self.stores.push(job);
        let mut counts = self.counts.lock();
        match &outcome {
            Ok(()) => counts.stores.queued += 1,
            Err(_) => counts.stores.dropped += 1,
        }
        drop(counts);
        if outcome.is_err() {
            self.end_store(number);
        }
    }

    /// A store is over, or was not taken.
    pub(super) fn end_store(&self, number: u64) {
        self.memory.lock().storing.remove(&number);
    }

    /// Remembers where the end of a prefix came from.
    pub(super) fn note_arrival(&self, end: BlockKey, tier: usize) {
        let mut memory = self.memory.lock();
        if memory.arrivals.len() >= REMEMBERED_ENDS {
            memory.arrivals.clear();
        }
        memory.arrivals.insert(end, tier);
    }

    pub(super) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Acquire)
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        self.end();
        if self.shared.is_left.load(Ordering::Acquire) {
            return;
        }
        for worker in self.workers.drain(..) {
            // A worker that panicked has said so.
            let _ended = worker.join();
        }
    }
}

impl fmt::Debug for StorageTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StorageTier")
            .field("name", &self.tier.name())
            .field("place", &self.place)
            .finish()
    }
}

impl fmt::Debug for StorageConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StorageConfig")
            .field("tiers", &self.tiers)
            .field("write", &self.write)
            .field("prefetch", &self.prefetch)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Storage")
            .field("config", &self.shared.config)
            .field("open", &self.open())
            .finish()
    }
}
