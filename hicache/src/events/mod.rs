//! KV events: what is where, for a router that sends a request to the replica which has its prefix.
//!
//! The messages are those of vLLM, or of SGLang with [`Dialect::Sglang`]: batches with a time and a sequence
//! number, in msgpack, of `BlockStored`, `BlockRemoved` and `AllBlocksCleared`. `docs/wire.md` has the fields.
//!
//! * [`KvEvents::sink`] is given to a prefix tree (`PrefixTree::report_to`), one for each medium.
//! * [`ReportingTier`] does the same for a tier of records.
//! * [`KvEvents::flush`] makes a batch of what has happened. It is kept for [`KvEvents::replay`], and handed to
//!   every [`BatchSink`].
//!
//! A block is stored once it, and every block before it, can be read with all its components, never before. A
//! stream begins with `AllBlocksCleared`: what an earlier process with this name had is gone. When more events
//! wait than may, they become one `AllBlocksCleared`, after which fewer blocks are known than there are; never more.
//!
//! Nothing here has a socket. [`Batch::frames`] are the three frames of the publisher of vLLM, and
//! [`KvEvents::replay`] is what its replay socket answers.
//!
//! **Lock order.** The sinks come before the state, and both after every lock of a cache.

mod encode;
mod tier;

use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use kvgate_kvcache::identity::BlockKey;
use kvgate_kvcache::prefix::{PrefixSink, StoredBlock};
use kvgate_kvcache::schema::PAGE_TOKENS;
use kvgate_transfer::sync::{Arc, Mutex};

pub use tier::ReportingTier;

/// Whose words and block hashes are spoken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dialect {
    /// Those of vLLM: hashes are the 32 bytes of a key.
    #[default]
    Vllm,
    /// Those of SGLang: hashes are the first 8 bytes of a key as a signed number.
    Sglang,
}

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Medium {
    /// The device pool.
    Device,
    /// The host tier.
    Host,
    /// The local disk.
    Disk,
    /// A store that other hosts reach too.
    Remote,
}

impl Medium {
    /// Its name in events.
    pub fn name(self, dialect: Dialect) -> &'static str {
        match (dialect, self) {
            (_, Medium::Device) => "GPU",
            (Dialect::Vllm, Medium::Host) => "CPU",
            (Dialect::Vllm, Medium::Disk | Medium::Remote) => "STORAGE",
            (Dialect::Sglang, Medium::Host) => "CPU_PINNED",
            (Dialect::Sglang, Medium::Disk) => "DISK",
            (Dialect::Sglang, Medium::Remote) => "EXTERNAL",
        }
    }
}

/// How events are told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventsConfig {
    /// Whose words.
    pub dialect: Dialect,
    /// Rank of this replica among data-parallel ones.
    pub rank: Option<u32>,
    /// Batches that are kept for a replay.
    pub replay_batches: usize,
    /// Events that may wait for a flush.
    pub waiting_events: usize,
}

impl Default for EventsConfig {
    fn default() -> EventsConfig {
        EventsConfig {
            dialect: Dialect::Vllm,
            rank: None,
            replay_batches: 10_000,
            waiting_events: 100_000,
        }
    }
}

/// One message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Its number; they go up by one.
    pub sequence: u64,
    /// Its bytes, msgpack.
    pub payload: Arc<[u8]>,
}

impl Batch {
    /// The frames of a message of the publisher: topic, sequence number (8 bytes, big-endian), payload.
    pub fn frames(&self, topic: &str) -> [Vec<u8>; 3] {
        let sequence = self.sequence.to_be_bytes().to_vec();
        [topic.into(), sequence, self.payload.to_vec()]
    }
}

/// Is handed every batch, in order.
pub trait BatchSink: Send {
    /// One batch. May not ask the events for anything.
    fn batch(&mut self, batch: &Batch);
}

/// Answer to a replay.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replay {
    /// The batches from the one that was asked for, as far as they are kept.
    pub batches: Vec<Batch>,
    /// Batches between the one that was asked for and the first of these, which are kept no more. Whoever missed
    /// them has to forget what it knows.
    pub lost_batches: u64,
}

/// What is told of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    Stored {
        key: BlockKey,
        parent: Option<BlockKey>,
        /// Empty where only the record is known.
        tokens: Box<[u32]>,
        block_tokens: u32,
        medium: Medium,
    },
    Removed {
        key: BlockKey,
        medium: Medium,
    },
    Cleared,
}

