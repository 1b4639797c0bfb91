//! DEV-11: a prefetch from storage stops early and publishes too much.
//!
//! **Given** a prefix of 16 pages in storage, of which a record goes between the look and the read, or whose fetch may
//! stop at any page. **When** the fetch ends. **Expected** what is published is the leading run that has every
//! component, up to an end whose window and states are there; pages behind it are free again; a hole counts for
//! nothing. **In the field** the length of the latent pages was published, and the tail paired fresh latents with
//! stale indexer keys.
//!
//! Guard: I-22. A record holds every component of its block, an end is published only behind blocks that have all
//! come, and the slots behind it stay with the fetch (`hicache/src/storage/fetch.rs`).

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};

use kvgate_hicache::Miss;
use kvgate_hicache::cache::Origin;
use kvgate_hicache::identity::{KeyChain, Namespace};
use kvgate_hicache::record::{RecordId, RecordKind, RecordShape};
use kvgate_hicache::storage::{Fetch, Place, PrefetchPolicy, StorageConfig, StorageTier};
use kvgate_hicache::testkit::Hooked;
use kvgate_hicache::tier::{MemoryTier, Tier};
use kvgate_kvcache::Component;
use kvgate_kvcache::canary::PageDigest;
use kvgate_transfer::sync::Arc;

use crate::common::*;

const PAGES: u32 = 16;
/// Ends that can be gone on from, in pages.
const ENDS: [u32; 3] = [4, 9, PAGES];
const SIZES: Sizes = Sizes {
    device: (20, 10),
    host: (18, 6),
};
const SYMPTOM: &str = "the length of one component was published";

fn world(tier: Arc<dyn Tier>, prefetch: PrefetchPolicy) -> World {
    let place = Place::Local;
    let config = StorageConfig {
        prefetch,
        ..StorageConfig::new(vec![StorageTier { tier, place }])
    };
    let world = World::sim(&SIZES);
    let namespace = Namespace::new(&schema(), 256, b"").unwrap();
    World {
        cache: world.cache.with_storage(namespace, config).unwrap(),
        net: world.net,
    }
}

/// A tier with the prefix, and its rows at each end.
fn stored() -> (Arc<MemoryTier>, Vec<Vec<PageDigest>>) {
    let tier = Arc::new(MemoryTier::new(64 << 20));
    let world = world(tier.clone(), PrefetchPolicy::Wait);
    let rows = ENDS.map(|end| {
        let rows = world.compute(1, end * 256);
        world.cache.backup(&tokens(1, end * 256)).unwrap();
        world.run();
        assert!(world.cache.wait(patience()));
        world.cache.device().tree().evict(u32::MAX);
        rows
    });
    assert_eq!(tier.stats().record_count, Some(u64::from(PAGES) + 3));
    world.check_conserved();
    (tier, rows.to_vec())
}

fn block(k: u32) -> RecordId {
    let namespace = Namespace::new(&schema(), 256, b"").unwrap();
    let chain = KeyChain::of(&namespace, &tokens(1, PAGES * 256));
    RecordId {
        kind: RecordKind::Block,
        key: chain.keys()[k as usize],
    }
}

/// The last end that so many whole pages reach.
fn end_within(pages: u32) -> u32 {
    ENDS.into_iter()
        .filter(|end| *end <= pages)
        .max()
        .unwrap_or(0)
}

