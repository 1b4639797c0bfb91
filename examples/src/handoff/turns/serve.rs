//! The turns of all conversations over one device pool and one host tier.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvgate_hicache::Hicache;
use kvgate_hicache::cache::{Found, Origin};
use kvgate_kvcache::identity::Namespace;
use kvgate_kvcache::prefix::{Checkpoint, CheckpointWriter};
use kvgate_kvcache::schema::PAGE_TOKENS;
use kvgate_kvcache::{
    self as kvcache, LayerId, LayerMut, MemoryKind, PoolConfig, PoolSet, Room, Space, WriteLease,
    WrittenLayer,
};
use kvgate_model::{LayerCaches, Logits, ModelError};
use kvgate_transfer::{Agent, Deadline};

use super::report::{Difference, Report, Verdict};
use super::schedule::{Plan, Turn, next_boundary};
use super::sizes::{self, TierSizes, name_of};
use super::storage::Stores;
use super::{DECODED_TOKENS, TurnOptions};
use crate::handoff::compare::RowDigests;
use crate::handoff::failure::Failure;
use crate::handoff::model::{Host, cache_failure, model_failure};
use crate::handoff::mono::{Mono, Sequence};
use crate::handoff::options::HostOptions;
use crate::handoff::report::TierHits;
use crate::handoff::rows;
use crate::handoff::sampling::arg_max;

/// Device pool, host tier, conversations, and what came of them.
pub(super) struct Server<'a> {
    host: &'a Host,
    cache: Hicache,
    stores: Stores,
    chunk_tokens: u32,
    deadline: Duration,
    sessions: Vec<Session<'a>>,
    report: Report,
}

/// One conversation.
struct Session<'a> {
    ids: Vec<u32>,
    /// The same conversation without a cache; it goes on from turn to turn.
    cold: Option<Sequence<'a>>,
}

/// The caches of one turn.
struct TurnCaches {
    lease: WriteLease,
    deadline: Deadline,
    written: Vec<WrittenLayer>,
    checkpoint: Option<CheckpointWriter>,
    last_layer: LayerId,
    /// When the last layer of the prefix could be read.
    attached_at: Option<Instant>,
}

/// What a turn left, to be compared.
struct Left {
    logits: Vec<Vec<f32>>,
    rows: Vec<RowDigests>,
}

impl<'a> Server<'a> {
    pub(super) fn new(
        host: &'a Host,
        options: &HostOptions,
        chunk_tokens: u32,
        turns: &TurnOptions,
        plan: &Plan,
        stores: Stores,
    ) -> Result<Self, Failure> {
        let sizes = TierSizes::of(&host.schema, plan, turns, 1);
        let config = sizes.device_config(MemoryKind::Host);
        let salt = &turns.storage.salt;
        let connected = connect_here(host, config, &sizes, salt);
        let (cache, namespace) = connected.map_err(|error| cache_failure(&error))?;
        let cache = stores.attach(cache, namespace)?;
        let mut sessions = Vec::new();
        for session in 0..turns.sessions {
            let cold = match turns.is_verified {
                true => Some(Mono::new(host).begin(plan.tokens_of(session))?),
                false => None,
            };
            let ids = plan.common().to_vec();
            sessions.push(Session { ids, cold });
        }
        Ok(Server {
            host,
            cache,
            chunk_tokens,
            deadline: Duration::from_millis(options.deadline_ms),
            sessions,
            report: empty_report(turns, sizes.device.pages, sizes.host_pages, stores.names()),
            stores,
        })
    }

