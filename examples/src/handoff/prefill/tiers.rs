//! The tiers of the prefill side: its device pool and a host tier behind one lookup.

use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use kvgate_hicache::Hicache;
use kvgate_hicache::cache::{Found, Origin};
use kvgate_kvcache::schema::PAGE_TOKENS;
use kvgate_kvcache::{CacheSchema, PoolSet, Room, Space, WriteLease};
use kvgate_transfer::{Agent, Deadline};

use super::Side;
use super::flight::Flight;
use crate::handoff::failure::Failure;
use crate::handoff::model::cache_failure;
use crate::handoff::report::{TierHits, TierWork};
use crate::handoff::turns::schedule::Plan;
use crate::handoff::turns::sizes::{self, TierSizes, name_of};
use crate::handoff::turns::storage::{StorageOptions, Stores};

/// The cache of prefixes, and what it was good for.
pub(super) struct Tiers {
    pub(super) cache: Hicache,
    /// `None` once they are closed.
    stores: Mutex<Option<Stores>>,
    /// By request, whether it is the first turn of its conversation.
    first_turns: Vec<bool>,
    work: Mutex<TierWork>,
}

/// A request that may begin.
pub(super) struct Begun {
    pub(super) lease: WriteLease,
    pub(super) hit: Option<Prefix>,
}

/// What a request goes on from.
pub(super) struct Prefix {
    pub(super) tokens: u32,
    /// The farthest tier that had a part of it.
    pub(super) origin: Origin,
    /// What each storage tier gave for it, nearest first.
    given: Vec<Given>,
}

/// Records that came out of a storage tier.
#[derive(Clone, Copy, Default)]
struct Given {
    records: u64,
    bytes: u64,
}

/// Bytes of the slots that a prefix is loaded into; 0 for the device pool, where nothing moves.
fn loaded_bytes(schema: &CacheSchema, hit: &Prefix) -> u64 {
    if hit.origin == Origin::Device {
        return 0;
    }
    let pages = u64::from(hit.tokens / PAGE_TOKENS) * schema.slot_bytes(Space::Page);
    let windows = schema.boundary_windows(hit.tokens).len() as u64;
    pages + windows * schema.slot_bytes(Space::Window)
}

impl Tiers {
    pub(super) fn connect(
        agent: &Agent,
        pools: &PoolSet,
        sizes: &TierSizes,
        storage: &StorageOptions,
        plan: &Plan,
    ) -> Result<Tiers, Failure> {
        let stores = Stores::open(storage)?;
        let connected = sizes::connect(agent, pools, sizes, &storage.salt);
        let (cache, namespace) = connected.map_err(|error| cache_failure(&error))?;
        let cache = stores.attach(cache, namespace)?;
        let names = ["device", "host"].into_iter().chain(stores.names());
        let tier = |tier: &str| TierHits {
            tier: tier.to_owned(),
            ..TierHits::default()
        };
        let work = TierWork {
            device_pages: sizes.device.pages,
            host_pages: sizes.host_pages,
            tiers: names.map(tier).collect(),
            ..TierWork::default()
        };
        Ok(Tiers {
            cache,
            stores: Mutex::new(Some(stores)),
            first_turns: plan.order().iter().map(|turn| turn.turn == 0).collect(),
            work: Mutex::new(work),
        })
    }

    /// Slots for a request, behind the longest prefix there is. `None` when the flight was given up.
    pub(super) fn begin(&self, side: &Side, flight: &Flight) -> Result<Option<Begun>, Failure> {
        let since = Instant::now();
        let until = Deadline::after(side.watch.deadline());
        let before = self.given();
        let mut found = {
            // A store that does not answer is a miss at the deadline; until then this side is alive.
            let _busy = side.activity.busy();
            self.cache.lookup_within(&flight.prompt_ids, until)
        };
        let given = self.given().into_iter().zip(before);
        let given = given.map(|(now, before)| Given {
            records: now.records - before.records,
            bytes: now.bytes - before.bytes,
        });
        let hit = found.as_ref().map(|found| Prefix {
            tokens: found.tokens,
            origin: found.origin,
            given: given.collect(),
        });
        while !flight.is_aborted() {
            match self.try_reserve(side, flight, found.take())? {
                Ok(lease) => return Ok(Some(Begun { lease, hit })),
                Err(kept) => found = kept,
            }
            self.wait_for_room(side, since)?;
        }
        Ok(None)
    }

    /// What the storage tiers have given so far. One thread looks up, so what comes during a lookup is of that lookup.
    fn given(&self) -> Vec<Given> {
        let counts = self.cache.storage_counts().unwrap_or_default();
        let given = counts.tiers.iter().map(|tier| Given {
            records: tier.read_records,
            bytes: tier.read_bytes,
        });
        given.collect()
    }

    /// Slots for a request that computes everything. `None` when the flight was given up.
    pub(super) fn begin_cold(
        &self,
        side: &Side,
        flight: &Flight,
    ) -> Result<Option<WriteLease>, Failure> {
        let since = Instant::now();
        while !flight.is_aborted() {
            if let Ok(lease) = self.try_reserve(side, flight, None)? {
                return Ok(Some(lease));
            }
            self.wait_for_room(side, since)?;
        }
        Ok(None)
    }

