//! [`Hicache`]: the device pool, the host tier and the storage tiers as one cache of prefixes.

#[cfg(not(kv_loom))]
mod behind;

use std::time::Duration;

use kvgate_kvcache::identity::NamespaceDigest;
use kvgate_kvcache::{CacheSchema, ComponentRow, Hit, PrefixLease};
use kvgate_transfer::sync::{Arc, AtomicU64, Mutex, Ordering};
use kvgate_transfer::{Cause, Deadline, Epoch, PeerId, StageId};

use crate::figures::Lengths;
use crate::flight::{Begun, Ends, Move, Poster, Progress, TIER_EPOCHS, backup, given_up, loadback};
use crate::host::pin;
use crate::side::{Side, tokens_of};

#[cfg(not(kv_loom))]
use crate::storage::{Place, Storage};

/// Where a prefix was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// In the device pool, complete.
    Device,
    /// In the host tier: it is on its way into the device pool, and layers open as they land. A load of
    /// another request, or a hand-off, that is still under way counts as one too.
    Host,
    /// In a storage tier of this machine: it was read, verified and put into the host tier, and is on its way from there.
    /// Whoever goes on from it after that has it from the host tier.
    Storage,
    /// The same, of a storage tier behind a network.
    Remote,
}

/// A prefix that a request can go on from, with [`kvgate_kvcache::PoolSet::resume`].
#[derive(Debug)]
#[must_use = "the prefix is kept only while this lives"]
pub struct Found {
    /// The right to it.
    pub lease: PrefixLease,
    /// Its length, a multiple of 256.
    pub tokens: u32,
    /// Where it was.
    pub origin: Origin,
}

/// What became of a backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Backup {
    /// It is under way.
    Started,
    /// The host tier has the prefix, or it is on its way there.
    Taken,
    /// The device does not have the prefix whole and ready.
    NotThere,
    /// The host tier has no room, and nothing in it can go. Dropping a backup is always allowed.
    NoRoom,
}

/// Counts since the start. Each counter only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Lookups that found a prefix in the device pool, complete.
    pub device_hits: u64,
    /// Lookups that found one in the host tier, or on its way from there.
    pub host_hits: u64,
    /// Lookups that found one that had been read from a storage tier of this machine.
    pub storage_hits: u64,
    /// Lookups that found one that had been read from a storage tier behind a network.
    pub remote_hits: u64,
    /// Lookups that found nothing to go on from.
    pub misses: u64,
    /// Tokens of all hits.
    pub hit_tokens: u64,
    /// Backups that were begun, have landed, have failed, and found no room.
    pub backups: MoveCounts,
    /// The same of loads.
    pub loads: MoveCounts,
    /// Loads that were dropped before they were posted, since another one brought the same prefix.
    pub duplicate_loads: u64,
}

/// Counts of moves in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoveCounts {
    /// Begun.
    pub started: u64,
    /// Landed whole.
    pub landed: u64,
    /// Failed: a miss, never a hit.
    pub failed: u64,
    /// Not begun for want of room.
    pub no_room: u64,
}

/// Device pool and host tier behind one lookup.
///
/// Nothing here blocks, but for [`Hicache::wait`]: moves go on by themselves, and [`Hicache::settle`], which the other
/// calls make as well, takes note of what has landed and what has failed.
///
/// **What is protected by what.** One mutex guards the moves and the counts. **Lock order.** It comes before every
/// lock of the caches, and no gate is waited for with it held.
#[derive(Debug)]
pub struct Hicache {
    /// Ends first: its workers use the host tier. `None` without storage tiers, and after the shutdown.
    #[cfg(not(kv_loom))]
    storage: Mutex<Option<Arc<Storage>>>,
    /// Ends before the two sides do.
    poster: Poster,
    device: Side,
    host: Arc<Side>,
    /// The host tier, as the device agent knows it.
    to_host: PeerId,
    /// The device side, as the host agent knows it.
    to_device: PeerId,
    next_epoch: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    backups: Vec<Move>,
    loads: Vec<Move>,
    counts: Counts,
    lengths: [Lengths; 4],
    last_failure: Option<Cause>,
}

