//! From the storage tiers into the host tier.

use std::time::{Duration, Instant};

use kvgate_kvcache::identity::{BlockKey, KeyChain};
use kvgate_kvcache::schema::PAGE_TOKENS;
use kvgate_kvcache::{Hit, LayerId, PrefixLease, Room, WriteLease};
use kvgate_transfer::Deadline;
use kvgate_transfer::sync::{Arc, AtomicBool, Condvar, Mutex, Ordering};

use super::stack::{PrefetchPolicy, Shared};
use super::{Claims, FetchCounts, contained, rows, weigh};
use crate::figures::note_parts;
use crate::miss::Miss;
use crate::record::{RecordId, RecordKind, RecordShape, Verified, Wanted};
use crate::tier::Presence;

/// Blocks whose presence is asked for at once.
const PROBE_BLOCKS: usize = 128;
/// An end of what has come may be read so long behind the deadline: without it the blocks are of no use.
const GRACE: Duration = Duration::from_millis(250);

/// A prefix on its way out of the storage tiers.
#[derive(Debug)]
pub struct Fetch {
    begun_at: Instant,
    deadline: Deadline,
    is_stopped: AtomicBool,
    /// Tokens of the prefix that it has published, once it is over; 0 for none.
    outcome: Mutex<Option<u32>>,
    over: Condvar,
}

impl Fetch {
    fn new(deadline: Deadline) -> Fetch {
        Fetch {
            begun_at: Instant::now(),
            deadline,
            is_stopped: AtomicBool::new(false),
            outcome: Mutex::new(None),
            over: Condvar::default(),
        }
    }

    /// Time since it began.
    pub fn age(&self) -> Duration {
        self.begun_at.elapsed()
    }

    /// When it stops by itself.
    pub fn deadline(&self) -> Deadline {
        self.deadline
    }

    /// Blocks until it is over. Answers the tokens of the prefix that it has published, 0 for none; `None` at the
    /// deadline, which changes nothing.
    pub fn wait(&self, deadline: Deadline) -> Option<u32> {
        let mut outcome = self.outcome.lock();
        while outcome.is_none() && !deadline.has_passed() {
            self.over.wait_until(&mut outcome, deadline.instant());
        }
        *outcome
    }

    /// Asks it to begin no further read. What it has is published as far as a request can go on from it.
    pub fn stop(&self) {
        self.is_stopped.store(true, Ordering::Release);
    }

    fn is_due_to_end(&self) -> bool {
        self.is_stopped.load(Ordering::Acquire) || self.deadline.has_passed()
    }

    /// Until when, from now on, an end may be read; all that are tried have this time together.
    fn last_call(&self) -> Deadline {
        Deadline::after(self.deadline.remaining() + GRACE)
    }

    fn finish(&self, tokens: u32) {
        let mut outcome = self.outcome.lock();
        *outcome = Some(tokens);
        self.over.notify_all();
    }
}

/// A fetch that waits for a worker.
#[derive(Debug)]
pub(super) struct FetchJob {
    fetch: Arc<Fetch>,
    /// The blocks that it may bring, and the token behind them.
    tokens: Vec<u32>,
    /// Keys of the blocks.
    keys: Vec<BlockKey>,
    /// Tokens that the request has without it, elsewhere than in the host tier.
    known_tokens: u32,
}

/// What a fetch is going to bring.
pub(super) struct Plan {
    /// Tokens that the request has without it.
    pub(super) known_tokens: u32,
    /// Blocks that the host tier has.
    pub(super) held: usize,
    /// Of each block behind them, the nearest tier that has it.
    pub(super) blocks: Vec<usize>,
    /// Ends to go on from, the last one first, with the nearest tier that has each; as a number of blocks.
    pub(super) ends: Vec<(usize, usize)>,
}

/// Why a fetch brought nothing.
enum Nothing {
    Empty,
    NoRoom,
    Shared,
    Computed,
    Failed,
}

