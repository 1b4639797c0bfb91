//! What all sides of a simulated hand-off share: the clock, the mail, the rules that were broken.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kvgate_kvcache::handoff::{Counters, Envelope, Message, Timeouts};
use kvgate_kvcache::*;
use kvgate_transfer::sim::SimNet;
use kvgate_transfer::sync::Arc;
use kvgate_transfer::{Agent, Incarnation, PeerId, WriterRank};

use crate::common::{image, small_schema};

/// A control message under way.
#[derive(Clone)]
pub struct Letter {
    pub from: Incarnation,
    pub to: Incarnation,
    pub bytes: Vec<u8>,
}

/// How often things happened, so that a run shows that it entered its windows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    pub finished: u64,
    pub failed: u64,
    pub deadlines: u64,
    pub quarantined: u64,
    pub cancelled: u64,
    pub writers_killed: u64,
    pub decoders_killed: u64,
    pub gates_read: u64,
    pub slots_reused: u64,
    pub letters_lost: u64,
    pub letters_doubled: u64,
    pub letters_replayed: u64,
    pub letters_damaged: u64,
    pub answers: u64,
    pub machines: Counters,
}

pub struct Desk {
    pub now: Instant,
    pub mail: Vec<Letter>,
    pub tally: Tally,
    pub violations: Vec<String>,
    pub is_reliable: bool,
    /// Tokens and finished attempts of requests, by room.
    pub results: BTreeMap<Room, Attempt>,
}

impl Desk {
    pub fn new(is_reliable: bool) -> Desk {
        Desk {
            now: Instant::now(),
            mail: Vec::new(),
            tally: Tally::default(),
            violations: Vec::new(),
            is_reliable,
            results: BTreeMap::new(),
        }
    }

    pub fn violate(&mut self, what: String) {
        self.violations.push(what);
    }

    pub fn timeouts(&self) -> Timeouts {
        Timeouts {
            transfer: Duration::from_millis(200),
            idle: Duration::from_millis(80),
            drain: Duration::from_millis(80),
            retry: (!self.is_reliable).then(|| Duration::from_millis(8)),
        }
    }
}

/// One process: its agent, its pools, the connections it has.
pub struct Node {
    pub agent: Agent,
    pub incarnation: Incarnation,
    pub pools: PoolSet,
    pub peers: Vec<(PeerId, Incarnation)>,
}

impl Node {
    pub fn new(net: &SimNet, name: &str, pages: u32) -> Node {
        let agent = net.agent(name).build().unwrap();
        let config = PoolConfig {
            pages,
            windows: pages,
            requests: 6,
            memory: MemoryKind::Host,
        };
        let pools = PoolSet::new(schema(), config).unwrap();
        pools.register(&agent).unwrap();
        Node {
            incarnation: agent.incarnation(),
            agent,
            pools,
            peers: Vec::new(),
        }
    }

    pub fn incarnation_of(&self, peer: PeerId) -> Option<Incarnation> {
        let known = self.peers.iter().find(|(id, _)| *id == peer);
        known.map(|(_, incarnation)| *incarnation)
    }

    pub fn peer_of(&self, incarnation: Incarnation) -> Option<PeerId> {
        let known = self.peers.iter().find(|(_, life)| *life == incarnation);
        known.map(|(peer, _)| *peer)
    }
}

/// Connects two processes.
pub fn connect(net: &SimNet, a: &mut Node, b: &mut Node) {
    let (b_at_a, a_at_b) = net.connect(&a.agent, &b.agent).unwrap();
    a.peers.push((b_at_a, b.incarnation));
    b.peers.push((a_at_b, a.incarnation));
}

pub fn schema() -> Arc<CacheSchema> {
    thread_local!(static SCHEMA: Arc<CacheSchema> = small_schema());
    SCHEMA.with(Clone::clone)
}

/// Layers of each writer.
pub fn writer_layers(writer_count: u16) -> Vec<WriterLayers> {
    let bounds: &[u16] = match writer_count {
        1 => &[0, 3],
        2 => &[0, 1, 3],
        _ => &[0, 1, 2, 3],
    };
    let layers = |(rank, pair): (usize, &[u16])| WriterLayers {
        rank: WriterRank(rank as u16),
        layers: pair[0]..pair[1],
    };
    bounds.windows(2).enumerate().map(layers).collect()
}

/// Ends of the segments of a prompt.
pub fn segment_ends(tokens: u32) -> Vec<u32> {
    let mut ends: Vec<u32> = (1..)
        .map(|k| k * 256)
        .take_while(|end| *end < tokens)
        .collect();
    ends.push(tokens);
    ends
}

pub fn plan(tokens: u32, writer_count: u16) -> TransferPlan {
    let writers = writer_layers(writer_count);
    TransferPlan::compile(schema(), tokens, segment_ends(tokens), writers).unwrap()
}

/// What the rows of a flight hold: no two flights of a simulation have the same.
pub fn content(decoder_life: u32, epoch: u64) -> u32 {
    (decoder_life << 20) ^ (epoch as u32).wrapping_mul(2_654_435_761)
}

pub fn first_token(room: Room, attempt: Attempt) -> u32 {
    room.0 as u32 * 16 + attempt.0
}

pub fn message_of(bytes: &[u8]) -> Message {
    Envelope::decode(bytes).unwrap().message
}

/// Compares every live row of a layer with what its flight must hold.
pub fn check_rows(view: &LayerRef<'_>, tokens: u32, content: u32) -> Result<(), String> {
    let schema = schema();
    for row in schema.rows_of(view.layer()) {
        let Some(component) = view.component(row.component) else {
            return Err(format!("no view of {:?}", row.component));
        };
        let mut found = vec![0; component.row_image_bytes()];
        for entry in row.live_entries(tokens, 128) {
            component.read_row(entry, &mut found);
            if found != image(row, entry, content, found.len()) {
                let (component, layer) = (row.component, row.layer);
                return Err(format!(
                    "wrong bytes in {component:?} of layer {layer}, entry {entry}"
                ));
            }
        }
    }
    Ok(())
}
