//! Series that are not one number of the counts: lengths, ages, components, rates and limits.

use std::fmt;
use std::time::Duration;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use kvgate_transfer::sync::AtomicU64;

use super::{OfBytes, OfDirection, OfTier};
use crate::Hicache;
use crate::cache::Origin;
use crate::figures::{LENGTH_BUCKETS, Lengths};
use crate::storage::StorageTierCounts;

type Seconds = Counter<f64, AtomicU64>;
type Rate = Gauge<f64, AtomicU64>;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfComponent {
    tier: String,
    component: &'static str,
    direction: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfDamage {
    tier: String,
    component: &'static str,
}

pub(super) fn register(registry: &mut Registry, cache: &Hicache) {
    registry.register_collector(Box::new(HitLengths::of(cache)));
    register_ages(registry, cache);
    let Some(counts) = cache.storage_counts() else {
        return;
    };
    register_times(registry, &counts.tiers);
    register_components(registry, &counts.tiers);
    register_limits(registry, &counts.tiers);
    register_rates(registry, cache, &counts.tiers);
}

/// The lengths of what was found, as a histogram for each tier.
#[derive(Debug)]
struct HitLengths {
    of: [(&'static str, Lengths); 4],
}

impl HitLengths {
    fn of(cache: &Hicache) -> HitLengths {
        let of = [
            ("device", Origin::Device),
            ("host", Origin::Host),
            ("storage", Origin::Storage),
            ("remote", Origin::Remote),
        ];
        HitLengths {
            of: of.map(|(tier, origin)| (tier, cache.hit_lengths(origin))),
        }
    }
}

impl Collector for HitLengths {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let help = "Tokens of the prefixes that lookups found, by where";
        let mut family = encoder.encode_descriptor(
            "prefix_hit_length_tokens",
            help,
            None,
            MetricType::Histogram,
        )?;
        for (tier, lengths) in &self.of {
            let buckets: Vec<(f64, u64)> = (0..LENGTH_BUCKETS)
                .map(|at| {
                    let limit = Lengths::limit_tokens(at).map_or(f64::INFINITY, f64::from);
                    (limit, lengths.buckets[at])
                })
                .collect();
            let (sum, count) = (lengths.tokens as f64, lengths.count());
            family
                .encode_family(&[("tier", *tier)])?
                .encode_histogram::<NoLabelSet>(sum, count, &buckets, None)?;
        }
        Ok(())
    }
}

fn register_ages(registry: &mut Registry, cache: &Hicache) {
    let ages = Family::<OfDirection, Rate>::default();
    let (backup, load) = cache.oldest_moves();
    let (store, fetch) = cache.oldest_storage();
    for (direction, age) in [
        ("backup", backup),
        ("load", load),
        ("store", store),
        ("fetch", fetch),
    ] {
        let seconds = age.as_ref().map_or(0.0, Duration::as_secs_f64);
        ages.get_or_create(&OfDirection { direction }).set(seconds);
    }
    let help = "Age of the oldest move that waits or is under way; 0 without one";
    registry.register("tier_oldest_move_seconds", help, ages);
}

fn register_times(registry: &mut Registry, tiers: &[StorageTierCounts]) {
    let times = Family::<OfBytes, Seconds>::default();
    for tier in tiers {
        for (direction, us) in [("read", tier.read_us), ("write", tier.stored_us)] {
            let tier = tier.name.clone();
            let labels = OfBytes { tier, direction };
            times.get_or_create(&labels).inc_by(us as f64 / 1e6);
        }
    }
    let help = "Time in reads that gave a record, and in writes that stored one";
    registry.register("tier_seconds", help, times);
}

fn register_components(registry: &mut Registry, tiers: &[StorageTierCounts]) {
    let bytes = Family::<OfComponent, Counter>::default();
    let damaged = Family::<OfDamage, Counter>::default();
    for tier in tiers {
        for (component, counts) in &tier.components {
            let tier = tier.name.clone();
            for (direction, count) in [("read", counts.read_bytes), ("write", counts.stored_bytes)]
            {
                let labels = OfComponent {
                    tier: tier.clone(),
                    component,
                    direction,
                };
                bytes.get_or_create(&labels).inc_by(count);
            }
            let labels = OfDamage { tier, component };
            damaged.get_or_create(&labels).inc_by(counts.damaged);
        }
    }
    let help = "Payload of a component that came out of a tier and went into it";
    registry.register("tier_component_bytes", help, bytes);
    let help = "Reads that the checksum of a component turned into a miss";
    registry.register("tier_damaged_components", help, damaged);
}

fn register_limits(registry: &mut Registry, tiers: &[StorageTierCounts]) {
    let limited = Family::<OfTier, Counter>::default();
    let today = Family::<OfTier, Gauge>::default();
    let per_day = Family::<OfTier, Gauge>::default();
    for counts in tiers {
        let tier = counts.name.clone();
        let labels = OfTier { tier };
        limited.get_or_create(&labels).inc_by(counts.limited);
        today.get_or_create(&labels).set(counts.today_bytes as i64);
        let bytes = counts.bytes_per_day.unwrap_or(0);
        per_day.get_or_create(&labels).set(bytes as i64);
    }
    let help = "Records that a limit of bandwidth or of wear kept out of a tier";
    registry.register("tier_limited_writes", help, limited);
    let help = "Bytes stored by this process in its present day of 24 hours";
    registry.register("tier_wear_today_bytes", help, today);
    let help = "Bytes stored in a full day, on average; 0 in the first one";
    registry.register("tier_wear_day_bytes", help, per_day);
}

fn register_rates(registry: &mut Registry, cache: &Hicache, tiers: &[StorageTierCounts]) {
    let Some(rates) = cache.cost_rates() else {
        return;
    };
    let reads = Family::<OfTier, Rate>::default();
    for (counts, rate) in tiers.iter().zip(rates.read_bytes_per_s) {
        let tier = counts.name.clone();
        reads
            .get_or_create(&OfTier { tier })
            .set(rate.unwrap_or(0.0));
    }
    let help = "Measured bytes per second out of a tier; 0 while it is not known";
    registry.register("tier_read_rate", help, reads);
    let prefill = Rate::default();
    prefill.set(rates.prefill_tokens_per_s.unwrap_or(0.0));
    let help = "Measured tokens per second that are computed; 0 while it is not known";
    registry.register("prefill_rate", help, prefill);
}