    /// One try; a prefix comes back when there is no room behind it now.
    fn try_reserve(
        &self,
        side: &Side,
        flight: &Flight,
        found: Option<Found>,
    ) -> Result<Result<WriteLease, Option<Found>>, Failure> {
        let tokens = flight.prompt_ids.len() as u32;
        let room = Room(u64::from(flight.request()));
        let counts = side.host.schema.slots_for(tokens);
        let held_pages = found.as_ref().map_or(0, |found| found.tokens / PAGE_TOKENS);
        let own_pages = counts.of(Space::Page) - held_pages;
        let device = self.cache.device();
        // Without room the pools say so themselves.
        let _has_room = device.make_room(own_pages, counts.of(Space::Window));
        let Some(found) = found else {
            return match device.pools().reserve(tokens, room) {
                Ok(lease) => Ok(Ok(lease)),
                Err(error) if error.is_retryable() => Ok(Err(None)),
                Err(error) => Err(cache_failure(&error)),
            };
        };
        let (held, origin) = (found.tokens, found.origin);
        match device.pools().resume(found.lease, tokens, room) {
            Ok(lease) => Ok(Ok(lease)),
            Err(refused) if refused.1.is_retryable() => Ok(Err(Some(Found {
                lease: refused.0,
                tokens: held,
                origin,
            }))),
            Err(refused) => Err(cache_failure(&refused.1)),
        }
    }

    /// Slots come back when the decode side says Done, and when a backup that reads them has ended.
    fn wait_for_room(&self, side: &Side, since: Instant) -> Result<(), Failure> {
        self.cache.settle();
        side.watch
            .check(since, "a wait for pages of the prefill side")?;
        thread::sleep(Duration::from_millis(1));
        Ok(())
    }

    fn is_first_turn(&self, flight: &Flight) -> bool {
        let first = self.first_turns.get(flight.request() as usize);
        first.is_some_and(|is_first| *is_first)
    }

    /// What a request found; `load` is the time until the last layer of it could be read.
    pub(super) fn count(
        &self,
        side: &Side,
        flight: &Flight,
        hit: Option<&Prefix>,
        load: Option<Duration>,
    ) {
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        let prompt_tokens = flight.prompt_ids.len() as u32;
        let Some(hit) = hit else {
            work.computed_tokens += u64::from(prompt_tokens);
            work.misses += 1;
            return;
        };
        work.computed_tokens += u64::from(prompt_tokens - hit.tokens);
        let is_first = u64::from(self.is_first_turn(flight));
        let farthest = name_of(hit.origin);
        // The storage tiers stand behind device pool and host tier.
        let none = [Given::default(); 2];
        let given = none.iter().chain(&hit.given);
        for (tier, given) in work.tiers.iter_mut().zip(given) {
            if tier.tier == farthest {
                tier.hits += 1;
                tier.first_turn_hits += is_first;
                tier.hit_tokens += u64::from(hit.tokens);
                tier.bytes += loaded_bytes(&side.host.schema, hit);
                tier.load_ms += load.map_or(0.0, |load| load.as_secs_f64() * 1_000.0);
            } else if given.records > 0 {
                tier.hits += 1;
                tier.first_turn_hits += is_first;
                tier.bytes += given.bytes;
            }
        }
    }

    /// Whether nothing is on its way between the tiers.
    pub(super) fn is_quiet(&self) -> bool {
        self.cache.settle();
        self.cache.open_moves() == (0, 0)
    }

    /// Moves end by themselves; one that does not is a bug of this program.
    pub(super) fn check_moves(&self, since: Instant, limit: Duration) -> Result<(), Failure> {
        if since.elapsed() <= limit {
            return Ok(());
        }
        let (backups, loads) = self.cache.open_moves();
        let text = format!("{backups} backups and {loads} loads do not end");
        Err(Failure::internal(text))
    }

    /// Gives everything up that is kept, and says what was done.
    ///
    /// Takes `limit` in all, whatever the stores do.
    pub(super) fn finish(&self, limit: Duration) -> TierWork {
        let until = Deadline::after(limit);
        let end = self.cache.shutdown(until);
        let stores = self
            .stores
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        let stores = stores.filter(|stores| !stores.names().is_empty());
        let storage = stores.map(|stores| stores.close(&end, until));
        for side in [self.cache.device(), self.cache.host()] {
            // Until nothing more can go: an inner page goes once those behind it have gone.
            while side.tree().evict(u32::MAX) > 0 {}
        }
        let counts = self.cache.counts();
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        work.backups = counts.backups.into();
        work.loads = counts.loads.into();
        work.storage = storage;
        work.clone()
    }

    /// Every page of the host tier is free again.
    pub(super) fn is_conserved(&self) -> bool {
        let stats = self.cache.host().pools().stats();
        let busy =
            [stats.pages, stats.windows, stats.requests].map(|space| space.owned + space.draining);
        stats.is_conserved() && busy == [0; 3]
    }
}