/// Joins a fetch of the same prefix or begins one.
pub(super) fn begin(shared: &Shared, tokens: &[u32], known_tokens: u32) -> Option<Arc<Fetch>> {
    // A request always computes its last token.
    let limit = tokens.len().saturating_sub(1) / PAGE_TOKENS as usize;
    if limit == 0 || shared.is_ending() {
        return None;
    }
    let tokens = &tokens[..limit * PAGE_TOKENS as usize + 1];
    let keys = KeyChain::of(&shared.namespace, tokens).keys().to_vec();
    let last = *keys.last()?;
    let mut memory = shared.memory.lock();
    if let Some(fetch) = memory.flying.get(&last) {
        let fetch = Arc::clone(fetch);
        drop(memory);
        shared.counts.lock().fetches.joined += 1;
        return Some(fetch);
    }
    let fetch = Arc::new(Fetch::new(deadline_of(shared, tokens.len())));
    let job = FetchJob {
        fetch: Arc::clone(&fetch),
        tokens: tokens.to_vec(),
        keys,
        known_tokens,
    };
    let outcome = shared.fetches.push(job);
    if outcome.is_ok() {
        memory.flying.insert(last, Arc::clone(&fetch));
    }
    drop(memory);
    let counts = &mut shared.counts.lock().fetches;
    match outcome {
        Ok(()) => counts.started += 1,
        Err(_) => counts.dropped += 1,
    }
    outcome.is_ok().then_some(fetch)
}

fn deadline_of(shared: &Shared, token_count: usize) -> Deadline {
    let (base_ms, per_1024_tokens_ms) = match shared.config.prefetch {
        PrefetchPolicy::Timeout {
            base_ms,
            per_1024_tokens_ms,
        } => (base_ms, per_1024_tokens_ms),
        PrefetchPolicy::Wait | PrefetchPolicy::BestEffort => (60_000, 1_000),
    };
    let extra_ms = token_count as u64 * per_1024_tokens_ms / 1_024;
    Deadline::after_ms(base_ms.saturating_add(extra_ms))
}

/// Fetches until the queue is closed.
pub(super) fn work(shared: &Shared) {
    let mut payload = Vec::new();
    while let Some((job, running)) = shared.fetches.pop() {
        let outcome = contained(|| fetch(shared, &job, &mut payload));
        let outcome = outcome.unwrap_or(Err(Nothing::Failed));
        count(&mut shared.counts.lock().fetches, &outcome);
        finish(shared, &job, outcome.map_or(0, |(tokens, _)| tokens));
        drop(running);
    }
}

fn count(counts: &mut FetchCounts, outcome: &Result<(u32, bool), Nothing>) {
    match outcome {
        Ok((_, is_whole)) => {
            counts.published += 1;
            counts.shortened += u64::from(!is_whole);
        }
        Err(Nothing::Empty) => counts.empty += 1,
        Err(Nothing::NoRoom) => counts.no_room += 1,
        Err(Nothing::Shared) => counts.shared += 1,
        Err(Nothing::Computed) => counts.computed += 1,
        Err(Nothing::Failed) => counts.failed += 1,
    }
}

/// Ends a fetch that no worker has begun.
pub(super) fn give_up(shared: &Shared, job: &FetchJob) {
    shared.counts.lock().fetches.failed += 1;
    finish(shared, job, 0);
}

fn finish(shared: &Shared, job: &FetchJob, tokens: u32) {
    if let Some(last) = job.keys.last() {
        shared.memory.lock().flying.remove(last);
    }
    job.fetch.finish(tokens);
}

/// Answers the tokens that were published, and whether they are all that was planned.
fn fetch(shared: &Shared, job: &FetchJob, payload: &mut Vec<u8>) -> Result<(u32, bool), Nothing> {
    let mut has_waited = false;
    loop {
        if job.fetch.is_due_to_end() || shared.is_ending() {
            return Err(Nothing::Failed);
        }
        let mut plan = Plan::make(shared, job).ok_or(match has_waited {
            true => Nothing::Shared,
            false => Nothing::Empty,
        })?;
        let ids = plan.ids(&job.keys);
        // The owner is decided here, before a byte is read.
        let Some(claim) = Claims::try_claim(&shared.claims, &ids) else {
            has_waited = true;
            match shared.claims.wait(&ids, job.fetch.deadline) {
                true => continue,
                false => return Err(Nothing::Shared),
            }
        };
        // Another one may have brought it between the plan and the claim.
        if ready_blocks(shared, job) != plan.held {
            has_waited = true;
            continue;
        }
        if !weigh::weigh(shared, &mut plan) {
            return Err(Nothing::Computed);
        }
        let outcome = carry_out(shared, job, &plan, payload);
        drop(claim);
        return outcome;
    }
}

