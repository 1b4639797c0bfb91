//! The figures of a cache as a scraper reads them.
#![cfg(all(feature = "metrics", not(kv_loom)))]
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;

use common::*;
use kvgate_hicache::cache::Origin;
use kvgate_hicache::identity::Namespace;
use kvgate_hicache::storage::{Place, PrefetchPolicy, StorageConfig, StorageTier};
use kvgate_hicache::tier::{MemoryTier, Tier};
use kvgate_transfer::sync::Arc;

/// Value by series, each of which stands once and under a type.
fn scrape(text: &str) -> BTreeMap<String, f64> {
    let mut found = BTreeMap::new();
    let mut types = Vec::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            types.push(rest.split(' ').next().unwrap().to_owned());
        } else if !line.starts_with('#') {
            let (series, value) = line.rsplit_once(' ').unwrap();
            let name = series.split('{').next().unwrap();
            assert!(types.iter().any(|known| name == known), "{series}");
            let before = found.insert(series.to_owned(), value.parse().unwrap());
            assert_eq!(before, None, "{series}");
        }
    }
    found
}

#[test]
fn every_move_of_a_prefix_is_counted_where_it_happened() {
    let tier = Arc::new(MemoryTier::new(64 << 20));
    let place = StorageTier {
        tier: tier.clone(),
        place: Place::Remote,
    };
    let config = StorageConfig {
        prefetch: PrefetchPolicy::Wait,
        ..StorageConfig::new(vec![place])
    };
    let world = World::local(&ROOMY);
    let namespace = Namespace::new(&schema(), 256, b"").unwrap();
    let world = World {
        cache: world.cache.with_storage(namespace, config).unwrap(),
        net: None,
    };
    assert!(world.cache.lookup(&tokens(1, 600)).is_none());
    world.compute(1, 512);
    world.cache.backup(&tokens(1, 512)).unwrap();
    assert!(world.cache.wait(patience()));
    world.evict_device();
    world.cache.host().tree().evict(u32::MAX);
    let found = world
        .cache
        .lookup_within(&tokens(1, 600), patience())
        .unwrap();
    assert_eq!(found.origin, Origin::Remote);
    assert!(world.cache.wait(patience()));
    drop(found);

    let found = scrape(&world.cache.metrics_text());
    let value = |series: &str| found[&format!("kvgate_{series}")];
    assert_eq!(value("prefix_hits_total{tier=\"remote\"}"), 1.0);
    assert_eq!(value("prefix_hits_total{tier=\"device\"}"), 0.0);
    assert!(value("prefix_misses_total") >= 1.0);
    assert_eq!(value("prefix_hit_tokens_total"), 512.0);
    assert_eq!(value("tier_hit_tokens_total{tier=\"memory\"}"), 512.0);
    for (direction, landed) in [("backup", 1.0), ("load", 1.0)] {
        let of = |outcome: &str| {
            value(&format!(
                "tier_moves_total{{direction=\"{direction}\",outcome=\"{outcome}\"}}"
            ))
        };
        assert_eq!((of("landed"), of("failed")), (landed, 0.0), "{direction}");
    }
    for direction in ["backup", "load", "store", "fetch"] {
        let open = value(&format!("tier_open_moves{{direction=\"{direction}\"}}"));
        assert_eq!(open, 0.0, "{direction}");
    }
    let slots = |state: &str| {
        value(&format!(
            "tier_slots{{tier=\"device\",space=\"page\",state=\"{state}\"}}"
        ))
    };
    assert_eq!(slots("owned"), 2.0);
    assert_eq!(
        slots("free") + slots("owned") + slots("draining"),
        f64::from(ROOMY.device.0)
    );
    let quarantined = value("tier_quarantined_slots{tier=\"host\",space=\"page\"}");
    assert_eq!(quarantined, 0.0);
    let stats = tier.stats();
    let written = value("tier_bytes_total{tier=\"memory\",direction=\"write\"}");
    assert_eq!(written, stats.written_bytes as f64);
    assert!(written > 0.0);
    assert_eq!(
        value("tier_records_total{tier=\"memory\",outcome=\"hit\"}"),
        3.0
    );
    assert_eq!(
        value("tier_used_bytes{tier=\"memory\"}"),
        stats.used_bytes.unwrap() as f64
    );
    assert_eq!(value("stores_total{outcome=\"complete\"}"), 1.0);
    assert_eq!(value("fetches_total{outcome=\"published\"}"), 1.0);
}
