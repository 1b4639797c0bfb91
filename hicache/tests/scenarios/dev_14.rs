//! DEV-14: ranks disagree about completions.
//!
//! **Given** four ranks, each with prefetches of its own that end at different moments, one of them with less than the
//! others. **When** the host asks in every step which of its requests can go on. **Expected** every rank takes part in
//! the same number of collectives, whatever ends when: the cache has none, none of its calls waits for a tier, and a
//! length that the ranks have agreed on can be had on each of them. **In the field** one rank waited in an
//! all-reduce and the others in a broadcast, and the engine was dead.
//!
//! Guard: I-24. A lookup that is not to wait does not (`hicache/src/storage/stack.rs`), and a fetch brings the end that
//! it is asked for, no other one (`hicache/src/storage/fetch.rs`).

use std::sync::{Condvar, Mutex};
use std::time::Duration;

use kvgate_hicache::Miss;
use kvgate_hicache::identity::{KeyChain, Namespace};
use kvgate_hicache::record::{RecordId, RecordKind};
use kvgate_hicache::storage::{Place, PrefetchPolicy, StorageConfig, StorageTier};
use kvgate_hicache::testkit::Hooked;
use kvgate_hicache::tier::{MemoryTier, Tier};
use kvgate_kvcache::canary::PageDigest;
use kvgate_transfer::sync::Arc;

use crate::common::*;

const RANKS: usize = 4;
/// The requests of a step, by the number of their conversation: the list is fixed.
const REQUESTS: [u32; 2] = [1, 2];
const TOKENS: u32 = 1_100;
const SIZES: Sizes = Sizes {
    device: (10, 10),
    host: (10, 8),
};
/// A rank that is not there by then waits for something else.
const PATIENCE: Duration = Duration::from_secs(5);

fn namespace() -> Namespace {
    Namespace::new(&schema(), 256, b"").unwrap()
}

fn world(tier: Arc<dyn Tier>, prefetch: PrefetchPolicy) -> World {
    let place = Place::Local;
    let config = StorageConfig {
        prefetch,
        ..StorageConfig::new(vec![StorageTier { tier, place }])
    };
    let world = World::sim(&SIZES);
    World {
        cache: world.cache.with_storage(namespace(), config).unwrap(),
        net: world.net,
    }
}

/// Both conversations, with an end behind every page.
fn stored() -> (Arc<MemoryTier>, Vec<Vec<PageDigest>>) {
    let tier = Arc::new(MemoryTier::new(64 << 20));
    let world = world(tier.clone(), PrefetchPolicy::Wait);
    let mut rows = Vec::new();
    for number in REQUESTS {
        for pages in 1..=4 {
            rows.push(world.compute(number, pages * 256));
            world.cache.backup(&tokens(number, pages * 256)).unwrap();
            world.run();
            assert!(world.cache.wait(patience()));
            world.cache.device().tree().evict(u32::MAX);
        }
    }
    world.check_conserved();
    (tier, rows)
}

fn block(number: u32, k: usize) -> RecordId {
    RecordId {
        kind: RecordKind::Block,
        key: KeyChain::of(&namespace(), &tokens(number, 1_024)).keys()[k],
    }
}

/// What one rank says of one request: whether it is still being fetched, and the tokens that it could go on from.
type Word = (bool, u32);

/// A collective over the ranks: everybody says its words, everybody hears the least of all. Counts who took part.
#[derive(Default)]
struct Collective {
    state: Mutex<Round>,
    changed: Condvar,
}

#[derive(Default)]
struct Round {
    /// Collectives that are over; the tiers open by this count.
    done: u32,
    here: usize,
    least: Vec<Word>,
    heard: Vec<Word>,
    calls: [u32; RANKS],
    is_dead: bool,
}

impl Collective {
    /// # Panics
    /// When a rank does not come.
    fn agree(&self, rank: usize, words: &[Word]) -> Vec<Word> {
        let mut round = self.state.lock().unwrap();
        round.calls[rank] += 1;
        if round.here == 0 {
            round.least = words.to_vec();
        }
        for (least, word) in round.least.iter_mut().zip(words) {
            *least = (least.0 || word.0, least.1.min(word.1));
        }
        round.here += 1;
        if round.here == RANKS {
            round.heard = std::mem::take(&mut round.least);
            (round.here, round.done) = (0, round.done + 1);
            self.changed.notify_all();
            return round.heard.clone();
        }
        let number = round.done;
        let waiting = |round: &mut Round| round.done == number && !round.is_dead;
        let (mut round, late) = self
            .changed
            .wait_timeout_while(round, PATIENCE, waiting)
            .unwrap();
        if late.timed_out() || round.is_dead {
            round.is_dead = true;
            let calls = round.calls;
            drop(round);
            self.changed.notify_all();
            panic!("a rank waits for its tier, the others in a collective: {calls:?}");
        }
        round.heard.clone()
    }