    /// One turn: the user's tokens, the answer, the comparison.
    pub(super) fn serve(&mut self, plan: &Plan, turn: Turn) -> Result<(), Failure> {
        let session = turn.session as usize;
        let known = self.sessions[session].ids.len();
        self.sessions[session]
            .ids
            .extend_from_slice(plan.said(turn));
        let mut ids = self.sessions[session].ids.clone();
        let prompt_tokens = ids.len() as u32;
        let looked_up = Instant::now();
        let room = Room(u64::from(turn.session));
        let (mut caches, mut start, mut origin) = self.begin(&ids, room)?;
        let mut left = Left {
            logits: Vec::new(),
            rows: Vec::new(),
        };
        // The last token of the prompt gives the first one of the answer.
        let prompt = match self.go_on(&mut caches, &ids, start, prompt_tokens) {
            // A load that fails or comes too late is a miss: the prompt is computed.
            Err(_) if origin.is_some() && caches.attached_at.is_none() => {
                drop(caches);
                (start, origin) = (0, None);
                caches = self.compute_all(&ids, room)?;
                self.go_on(&mut caches, &ids, start, prompt_tokens)?
            }
            prompt => prompt?,
        };
        left.logits.push(prompt);
        for _ in 0..DECODED_TOKENS {
            let next = arg_max(left.logits.last().map_or(&[][..], Vec::as_slice));
            let at = ids.len() as u32;
            ids.push(next);
            let logits = self.go_on(&mut caches, &ids, at, at + 1)?;
            left.logits.push(logits);
        }
        left.rows = self.rows_of(&mut caches.lease, ids.len() as u32)?;
        self.count(
            turn,
            prompt_tokens,
            start,
            origin,
            looked_up,
            caches.attached_at,
        );
        drop(caches);
        self.sessions[session].ids = ids;
        self.compare(turn, known, prompt_tokens, start, &left)
    }

    /// The caches of a request that goes on behind the longest prefix there is, or computes everything.
    fn begin(
        &mut self,
        ids: &[u32],
        room: Room,
    ) -> Result<(TurnCaches, u32, Option<Origin>), Failure> {
        let until = Deadline::after(self.deadline);
        let Some(found) = self.cache.lookup_within(ids, until) else {
            return Ok((self.compute_all(ids, room)?, 0, None));
        };
        let (start, origin) = (found.tokens, found.origin);
        let lease = self.resume(found, ids.len() as u32 + DECODED_TOKENS, room)?;
        Ok((self.caches(lease), start, Some(origin)))
    }

    /// The caches of a request that computes everything.
    fn compute_all(&self, ids: &[u32], room: Room) -> Result<TurnCaches, Failure> {
        let total = ids.len() as u32 + DECODED_TOKENS;
        let counts = self.host.schema.slots_for(total);
        self.make_room(counts.of(Space::Page), counts.of(Space::Window));
        let reserved = self.cache.device().pools().reserve(total, room);
        Ok(self.caches(reserved.map_err(|error| cache_failure(&error))?))
    }

    fn caches(&self, lease: WriteLease) -> TurnCaches {
        TurnCaches {
            lease,
            deadline: Deadline::after(self.deadline),
            written: Vec::new(),
            checkpoint: None,
            last_layer: LayerId(self.host.schema.layer_count().saturating_sub(1)),
            attached_at: None,
        }
    }

    fn resume(&self, found: Found, total: u32, room: Room) -> Result<WriteLease, Failure> {
        let counts = self.host.schema.slots_for(total);
        let own_pages = counts.of(Space::Page) - found.tokens / PAGE_TOKENS;
        self.make_room(own_pages, counts.of(Space::Window));
        let resumed = self.cache.device().pools().resume(found.lease, total, room);
        resumed.map_err(|refused| cache_failure(&refused.1))
    }

    /// Room in the device pool. Backups that are still reading its pages are waited for.
    fn make_room(&self, pages: u32, windows: u32) -> bool {
        if self.cache.device().make_room(pages, windows) {
            return true;
        }
        self.cache.wait_moves(Deadline::after(self.deadline))
            && self.cache.device().make_room(pages, windows)
    }