/// Whole blocks at the start that the host tier has ready.
fn ready_blocks(shared: &Shared, job: &FetchJob) -> usize {
    let (ready, _) = shared.host.tree().probe(&job.tokens);
    (ready / PAGE_TOKENS) as usize
}

impl Plan {
    /// What is to be brought, as the tiers say; `None` when they have nothing longer than what is here. Asking renews
    /// nothing.
    fn make(shared: &Shared, job: &FetchJob) -> Option<Plan> {
        let (ready, resumable) = shared.host.tree().probe(&job.tokens);
        let held = (ready / PAGE_TOKENS) as usize;
        let known = resumable.max(job.known_tokens);
        let least = known.saturating_add(shared.config.least_tokens) / PAGE_TOKENS;
        let first_end = (least as usize).max(known as usize / PAGE_TOKENS as usize + 1);
        let mut blocks = Vec::new();
        let mut ends = Vec::new();
        let ids_of = |kind, range: std::ops::Range<usize>| {
            let id = move |key: &BlockKey| RecordId { kind, key: *key };
            job.keys[range].iter().map(id).collect::<Vec<_>>()
        };
        // Ends of what the host tier has: only the window and the states are missing there.
        if first_end <= held {
            let found = locate(
                shared,
                job,
                &ids_of(RecordKind::Checkpoint, first_end - 1..held),
            );
            let found = found.into_iter().zip(first_end..);
            ends.extend(found.filter_map(|(tier, end)| Some((end, tier?))));
        }
        let mut at = held;
        while at < job.keys.len() {
            let until = (at + PROBE_BLOCKS).min(job.keys.len());
            let found = locate(shared, job, &ids_of(RecordKind::Block, at..until));
            let run: Vec<usize> = found.into_iter().map_while(|tier| tier).collect();
            let reach = at + run.len();
            let from = at.max(first_end - 1);
            if from < reach {
                let found = locate(shared, job, &ids_of(RecordKind::Checkpoint, from..reach));
                let found = found.into_iter().zip(from + 1..);
                ends.extend(found.filter_map(|(tier, end)| Some((end, tier?))));
            }
            blocks.extend(run);
            if reach < until {
                break;
            }
            at = until;
        }
        ends.reverse();
        let (last, _) = *ends.first()?;
        blocks.truncate(last.saturating_sub(held));
        Some(Plan {
            known_tokens: known,
            held,
            blocks,
            ends,
        })
    }

    /// Every record that it may read.
    fn ids(&self, keys: &[BlockKey]) -> Vec<RecordId> {
        let id = |kind, at: usize| RecordId {
            kind,
            key: keys[at],
        };
        let blocks = (self.held..).take(self.blocks.len());
        let blocks = blocks.map(|at| id(RecordKind::Block, at));
        let ends = self.ends.iter();
        blocks
            .chain(ends.map(|(end, _)| id(RecordKind::Checkpoint, end - 1)))
            .collect()
    }
}

/// The nearest tier that has each record. What cannot be asked has nothing.
fn locate(shared: &Shared, job: &FetchJob, ids: &[RecordId]) -> Vec<Option<usize>> {
    let mut found = vec![None; ids.len()];
    for (index, tier) in shared.config.tiers.iter().enumerate() {
        let open: Vec<usize> = (0..ids.len()).filter(|at| found[*at].is_none()).collect();
        if open.is_empty() {
            break;
        }
        let asked: Vec<RecordId> = open.iter().map(|at| ids[*at]).collect();
        let presence = tier.tier.probe(&asked, job.fetch.deadline);
        // An answer of another length answers nobody knows what.
        let is_answer = presence.len() == open.len();
        let mut is_silent = !is_answer;
        for (at, presence) in open.into_iter().zip(presence).filter(|_| is_answer) {
            match presence {
                Presence::Present => found[at] = Some(index),
                Presence::Absent => {}
                Presence::Unknown => is_silent = true,
            }
        }
        if is_silent {
            let mut counts = shared.counts.lock();
            *counts.tiers[index].misses.entry("unavailable").or_default() += 1;
        }
    }
    found
}