/// The stream of events of one replica. A clone is the same stream.
#[derive(Clone)]
pub struct KvEvents {
    inner: Arc<Inner>,
}

struct Inner {
    config: EventsConfig,
    sinks: Mutex<Vec<Box<dyn BatchSink>>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    waiting: Vec<Event>,
    next_sequence: u64,
    kept: VecDeque<Batch>,
    event_count: u64,
    overflow_count: u64,
    /// After an overflow nobody knows of what was stored before it, so it is not taken back either.
    known: HashSet<(BlockKey, Medium)>,
}

impl KvEvents {
    /// A new stream, whose first event is `AllBlocksCleared`.
    pub fn new(config: EventsConfig) -> KvEvents {
        let state = State {
            waiting: vec![Event::Cleared],
            ..State::default()
        };
        let inner = Inner {
            config,
            sinks: Mutex::new(Vec::new()),
            state: Mutex::new(state),
        };
        KvEvents {
            inner: Arc::new(inner),
        }
    }

    /// What a prefix tree tells of its blocks, which are at `medium`.
    pub fn sink(&self, medium: Medium) -> Box<dyn PrefixSink> {
        Box::new(TreeSink {
            events: self.clone(),
            medium,
        })
    }

    /// From the next batch on, `sink` is handed each.
    pub fn subscribe(&self, sink: Box<dyn BatchSink>) {
        self.inner.sinks.lock().push(sink);
    }

    /// Makes a batch of what has happened since the last one; `None` if nothing has. To be called by whoever owns the
    /// stream, at every step of the scheduler or a few times a second.
    pub fn flush(&self) -> Option<Batch> {
        // Held to the end, so that nobody is handed a later batch first.
        let mut sinks = self.inner.sinks.lock();
        let mut state = self.inner.state.lock();
        let events = std::mem::take(&mut state.waiting);
        if events.is_empty() {
            return None;
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let at_seconds = now.map_or(0.0, |since| since.as_secs_f64());
        let config = &self.inner.config;
        let payload = encode::batch(at_seconds, &events, config.dialect, config.rank);
        let batch = Batch {
            sequence: state.next_sequence,
            payload: payload.into(),
        };
        state.next_sequence += 1;
        state.event_count += events.len() as u64;
        state.kept.push_back(batch.clone());
        let surplus = state.kept.len().saturating_sub(config.replay_batches);
        state.kept.drain(..surplus);
        drop(state);
        sinks.iter_mut().for_each(|sink| sink.batch(&batch));
        Some(batch)
    }

    /// The batches from number `sequence` on.
    pub fn replay(&self, sequence: u64) -> Replay {
        let state = self.inner.state.lock();
        let first = state.next_sequence - state.kept.len() as u64;
        let later = |batch: &&Batch| batch.sequence >= sequence;
        Replay {
            batches: state.kept.iter().filter(later).cloned().collect(),
            lost_batches: first.saturating_sub(sequence),
        }
    }

    /// Events told in batches, and times that more waited than may.
    pub fn counts(&self) -> (u64, u64) {
        let state = self.inner.state.lock();
        (state.event_count, state.overflow_count)
    }

    pub(crate) fn tell(&self, event: Event) {
        let limit = self.inner.config.waiting_events;
        let mut state = self.inner.state.lock();
        let is_news = match &event {
            Event::Stored { key, medium, .. } => state.known.insert((*key, *medium)),
            Event::Removed { key, medium } => state.known.remove(&(*key, *medium)),
            Event::Cleared => true,
        };
        if !is_news {
            return;
        }
        if state.waiting.len() >= limit {
            // Less is known than is there from here on, and nothing that is not there.
            state.overflow_count += 1;
            state.known.clear();
            state.waiting = vec![Event::Cleared];
            return;
        }
        state.waiting.push(event);
    }
}

impl fmt::Debug for KvEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (events, overflows) = self.counts();
        f.debug_struct("KvEvents")
            .field("config", &self.inner.config)
            .field("events", &events)
            .field("overflows", &overflows)
            .finish()
    }
}

struct TreeSink {
    events: KvEvents,
    medium: Medium,
}

impl PrefixSink for TreeSink {
    fn stored(&mut self, block: StoredBlock<'_>) {
        self.events.tell(Event::Stored {
            key: block.key,
            parent: block.parent,
            tokens: block.tokens.into(),
            block_tokens: PAGE_TOKENS,
            medium: self.medium,
        });
    }

    fn removed(&mut self, key: BlockKey) {
        let medium = self.medium;
        self.events.tell(Event::Removed { key, medium });
    }
}