    /// Computes `start..end`, and publishes the boundaries on the way that are worth going on from. Answers the
    /// logits of the last token.
    fn go_on(
        &mut self,
        caches: &mut TurnCaches,
        ids: &[u32],
        start: u32,
        end: u32,
    ) -> Result<Vec<f32>, Failure> {
        let mut from = start;
        let mut logits = Vec::new();
        while from < end {
            let boundary = next_boundary(from, end);
            let to = boundary
                .unwrap_or(end)
                .min(from + self.chunk_tokens)
                .min(end);
            let is_boundary = boundary == Some(to);
            if is_boundary {
                self.make_room(0, self.host.schema.boundary_windows(to).len() as u32);
                let pools = self.cache.device().pools();
                // Without room for its end the prefix is not published: a miss later, nothing else.
                caches.checkpoint = pools.reserve_checkpoint(to, caches.lease.room()).ok();
            }
            caches.written.clear();
            let want = if to == end {
                Logits::Last
            } else {
                Logits::None
            };
            let part = &ids[from as usize..to as usize];
            let forward = self.host.model.forward(part, from, caches, want, None);
            logits = forward.map_err(|error| model_failure(&error))?;
            if let Some(checkpoint) = caches.checkpoint.take() {
                let checkpoint = checkpoint.finish().map_err(|error| cache_failure(&error))?;
                self.publish(caches, &ids[..to as usize], checkpoint)?;
            }
            from = to;
        }
        Ok(logits)
    }

    /// Enters a prefix into the device pool and begins its backup.
    fn publish(
        &self,
        caches: &mut TurnCaches,
        prefix: &[u32],
        checkpoint: Checkpoint,
    ) -> Result<(), Failure> {
        let tree = self.cache.device().tree();
        let (lease, written) = (&mut caches.lease, &caches.written);
        tree.publish(prefix, lease, written, Some(checkpoint))
            .and_then(|_| self.cache.backup(prefix))
            .map(drop)
            .map_err(|error| cache_failure(&error))
    }

    fn rows_of(&self, lease: &mut WriteLease, tokens: u32) -> Result<Vec<RowDigests>, Failure> {
        let schema = &self.host.schema;
        let mut digests = Vec::new();
        for layer in schema.layers() {
            let view = lease
                .layer_mut(layer)
                .map_err(|error| cache_failure(&error))?;
            digests.extend(rows::of_layer(schema, layer, tokens, |row| {
                view.component(row.component)
            }));
        }
        Ok(digests)
    }

    fn count(
        &mut self,
        turn: Turn,
        prompt_tokens: u32,
        start: u32,
        origin: Option<Origin>,
        looked_up: Instant,
        attached_at: Option<Instant>,
    ) {
        let report = &mut self.report;
        report.prompt_tokens += u64::from(prompt_tokens);
        report.computed_tokens += u64::from(prompt_tokens - start);
        let name = origin.map(name_of);
        let Some(tier) = report
            .tiers
            .iter_mut()
            .find(|tier| Some(&*tier.tier) == name)
        else {
            report.misses += 1;
            return;
        };
        tier.hits += 1;
        tier.first_turn_hits += u64::from(turn.turn == 0);
        tier.hit_tokens += u64::from(start);
        if origin != Some(Origin::Device) {
            let schema = &self.host.schema;
            let pages = u64::from(start / PAGE_TOKENS) * schema.slot_bytes(Space::Page);
            let windows = schema.boundary_windows(start).len() as u64;
            tier.bytes += pages + windows * schema.slot_bytes(Space::Window);
        }
        if let Some(at) = attached_at {
            tier.load_ms += at.duration_since(looked_up).as_secs_f64() * 1_000.0;
        }
    }