/// Reads what was planned, as far as it can be had, and publishes the longest prefix that it is enough for.
fn carry_out(
    shared: &Shared,
    job: &FetchJob,
    plan: &Plan,
    payload: &mut Vec<u8>,
) -> Result<(u32, bool), Nothing> {
    let mut ends = plan.ends.iter().copied();
    let (mut slots, mut ends) = loop {
        let (end, tier) = ends.next().ok_or(Nothing::NoRoom)?;
        if let Some(slots) = reserve(shared, job, end, plan.held) {
            break (slots, std::iter::once((end, tier)).chain(ends));
        }
    };
    let planned = slots.block_table().tokens();
    let mut reach = plan.held;
    let mut deepest = 0;
    for &tier in &plan.blocks {
        if reach * PAGE_TOKENS as usize >= planned as usize {
            break;
        }
        if job.fetch.is_due_to_end() || shared.is_ending() {
            break;
        }
        let wanted = Reading {
            shared,
            job,
            kind: RecordKind::Block,
            block: reach,
            shape: &shared.block,
            deadline: job.fetch.deadline,
        };
        let Some(found) = wanted.bring(tier, &mut slots, payload) else {
            break;
        };
        deepest = deepest.max(found);
        reach += 1;
    }
    // The last end that all blocks before it have come for.
    let until = job.fetch.last_call();
    let found = ends.find_map(|(end, tier)| {
        if end > reach || until.has_passed() || shared.is_ending() {
            return None;
        }
        let schema = shared.host.pools().schema();
        let position = end as u32 * PAGE_TOKENS;
        let shape = RecordShape::checkpoint(schema, PAGE_TOKENS, position).ok()?;
        let wanted = Reading {
            shared,
            job,
            kind: RecordKind::Checkpoint,
            block: end - 1,
            shape: &shape,
            deadline: until,
        };
        let found = wanted.bring(tier, &mut slots, payload)?;
        Some((end, found))
    });
    let (end, found) = found.ok_or(Nothing::Failed)?;
    // Blocks behind the end count for nothing.
    let deepest = match end > plan.held {
        true => deepest.max(found),
        false => found,
    };
    publish(shared, job, end, slots).ok_or(Nothing::Failed)?;
    shared.note_arrival(job.keys[end - 1], deepest);
    let tokens = end as u32 * PAGE_TOKENS;
    if shared.config.has_promotion && deepest > 0 {
        shared.store(&job.tokens[..tokens as usize], deepest);
    }
    Ok((tokens, tokens == planned))
}

/// Slots of the host tier for the blocks up to `end`, behind those that it has.
fn reserve(shared: &Shared, job: &FetchJob, end: usize, held: usize) -> Option<WriteLease> {
    let host = &shared.host;
    let tokens = &job.tokens[..end * PAGE_TOKENS as usize];
    let held_tokens = held.min(end) * PAGE_TOKENS as usize;
    let lease = match host.tree().lookup(&tokens[..held_tokens]) {
        Hit::Ready { lease, .. } => Some(lease),
        // What is on its way is not behind what stands ready.
        Hit::Pending { .. } | Hit::Miss => None,
    };
    if lease.as_ref().map_or(0, PrefixLease::tokens) as usize != held_tokens {
        return None;
    }
    let end_tokens = tokens.len() as u32;
    let windows = host.pools().schema().boundary_windows(end_tokens).len() as u32;
    if !host.make_room((end - held.min(end)) as u32, windows) {
        return None;
    }
    host.pools()
        .reserve_prefix(end_tokens, lease, Room(u64::MAX))
        .ok()
}