impl Hicache {
    /// Two sides that are connected to each other: `to_host` is the host tier as the agent of the device
    /// side knows it, `to_device` the other way round.
    ///
    /// # Errors
    /// `InvalidRequest` when the pools of the two do not have the same schema, with the component or the field
    /// that tells them apart, or when their trees are of different namespaces: another tenant's prefixes would
    /// be hits.
    pub fn over(
        device: Side,
        host: Side,
        to_host: PeerId,
        to_device: PeerId,
    ) -> Result<Hicache, kvgate_kvcache::Error> {
        // Components that one side does not have would be lost on the way (I-15).
        check_schemas(device.pools().schema(), host.pools().schema())?;
        check_namespaces(device.tree().namespace(), host.tree().namespace())?;
        Ok(Hicache {
            #[cfg(not(kv_loom))]
            storage: Mutex::new(None),
            poster: Poster::start(),
            device,
            host: Arc::new(host),
            to_host,
            to_device,
            next_epoch: AtomicU64::new(TIER_EPOCHS),
            state: Mutex::new(State::default()),
        })
    }

    /// The device side.
    pub fn device(&self) -> &Side {
        &self.device
    }

    /// The host tier.
    pub fn host(&self) -> &Side {
        &self.host
    }

    /// The longest prefix of `tokens` that a request can go on from. If the host tier has a longer one than the
    /// device pool, it is loaded: the lease is then of pages that are on their way, or were taken by
    /// another load of the same prefix. A load that cannot begin is a shorter hit, or a miss. The storage tiers are not
    /// asked: [`Hicache::lookup_within`].
    pub fn lookup(&self, tokens: &[u32]) -> Option<Found> {
        self.settle();
        let device = self.device.tree().resumable(tokens);
        let here = tokens_of(&device);
        let found = match pin(&self.host, tokens).filter(|pin| pin.tokens() > here) {
            Some(pin) => {
                let prefix = &tokens[..pin.tokens() as usize];
                self.load(prefix, &pin);
                drop(device);
                self.device.tree().resumable(tokens)
            }
            None => device,
        };
        let found = match found {
            // What was not here before the load came from the host tier, also if it has landed by now.
            Hit::Ready { lease, tokens } if tokens <= here => Some((lease, tokens, Origin::Device)),
            Hit::Ready { lease, tokens: t } | Hit::Pending { lease, tokens: t } => {
                let origin = self.origin_behind(&tokens[..t as usize]);
                Some((lease, t, origin))
            }
            Hit::Miss => None,
        };
        if let Some((_, found_tokens, _)) = &found {
            self.note_use(&tokens[..*found_tokens as usize]);
        }
        let mut state = self.state.lock();
        if let Some((_, tokens, origin)) = &found {
            state.lengths[*origin as usize].note(*tokens);
        }
        let counts = &mut state.counts;
        match &found {
            Some((_, tokens, origin)) => {
                counts.hit_tokens += u64::from(*tokens);
                match origin {
                    Origin::Device => counts.device_hits += 1,
                    Origin::Host => counts.host_hits += 1,
                    Origin::Storage => counts.storage_hits += 1,
                    Origin::Remote => counts.remote_hits += 1,
                }
            }
            None => counts.misses += 1,
        }
        found.map(|(lease, tokens, origin)| Found {
            lease,
            tokens,
            origin,
        })
    }

    /// Where a prefix of the host tier came from.
    fn origin_behind(&self, _prefix: &[u32]) -> Origin {
        #[cfg(not(kv_loom))]
        if let Some(storage) = self.storage() {
            return match storage.take_origin(_prefix) {
                Some(Place::Local) => Origin::Storage,
                Some(Place::Remote) => Origin::Remote,
                None => Origin::Host,
            };
        }
        Origin::Host
    }

    /// A request goes on from this prefix.
    fn note_use(&self, _prefix: &[u32]) {
        #[cfg(not(kv_loom))]
        if let Some(storage) = self.storage() {
            storage.sighted(_prefix);
        }
    }

    fn load(&self, prefix: &[u32], pin: &crate::host::HostLease) {
        let ends = Ends {
            from: &self.host,
            into: &self.device,
            to_into: self.to_device,
            to_from: self.to_host,
            poster: &self.poster,
        };
        let begun = loadback::start(ends, prefix, pin, self.next_epoch());
        let mut state = self.state.lock();
        let counts = &mut state.counts;
        match begun {
            Ok(Begun::Started(load)) => {
                counts.loads.started += 1;
                state.note_start(load, |state| &mut state.loads, |counts| &mut counts.loads);
            }
            Ok(Begun::Taken) => counts.duplicate_loads += 1,
            Ok(Begun::NoRoom) => counts.loads.no_room += 1,
            Err(error) => {
                counts.loads.failed += 1;
                state.last_failure = Some(Cause::Transfer(error.to_string()));
            }
        }
    }