    /// Blocks until so many collectives are over; `false` when the ranks are dead.
    fn wait_for(&self, step: u32) -> bool {
        let round = self.state.lock().unwrap();
        let waiting = |round: &mut Round| round.done < step && !round.is_dead;
        let round = self.changed.wait_while(round, waiting).unwrap();
        !round.is_dead
    }
}

/// One rank of the host. Answers how many collectives it took part in, and what its requests went on from.
fn run_rank(
    rank: usize,
    world: &World,
    ranks: &Collective,
    rows: &[Vec<PageDigest>],
) -> (u32, Vec<u32>) {
    let mut lengths = REQUESTS.map(|_| TOKENS);
    let mut asked = REQUESTS.map(|_| 0);
    let mut steps = 0;
    loop {
        let words: Vec<Word> = REQUESTS
            .iter()
            .zip(lengths)
            .zip(&mut asked)
            .map(|((&number, length), asked)| {
                let prompt = tokens(number, length);
                // Neither of them waits; the tier has its time.
                let now = match std::mem::replace(asked, length) == length {
                    true => world.cache.lookup(&prompt),
                    false => world.cache.lookup_within(&prompt, patience()),
                };
                let is_open = world.cache.open_storage().1 > 0;
                world.run_moves();
                (is_open, now.map_or(0, |found| found.tokens))
            })
            .collect();
        let heard = ranks.agree(rank, &words);
        steps += 1;
        assert!(steps < 1_000, "the ranks never agree");
        if heard.iter().any(|(is_open, _)| *is_open) {
            continue;
        }
        let agreed = heard.iter().map(|(_, tokens)| *tokens);
        let is_settled = agreed
            .clone()
            .zip(lengths)
            .all(|(least, length)| least + 1 == length || least == 0);
        if is_settled {
            break;
        }
        // Whoever has more goes on from what everybody has.
        for (length, least) in lengths.iter_mut().zip(agreed) {
            *length = least + 1;
        }
    }
    let mut used = Vec::new();
    for (index, (&number, length)) in REQUESTS.iter().zip(lengths).enumerate() {
        let found = world
            .cache
            .lookup(&tokens(number, length))
            .expect("agreed and there");
        world.run_moves();
        assert_eq!(
            found.tokens + 1,
            length,
            "rank {rank} cannot go on where the others do"
        );
        used.push(found.tokens);
        let (lease, restored) = world.resume(found, number).unwrap();
        assert_eq!(restored, rows[index * 4 + used[index] as usize / 256 - 1]);
        drop(lease);
    }
    (steps, used)
}

/// Every rank's tier opens behind a step of its own; every rank takes part in the same collectives.
#[test]
fn dev_14_ranks_take_part_in_the_same_collectives() {
    let (tier, rows) = stored();
    let mut steps_seen = std::collections::BTreeSet::new();
    for schedule in 0..24_usize {
        // All orders of four moments, and the rank that has lost a page.
        let mut left = vec![0, 1, 2, 4];
        let opens = [schedule / 6, schedule / 2 % 3, schedule % 2, 0].map(|at| left.remove(at));
        let (poor, lost) = (
            schedule % RANKS,
            block(REQUESTS[schedule % 2], 1 + schedule % 3),
        );
        let ranks = Arc::new(Collective::default());
        let worlds: Vec<World> = (0..RANKS)
            .map(|rank| {
                let (ranks, step) = (ranks.clone(), opens[rank]);
                let hooked = Hooked::reads(tier.clone(), move |id, _| {
                    match ranks.wait_for(step) && !(rank == poor && *id == lost) {
                        true => Ok(()),
                        false => Err(Miss::Absent),
                    }
                });
                world(Arc::new(hooked), PrefetchPolicy::BestEffort)
            })
            .collect();
        let ended: Vec<_> = std::thread::scope(|scope| {
            let run = |rank: usize| {
                let (world, ranks, rows) = (&worlds[rank], &ranks, &rows);
                scope.spawn(move || run_rank(rank, world, ranks, rows))
            };
            let threads: Vec<_> = (0..RANKS).map(run).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        assert!(ended.iter().all(|end| *end == ended[0]), "{ended:?}");
        let pages = 1 + schedule % 3;
        let mut expected = vec![1_024, 1_024];
        expected[schedule % 2] = pages as u32 * 256;
        assert_eq!(ended[0].1, expected, "opens behind {opens:?}");
        steps_seen.insert(ended[0].0);
        worlds.into_iter().for_each(World::check_conserved);
    }
    assert!(
        steps_seen.len() > 1,
        "every schedule took {steps_seen:?} steps"
    );
}