/// Enters the prefix into the tree of the host tier, with everything it needs or not at all.
fn publish(shared: &Shared, job: &FetchJob, end: usize, mut slots: WriteLease) -> Option<()> {
    let tokens = &job.tokens[..end * PAGE_TOKENS as usize];
    let layers = shared.host.pools().schema().layers();
    let commit = |layer: LayerId| slots.commit_layer(layer, 0..tokens.len() as u32).ok();
    let written: Vec<_> = layers.map(commit).collect::<Option<_>>()?;
    let tree = shared.host.tree();
    tree.publish_prefix(tokens, &mut slots, &written).ok()?;
    Some(())
}

/// A proof speaks for the record that it names. A tier that has asked another question than it was asked, say a cache
/// that mixes up its entries, has the proof of another record.
fn is_answer<'b>(wanted: &Wanted<'_>, found: Verified<'b>) -> Result<Verified<'b>, Miss> {
    let (expected_bytes, found_bytes) = (wanted.shape.payload_bytes(), found.payload_bytes());
    if found.id() != wanted.id {
        return Err(Miss::Identity { field: "key" });
    }
    if found_bytes != expected_bytes {
        return Err(Miss::Length {
            expected_bytes,
            found_bytes,
        });
    }
    Ok(found)
}

/// One record on its way.
struct Reading<'a> {
    shared: &'a Shared,
    job: &'a FetchJob,
    kind: RecordKind,
    /// The block that it is, or that it stands behind.
    block: usize,
    shape: &'a RecordShape,
    deadline: Deadline,
}

impl Reading<'_> {
    /// Reads it from `tier`, or one behind, and writes its rows. Answers which tier had it; `None` is a miss whose
    /// causes are counted.
    fn bring(&self, tier: usize, slots: &mut WriteLease, payload: &mut Vec<u8>) -> Option<usize> {
        payload.resize(self.shape.payload_bytes() as usize, 0);
        let tiers = 0..self.shared.config.tiers.len();
        for index in tiers.skip(tier) {
            if let Some(record) = self.read(index, payload) {
                let schema = self.shared.host.pools().schema();
                let position = self.position();
                rows::scatter(schema, slots, self.shape, position, &record).ok()?;
                return Some(index);
            }
        }
        None
    }

    fn read<'b>(&self, tier: usize, payload: &'b mut [u8]) -> Option<Verified<'b>> {
        let (shared, began) = (self.shared, Instant::now());
        if !shared.gates[tier].pass_read(self.shape.record_bytes(), self.deadline) {
            let counts = &mut shared.counts.lock().tiers[tier];
            *counts.misses.entry("limited").or_default() += 1;
            return None;
        }
        let tier_of = &shared.config.tiers[tier].tier;
        let wanted = self.wanted();
        let outcome = tier_of.read(wanted, payload, self.deadline);
        let outcome = outcome.and_then(|record| is_answer(&wanted, record));
        if let Some(cost) = &shared.cost {
            weigh::note_read(cost, tier, &outcome, began.elapsed());
        }
        let mut counts = shared.counts.lock();
        let counts = &mut counts.tiers[tier];
        match outcome {
            Ok(record) => {
                counts.read_records += 1;
                note_parts(&mut counts.components, self.shape, |c| &mut c.read_bytes);
                counts.read_bytes += record.payload_bytes();
                counts.read_us += began.elapsed().as_micros() as u64;
                Some(record)
            }
            Err(miss) => {
                if let Miss::Checksum { component, .. } = &miss {
                    let damaged = counts.components.entry(component.id());
                    damaged.or_default().damaged += 1;
                }
                *counts.misses.entry(miss.label()).or_default() += 1;
                None
            }
        }
    }

    /// Tokens before the block, or before the boundary.
    fn position(&self) -> u32 {
        let before = self.block as u32 * PAGE_TOKENS;
        match self.kind {
            RecordKind::Block => before,
            RecordKind::Checkpoint => before + PAGE_TOKENS,
        }
    }

    fn wanted(&self) -> Wanted<'_> {
        let keys = &self.job.keys;
        Wanted {
            namespace: self.shared.namespace.digest(),
            id: RecordId {
                kind: self.kind,
                key: keys[self.block],
            },
            parent: match self.block {
                0 => self.shared.namespace.root(),
                _ => keys[self.block - 1],
            },
            position: u64::from(self.position()),
            shape: self.shape,
        }
    }
}