    /// Begins to copy the prefix that is exactly `tokens` into the host tier. Never waits for it.
    ///
    /// # Errors
    /// The cache or the engine refused; the prefix is then not in the host tier.
    pub fn backup(&self, tokens: &[u32]) -> Result<Backup, kvgate_kvcache::Error> {
        self.settle();
        #[cfg(not(kv_loom))]
        if let Some(storage) = self.storage() {
            storage.relieve();
        }
        let ends = Ends {
            from: &self.device,
            into: &self.host,
            to_into: self.to_host,
            to_from: self.to_device,
            poster: &self.poster,
        };
        let begun = backup::start(ends, tokens, self.next_epoch());
        let mut state = self.state.lock();
        let counts = &mut state.counts.backups;
        match begun {
            Ok(Some(Begun::Started(backup))) => {
                counts.started += 1;
                state.note_start(
                    backup,
                    |state| &mut state.backups,
                    |counts| &mut counts.backups,
                );
                Ok(Backup::Started)
            }
            Ok(Some(Begun::Taken)) => Ok(Backup::Taken),
            Ok(Some(Begun::NoRoom)) => {
                counts.no_room += 1;
                Ok(Backup::NoRoom)
            }
            Ok(None) => Ok(Backup::NotThere),
            Err(error) => {
                counts.failed += 1;
                Err(error)
            }
        }
    }

    /// Takes note of moves that have landed or failed.
    pub fn settle(&self) {
        let mut state = self.state.lock();
        let State {
            backups,
            loads,
            counts,
            last_failure,
            ..
        } = &mut *state;
        let landed = settle_moves(backups, &self.host, &mut counts.backups, last_failure);
        let _loaded = settle_moves(loads, &self.device, &mut counts.loads, last_failure);
        drop(state);
        for backup in landed {
            self.note_backup(&backup.into_tokens());
        }
    }

    /// A prefix has come into the host tier.
    fn note_backup(&self, _prefix: &[u32]) {
        #[cfg(not(kv_loom))]
        if let Some(storage) = self.storage() {
            storage.landed(_prefix);
        }
    }

    /// Blocks until no move is under way, those that failed included, and the queues of the storage tiers are empty:
    /// everything of them is quiet. `false` at the deadline, which changes nothing.
    pub fn wait(&self, deadline: Deadline) -> bool {
        let is_still = self.wait_moves(deadline);
        #[cfg(not(kv_loom))]
        if let Some(storage) = self.storage() {
            return storage.wait_idle(deadline) && is_still;
        }
        is_still
    }

    /// Blocks until every layer of every move that was begun has been posted: what is left is up to the transfer engine.
    /// `false` at the deadline, which changes nothing.
    pub fn wait_posted(&self, deadline: Deadline) -> bool {
        let awaited: Vec<_> = {
            let state = self.state.lock();
            let moves = state.backups.iter().chain(&state.loads);
            moves.map(|begun| begun.awaited().1).collect()
        };
        awaited.iter().all(|posts| posts.wait_over(deadline))
    }

    /// Blocks until no move between device pool and host tier is under way. `false` at the deadline, which changes
    /// nothing.
    pub fn wait_moves(&self, deadline: Deadline) -> bool {
        loop {
            self.settle();
            let awaited: Vec<_> = {
                let state = self.state.lock();
                if state.backups.is_empty() && state.loads.is_empty() {
                    return true;
                }
                let moves = state.backups.iter().chain(&state.loads);
                moves.map(Move::awaited).collect()
            };
            for (gates, posts) in awaited {
                let _posted_or_late = posts.wait_over(deadline);
                for handle in posts.so_far() {
                    let _ended_or_late = handle.wait(deadline);
                }
                let stages = gates
                    .iter()
                    .flat_map(|gates| (0..gates.stage_count()).map(move |s| (gates, s)));
                for (gates, stage) in stages {
                    let _open_or_not = gates.wait(StageId(stage as u16), deadline);
                }
            }
            if deadline.has_passed() {
                return false;
            }
            kvgate_transfer::sync::thread::yield_now();
        }
    }

