//! The figures of a cache as a scraper reads them.
#![cfg(all(feature = "metrics", not(kv_loom)))]
#![allow(clippy::unwrap_used)]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use common::*;
use kvgate_hicache::cache::Origin;
use kvgate_hicache::identity::{KeyChain, Namespace};
use kvgate_hicache::record::{RecordId, RecordKind};
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
            let of_histogram = ["_bucket", "_sum", "_count"];
            let of_histogram = of_histogram.map(|end| name.strip_suffix(end));
            let is_known = |known: &String| name == known || of_histogram.contains(&Some(known));
            assert!(types.iter().any(is_known), "{series}");
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
    world.cache.note_prefill(512, Duration::from_millis(100));
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
    // Up to each limit: 256, 512 and so on, and any length.
    let buckets = found.iter().filter(|(series, _)| {
        series.starts_with("kvgate_prefix_hit_length_tokens_bucket{")
            && series.contains("tier=\"remote\"")
    });
    let buckets: BTreeMap<&str, f64> = buckets
        .map(|(series, count)| (series.split("le=\"").nth(1).unwrap(), *count))
        .map(|(end, count)| (end.split('"').next().unwrap(), count))
        .collect();
    assert_eq!(buckets.len(), 14, "{buckets:?}");
    for (limit, hits) in [("256", 0.0), ("512", 1.0), ("+Inf", 1.0)] {
        let of = buckets
            .iter()
            .find(|(le, _)| le.trim_end_matches(".0") == limit);
        assert_eq!(of.unwrap().1, &hits, "{limit}: {buckets:?}");
    }
    let lengths = |what: &str| {
        value(&format!(
            "prefix_hit_length_tokens_{what}{{tier=\"remote\"}}"
        ))
    };
    assert_eq!((lengths("sum"), lengths("count")), (512.0, 1.0));
    for direction in ["backup", "load", "store", "fetch"] {
        let age = format!("tier_oldest_move_seconds{{direction=\"{direction}\"}}");
        assert_eq!(value(&age), 0.0, "{direction}");
    }
    // What the components have is what the records have.
    let of_components = |direction: &str| -> f64 {
        let end = format!("direction=\"{direction}\"}}");
        let series = found.iter().filter(|(series, _)| {
            series.starts_with("kvgate_tier_component_bytes_total{") && series.ends_with(&end)
        });
        series.map(|(_, bytes)| bytes).sum()
    };
    let counts = &world.cache.storage_counts().unwrap().tiers[0];
    assert_eq!(of_components("read"), counts.read_bytes as f64);
    assert_eq!(of_components("write"), of_components("read"));
    assert!(value("tier_seconds_total{tier=\"memory\",direction=\"read\"}") > 0.0);
    let today = value("tier_wear_today_bytes{tier=\"memory\"}");
    assert_eq!(today, counts.stored_bytes as f64);
}

/// Type and labels by series.
type Table = BTreeMap<String, (String, BTreeSet<String>)>;

/// The table under a heading of docs/metrics.md.
fn documented(heading: &str) -> Table {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/metrics.md");
    let text = std::fs::read_to_string(path).unwrap();
    let part = text.split("\n## ").find(|part| part.starts_with(heading));
    let rows = part.unwrap().lines().filter(|line| line.starts_with("| `"));
    let row = |line: &str| {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let [_, name, kind, labels, what, _] = cells.as_slice() else {
            panic!("{line}")
        };
        assert!(!what.is_empty(), "{line}");
        let labels = labels.split(", ").filter(|label| !label.is_empty());
        let labels = labels.map(str::to_owned).collect();
        (
            name.trim_matches('`').to_owned(),
            ((*kind).to_owned(), labels),
        )
    };
    rows.map(row).collect()
}

/// What a text has: every type, and the labels of series that have a value.
fn emitted(text: &str) -> Table {
    let mut table = Table::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            table.insert(name.to_owned(), (kind.to_owned(), BTreeSet::new()));
        }
    }
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let Some((name, labels)) = line.rsplit_once(' ').unwrap().0.split_once('{') else {
            continue;
        };
        let ends = ["", "_bucket", "_sum", "_count"];
        let name = ends.iter().find_map(|end| {
            let name = name.strip_suffix(end)?;
            table.contains_key(name).then(|| name.to_owned())
        });
        let found = &mut table.get_mut(&name.unwrap()).unwrap().1;
        let labels = labels.trim_end_matches('}').split(',');
        let labels = labels.map(|label| label.split('=').next().unwrap().to_owned());
        found.extend(labels.filter(|label| label != "le"));
    }
    table
}

/// What is emitted is in the table, with its type and its labels. Answers the rows that were not emitted.
fn compare(heading: &str, text: &str) -> Vec<String> {
    let (mut documented, emitted) = (documented(heading), emitted(text));
    assert!(!emitted.is_empty());
    for (name, (kind, with)) in emitted {
        let row = documented.remove(&name);
        let (of_row, labels) = row.unwrap_or_else(|| panic!("{name} is in no table"));
        assert_eq!(of_row, kind, "{name}");
        assert_eq!(labels, with, "{name}");
    }
    documented.into_keys().collect()
}

#[test]
fn every_series_is_in_the_table_and_every_row_is_emitted() {
    let tier = Arc::new(MemoryTier::new(64 << 20));
    let place = StorageTier {
        tier: tier.clone(),
        place: Place::Local,
    };
    let namespace = Namespace::new(&schema(), 256, b"").unwrap();
    let world = World::local(&ROOMY);
    let config = StorageConfig {
        prefetch: PrefetchPolicy::Wait,
        ..StorageConfig::new(vec![place])
    };
    let cache = world.cache.with_storage(namespace.clone(), config).unwrap();
    let world = World { cache, net: None };
    world.compute(1, 512);
    world.cache.backup(&tokens(1, 512)).unwrap();
    assert!(world.cache.wait(patience()));
    world.evict_device();
    world.cache.host().tree().evict(u32::MAX);
    // A bit of the payload: a component is damaged.
    let chain = KeyChain::of(&namespace, &tokens(1, 512));
    let first = RecordId {
        kind: RecordKind::Block,
        key: chain.keys()[0],
    };
    assert!(tier.damage(&first, |bytes| bytes[5_000] ^= 4));
    assert!(
        world
            .cache
            .lookup_within(&tokens(1, 600), patience())
            .is_none()
    );
    let of_cache = world.cache.metrics_text();
    let of_agent = world.cache.device().agent().metrics_text();
    let damaged = scrape(&of_cache);
    let damaged = damaged.iter().filter(|(series, count)| {
        series.starts_with("kvgate_tier_damaged_components_total{") && **count == 1.0
    });
    assert_eq!(damaged.count(), 1, "{of_cache}");
    assert_eq!(compare("kvgate-hicache", &of_cache), [""; 0]);
    // What did not happen to this agent is named where its series are made.
    let families = include_str!("../../transfer/src/obs/metrics/families.rs");
    for name in compare("kvgate-transfer", &of_agent) {
        let name = name
            .trim_start_matches("kvgate_")
            .trim_end_matches("_total");
        assert!(families.contains(&format!("\"{name}\"")), "{name}");
    }
    let (cache, agent) = (emitted(&of_cache), emitted(&of_agent));
    let shared: Vec<_> = cache
        .keys()
        .filter(|name| agent.contains_key(*name))
        .collect();
    assert!(shared.is_empty(), "one series in two texts: {shared:?}");
}