    /// The same turn without a cache, bit by bit.
    fn compare(
        &mut self,
        turn: Turn,
        known: usize,
        prompt_tokens: u32,
        start: u32,
        left: &Left,
    ) -> Result<(), Failure> {
        let session = &mut self.sessions[turn.session as usize];
        let Some(cold) = &mut session.cold else {
            return Ok(());
        };
        let from = if turn.turn == 0 { 0 } else { known };
        let mut expected =
            vec![cold.forward(&session.ids[from..prompt_tokens as usize], Logits::Last)?];
        for id in &session.ids[prompt_tokens as usize..] {
            expected.push(cold.forward(&[*id], Logits::Last)?);
        }
        let rows = cold.row_digests(session.ids.len() as u32)?;
        let is_same = |(a, b): (&Vec<f32>, &Vec<f32>)| {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
        };
        let position = expected
            .iter()
            .zip(&left.logits)
            .position(|pair| !is_same(pair));
        let row = rows.iter().zip(&left.rows).find(|(a, b)| a != b);
        self.report.compared_turns += 1;
        let what = match (position, row) {
            (Some(position), _) => format!("logits of token {} of the answer", position + 1),
            (None, Some((row, _))) => format!("rows of {} in layer {}", row.component, row.layer),
            (None, None) if rows.len() != left.rows.len() => "the number of rows".to_owned(),
            (None, None) if expected.len() != left.logits.len() => {
                "the number of tokens of the answer".to_owned()
            }
            (None, None) => return Ok(()),
        };
        self.report.differing_turns += 1;
        self.report.first_difference.get_or_insert(Difference {
            session: turn.session,
            turn: turn.turn,
            prompt_tokens,
            hit_tokens: start,
            what,
        });
        Ok(())
    }

    /// Waits for what is under way, and sums up.
    pub(super) fn finish(mut self) -> Result<Report, Failure> {
        if !self.cache.wait_moves(Deadline::after(self.deadline)) {
            let (backups, loads) = self.cache.open_moves();
            return Err(Failure::internal(format!(
                "{backups} backups and {loads} loads do not end"
            )));
        }
        let end = self.cache.shutdown(Deadline::after(self.deadline));
        if !self.stores.names().is_empty() {
            let work = self.stores.close(&end, Deadline::after(self.deadline));
            self.report.storage = Some(work);
        }
        let counts = self.cache.counts();
        self.report.backups = counts.backups.into();
        self.report.loads = counts.loads.into();
        self.report.verdict = match (self.report.compared_turns, self.report.differing_turns) {
            (0, _) => Verdict::Unverified,
            (_, 0) => Verdict::BitIdentical,
            _ => Verdict::Mismatch,
        };
        Ok(self.report)
    }
}

impl LayerCaches for TurnCaches {
    fn layer(&mut self, layer: LayerId) -> Result<LayerMut<'_>, ModelError> {
        self.lease.attach_layer(layer, self.deadline)?;
        if layer == self.last_layer {
            self.attached_at.get_or_insert_with(Instant::now);
        }
        Ok(self.lease.layer_mut(layer)?)
    }

    fn layer_done(&mut self, layer: LayerId, tokens: Range<u32>) -> Result<(), ModelError> {
        self.written.push(self.lease.commit_layer(layer, tokens)?);
        if let Some(checkpoint) = &mut self.checkpoint {
            checkpoint.save_layer(layer, &self.lease)?;
        }
        Ok(())
    }
}

/// Two agents of this process with their pools, and the cache over both.
fn connect_here(
    host: &Host,
    config: PoolConfig,
    sizes: &TierSizes,
    salt: &str,
) -> Result<(Hicache, Namespace), kvcache::Error> {
    let agent = Agent::builder("device").build()?;
    let pools = PoolSet::new(Arc::clone(&host.schema), config)?;
    pools.register(&agent)?;
    sizes::connect(&agent, &pools, sizes, salt)
}

fn empty_report(
    turns: &TurnOptions,
    device_pages: u32,
    host_pages: u32,
    storage: Vec<&'static str>,
) -> Report {
    let tier = |tier: &str| TierHits {
        tier: tier.to_owned(),
        ..TierHits::default()
    };
    Report {
        schema: Report::schema(),
        verdict: Verdict::Unverified,
        sessions: turns.sessions,
        turns: turns.turns,
        device_pages,
        host_pages,
        tiers: ["device", "host"]
            .into_iter()
            .chain(storage)
            .map(tier)
            .collect(),
        storage: None,
        misses: 0,
        prompt_tokens: 0,
        computed_tokens: 0,
        backups: kvgate_hicache::cache::MoveCounts::default().into(),
        loads: kvgate_hicache::cache::MoveCounts::default().into(),
        compared_turns: 0,
        differing_turns: 0,
        first_difference: None,
        elapsed_ms: 0,
    }
}