    /// Gives every move up that is under way, with its reason as the cause. Their slots come back as soon as nothing
    /// touches them.
    pub fn abort_moves(&self, reason: &str) {
        let mut state = self.state.lock();
        let State {
            backups,
            loads,
            counts,
            ..
        } = &mut *state;
        for (moves, counts) in [(backups, &mut counts.backups), (loads, &mut counts.loads)] {
            for begun in moves.iter_mut().filter(|begun| begun.is_flying()) {
                begun.fail(given_up(reason));
                counts.failed += 1;
            }
        }
    }

    /// Counts since the start.
    pub fn counts(&self) -> Counts {
        self.state.lock().counts
    }

    /// Moves that are under way or whose slots are not proven quiet: backups, loads.
    pub fn open_moves(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.backups.len(), state.loads.len())
    }

    /// Lengths of the prefixes that were found there.
    pub fn hit_lengths(&self, origin: Origin) -> Lengths {
        self.state.lock().lengths[origin as usize]
    }

    /// Ages of the oldest backup and the oldest load that are under way or whose slots are not proven quiet.
    pub fn oldest_moves(&self) -> (Option<Duration>, Option<Duration>) {
        let state = self.state.lock();
        let oldest = |moves: &[Move]| moves.iter().map(Move::age).max();
        (oldest(&state.backups), oldest(&state.loads))
    }

    /// Why the last move failed that did.
    pub fn last_failure(&self) -> Option<Cause> {
        self.state.lock().last_failure.clone()
    }

    fn next_epoch(&self) -> Epoch {
        Epoch(self.next_epoch.fetch_add(1, Ordering::Relaxed))
    }
}

/// Keys are made in the namespace of each tree: two of them would give one tenant what is another's.
fn check_namespaces(
    device: NamespaceDigest,
    host: NamespaceDigest,
) -> Result<(), kvgate_kvcache::Error> {
    if device == host {
        return Ok(());
    }
    let kind = kvgate_kvcache::ErrorKind::InvalidRequest {
        field: "namespace of the host tier, its first 8 bytes",
        value: first_bytes(host),
        expected: format!("{}, that of the device tree", first_bytes(device)),
    };
    Err(kind.into())
}

fn first_bytes(digest: NamespaceDigest) -> u64 {
    u64::from_be_bytes(std::array::from_fn(|index| digest.0[index]))
}

/// Whether the host side can hold every component of the device side.
fn check_schemas(device: &CacheSchema, host: &CacheSchema) -> Result<(), kvgate_kvcache::Error> {
    let lacks = |row: &&ComponentRow| {
        let same = host.row(row.layer, row.component);
        same.map(|found| found.format) != Some(row.format)
    };
    let mut missing: Vec<&str> = device
        .rows()
        .iter()
        .filter(lacks)
        .map(|row| row.component.id())
        .collect();
    missing.sort_unstable();
    missing.dedup();
    if missing.is_empty() && device.fingerprint() == host.fingerprint() {
        return Ok(());
    }
    let expected = match missing.is_empty() {
        true => "the schema of the device pools, field by field".to_owned(),
        false => format!("also {}, as the device pools have them", missing.join(", ")),
    };
    let kind = kvgate_kvcache::ErrorKind::InvalidRequest {
        field: "layers of the host tier",
        value: u64::from(host.layer_count()),
        expected,
    };
    Err(kind.into())
}

impl State {
    /// Keeps a move that was begun; one that failed at once counts as failed.
    fn note_start(
        &mut self,
        begun: Move,
        moves: fn(&mut State) -> &mut Vec<Move>,
        counts: fn(&mut Counts) -> &mut MoveCounts,
    ) {
        if !begun.is_flying() {
            counts(&mut self.counts).failed += 1;
        }
        moves(self).push(begun);
    }
}

/// Brings moves up to date. Answers those that have landed.
fn settle_moves(
    moves: &mut Vec<Move>,
    into: &Side,
    counts: &mut MoveCounts,
    last_failure: &mut Option<Cause>,
) -> Vec<Move> {
    let mut landed = Vec::new();
    for mut begun in std::mem::take(moves) {
        match begun.poll(into) {
            Progress::UnderWay => moves.push(begun),
            Progress::Landed => {
                counts.landed += 1;
                landed.push(begun);
            }
            Progress::Failed(cause) => {
                counts.failed += 1;
                *last_failure = Some(cause);
                moves.push(begun);
            }
            Progress::Over => {}
        }
    }
    landed
}
