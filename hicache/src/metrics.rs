//! What a cache has counted, as Prometheus text. Everything is read from the counts when the text is made, so nothing
//! is counted twice.

mod detail;

use prometheus_client::encoding::{EncodeLabelSet, prometheus_text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::Hicache;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfTier {
    tier: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfSlots {
    tier: &'static str,
    space: &'static str,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfSpace {
    tier: &'static str,
    space: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfMove {
    direction: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfOutcome {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfDirection {
    direction: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfBytes {
    tier: String,
    direction: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfRecords {
    tier: String,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfCause {
    tier: String,
    cause: &'static str,
}

impl Hicache {
    /// What happened since the start and what is there now, as Prometheus text (format 0.0.4): hits by tier, slots by
    /// state, quarantined ones, moves between the tiers of memory, stores and fetches of the storage tiers, and for each of
    /// these its bytes, records, misses by cause and use, what each component came to, limits, rates and ages. docs/metrics.md
    /// has every series.
    pub fn metrics_text(&self) -> String {
        let mut registry = Registry::with_prefix("kvgate");
        register_lookups(&mut registry, self);
        register_slots(&mut registry, self);
        register_moves(&mut registry, self);
        register_storage(&mut registry, self);
        register_tiers(&mut registry, self);
        detail::register(&mut registry, self);
        let mut text = String::new();
        prometheus_text::encode(&mut text, &registry)
            .expect("a string takes everything that is written to it");
        text
    }
}

fn register_lookups(registry: &mut Registry, cache: &Hicache) {
    let counts = cache.counts();
    let hits = Family::<OfTier, Counter>::default();
    for (tier, count) in [
        ("device", counts.device_hits),
        ("host", counts.host_hits),
        ("storage", counts.storage_hits),
        ("remote", counts.remote_hits),
    ] {
        let tier = tier.to_owned();
        hits.get_or_create(&OfTier { tier }).inc_by(count);
    }
    registry.register("prefix_hits", "Lookups that found a prefix, by where", hits);
    for (name, help, count) in [
        ("prefix_misses", "Lookups that found nothing", counts.misses),
        ("prefix_hit_tokens", "Tokens of all hits", counts.hit_tokens),
        (
            "wasted_loads",
            "Loads dropped because another one brought the same",
            counts.duplicate_loads,
        ),
    ] {
        let counter = Counter::<u64>::default();
        counter.inc_by(count);
        registry.register(name, help, counter);
    }
}

fn register_slots(registry: &mut Registry, cache: &Hicache) {
    let slots = Family::<OfSlots, Gauge>::default();
    let quarantined = Family::<OfSpace, Gauge>::default();
    for (tier, side) in [("device", cache.device()), ("host", cache.host())] {
        let stats = side.pools().stats();
        for (space, stats) in [
            ("page", stats.pages),
            ("window", stats.windows),
            ("request", stats.requests),
        ] {
            for (state, count) in [
                ("free", stats.free),
                ("owned", stats.owned),
                ("draining", stats.draining),
                ("retired", stats.retired),
            ] {
                let labels = OfSlots { tier, space, state };
                slots.get_or_create(&labels).set(count.into());
            }
            let labels = OfSpace { tier, space };
            let gauge = quarantined.get_or_create(&labels);
            gauge.set(stats.quarantined.into());
        }
    }
    registry.register("tier_slots", "Slots of a tier of memory", slots);
    let help = "Of the draining slots, those whose proof may never come";
    registry.register("tier_quarantined_slots", help, quarantined);
}

fn register_moves(registry: &mut Registry, cache: &Hicache) {
    let counts = cache.counts();
    let moves = Family::<OfMove, Counter>::default();
    for (direction, counts) in [("backup", counts.backups), ("load", counts.loads)] {
        for (outcome, count) in [
            ("started", counts.started),
            ("landed", counts.landed),
            ("failed", counts.failed),
            ("no_room", counts.no_room),
        ] {
            let labels = OfMove { direction, outcome };
            moves.get_or_create(&labels).inc_by(count);
        }
    }
    registry.register("tier_moves", "Moves between device and host", moves);
    let open = Family::<OfDirection, Gauge>::default();
    let (backups, loads) = cache.open_moves();
    let (stores, fetches) = cache.open_storage();
    for (direction, count) in [
        ("backup", backups),
        ("load", loads),
        ("store", stores),
        ("fetch", fetches),
    ] {
        let gauge = open.get_or_create(&OfDirection { direction });
        gauge.set(count as i64);
    }
    registry.register("tier_open_moves", "Moves that are under way", open);
}

fn register_storage(registry: &mut Registry, cache: &Hicache) {
    let Some(counts) = cache.storage_counts() else {
        return;
    };
    let (stores, fetches) = (counts.stores, counts.fetches);
    let stored = Family::<OfOutcome, Counter>::default();
    for (outcome, count) in [
        ("queued", stores.queued),
        ("dropped", stores.dropped),
        ("complete", stores.complete),
        ("failed", stores.failed),
    ] {
        let counter = stored.get_or_create(&OfOutcome { outcome });
        counter.inc_by(count);
    }
    registry.register("stores", "Prefixes for the storage tiers", stored);
    let fetched = Family::<OfOutcome, Counter>::default();
    for (outcome, count) in [
        ("started", fetches.started),
        ("dropped", fetches.dropped),
        ("joined", fetches.joined),
        ("published", fetches.published),
        ("shortened", fetches.shortened),
        ("empty", fetches.empty),
        ("no_room", fetches.no_room),
        ("shared", fetches.shared),
        ("computed", fetches.computed),
        ("trimmed", fetches.trimmed),
        ("unweighed", fetches.unweighed),
        ("retried", fetches.retried),
        ("failed", fetches.failed),
        ("late", fetches.late),
    ] {
        let counter = fetched.get_or_create(&OfOutcome { outcome });
        counter.inc_by(count);
    }
    registry.register("fetches", "Prefixes from the storage tiers", fetched);
    let tokens = Family::<OfTier, Counter>::default();
    for tier in counts.tiers {
        let labels = OfTier { tier: tier.name };
        tokens.get_or_create(&labels).inc_by(tier.hit_tokens);
    }
    let help = "Tokens of prefixes that came from a storage tier";
    registry.register("tier_hit_tokens", help, tokens);
}

fn register_tiers(registry: &mut Registry, cache: &Hicache) {
    let bytes = Family::<OfBytes, Counter>::default();
    let records = Family::<OfRecords, Counter>::default();
    let causes = Family::<OfCause, Counter>::default();
    let used = Family::<OfTier, Gauge>::default();
    let capacity = Family::<OfTier, Gauge>::default();
    for place in cache.storage_tiers() {
        let (stats, tier) = (place.tier.stats(), place.tier.name().to_owned());
        for (direction, count) in [("read", stats.read_bytes), ("write", stats.written_bytes)] {
            let tier = tier.clone();
            bytes
                .get_or_create(&OfBytes { tier, direction })
                .inc_by(count);
        }
        for (outcome, count) in [
            ("hit", stats.hit_count),
            ("stored", stats.stored_count),
            ("present", stats.duplicate_count),
            ("failed", stats.failed_count),
            ("evicted", stats.evicted_count),
            ("removed", stats.removed_count),
        ] {
            let tier = tier.clone();
            records
                .get_or_create(&OfRecords { tier, outcome })
                .inc_by(count);
        }
        for (cause, count) in stats.misses {
            let tier = tier.clone();
            causes.get_or_create(&OfCause { tier, cause }).inc_by(count);
        }
        let labels = OfTier { tier };
        for (family, bytes) in [(&used, stats.used_bytes), (&capacity, stats.capacity_bytes)] {
            if let Some(bytes) = bytes {
                family.get_or_create(&labels).set(bytes as i64);
            }
        }
    }
    let help = "Payload read from a storage tier, bytes written to it: its wear";
    registry.register("tier_bytes", help, bytes);
    registry.register("tier_records", "Records of a storage tier", records);
    registry.register("tier_errors", "Reads that gave no record", causes);
    registry.register("tier_used_bytes", "Bytes that a tier takes", used);
    registry.register("tier_capacity_bytes", "Bytes that it may take", capacity);
}