/// Fetches, and looks at what became of it: exactly so many pages, or at most so many.
fn check(world: World, fetch: &Fetch, pages: u32, is_exact: bool, rows: &[Vec<PageDigest>]) {
    let published = fetch.wait(patience()).expect("a fetch ends");
    let most = end_within(pages) * 256;
    assert!(
        published <= most,
        "{SYMPTOM}: {published} tokens, {most} are whole"
    );
    assert!(
        !is_exact || published == most,
        "{published} of {most} tokens"
    );
    assert!(world.cache.wait(patience()));
    let host = world.cache.host();
    assert_eq!(host.tree().probe(&tokens(1, 5_000)), (published, published));
    let free = host.pools().stats().pages.free;
    assert_eq!(
        free,
        SIZES.host.0 - published / 256,
        "pages behind the end are kept"
    );
    let found = world.cache.lookup(&tokens(1, 5_000));
    let hit_tokens = world.cache.storage_counts().unwrap().tiers[0].hit_tokens;
    assert_eq!(hit_tokens, u64::from(published), "a hole counts as a hit");
    world.run();
    match found {
        None => assert_eq!(published, 0),
        Some(found) => {
            assert_eq!((found.tokens, found.origin), (published, Origin::Storage));
            let (lease, restored) = world.resume(found, 1).unwrap();
            let at = ENDS.iter().position(|end| end * 256 == published).unwrap();
            let stale = restored.iter().zip(&rows[at]).find(|(a, b)| a != b);
            assert_eq!(stale, None, "{SYMPTOM}: a page that never came");
            drop(lease);
        }
    }
    world.check_conserved();
}

/// The record of any page is evicted between the look and the read, or its indexer keys are damaged.
#[test]
fn dev_11_a_hole_at_any_page_ends_the_prefix_before_it() {
    let (tier, rows) = stored();
    let shape = RecordShape::block(&schema(), 256).unwrap();
    let is_index = |part: &&kvgate_hicache::record::Part| part.component == Component::IndexK;
    let index = shape.parts().iter().find(is_index).unwrap();
    let at = 4_096 + index.offset_bytes as usize;
    for hole in 0..=PAGES {
        let gone = (hole < PAGES).then(|| block(hole));
        let evicted = Hooked::reads(tier.clone(), move |id, _| match gone == Some(*id) {
            true => Err(Miss::Absent),
            false => Ok(()),
        });
        let first = world(Arc::new(evicted), PrefetchPolicy::Wait);
        let fetch = first.cache.prefetch(&tokens(1, 5_000)).unwrap();
        check(first, &fetch, hole, true, &rows);

        let Some(gone) = gone else { continue };
        // What is damaged leaves the tier that finds it so.
        let (tier, _) = stored();
        assert!(tier.damage(&gone, |bytes| bytes[at] ^= 1));
        let second = world(tier, PrefetchPolicy::Wait);
        let fetch = second.cache.prefetch(&tokens(1, 5_000)).unwrap();
        fetch.wait(patience()).expect("a fetch ends");
        let misses = &second.cache.storage_counts().unwrap().tiers[0].misses;
        assert_eq!(misses.get("checksum"), Some(&1), "{misses:?}");
        check(second, &fetch, hole, true, &rows);
    }
}

/// A fetch that is told to stop at any page, and one whose time is over there.
#[test]
fn dev_11_a_fetch_that_stops_at_any_page_publishes_what_has_come() {
    let (tier, rows) = stored();
    for pages in 0..=PAGES {
        for is_late in [false, true] {
            let fetch: Arc<OnceLock<Arc<Fetch>>> = Arc::default();
            let (reads, order) = (AtomicUsize::new(0), Arc::new(Mutex::new(())));
            let stopper = {
                let (fetch, order) = (fetch.clone(), order.clone());
                Hooked::reads(tier.clone(), move |_, deadline| {
                    // The fetch is known by then.
                    drop(order.lock());
                    if reads.fetch_add(1, Relaxed) + 1 == pages as usize {
                        match is_late {
                            false => fetch.get().unwrap().stop(),
                            true => {
                                while !deadline.has_passed() {
                                    std::thread::yield_now();
                                }
                            }
                        }
                    }
                    Ok(())
                })
            };
            let policy = match is_late {
                false => PrefetchPolicy::BestEffort,
                true => PrefetchPolicy::Timeout {
                    base_ms: 40,
                    per_1024_tokens_ms: 0,
                },
            };
            if pages == 0 && !is_late {
                continue;
            }
            let world = world(Arc::new(stopper), policy);
            let held = order.lock().unwrap();
            let begun = world.cache.prefetch(&tokens(1, 5_000)).unwrap();
            fetch.set(begun.clone()).unwrap();
            drop(held);
            // On a busy machine less can come in time, never more.
            let most = if pages == 0 { PAGES } else { pages };
            check(world, &begun, most, !is_late, &rows);
        }
    }
}
