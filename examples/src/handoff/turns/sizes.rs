//! How large the tiers of a run of conversations are.

use kvgate_hicache::cache::Origin;
use kvgate_hicache::host::{HostConfig, host_side};
use kvgate_hicache::policy::S3Fifo;
use kvgate_hicache::{Hicache, Side};
use kvgate_kvcache::identity::Namespace;
use kvgate_kvcache::schema::PAGE_TOKENS;
use kvgate_kvcache::{self as kvcache, CacheSchema, PoolSet, PrefixTree, Space};
use kvgate_transfer::{Agent, MemoryKind};

use super::schedule::Plan;
use super::{TierPages, TurnOptions};
use crate::handoff::sizing::PoolSize;

/// Pages that a small tier holds beyond one request.
const SPARE_PAGES: u32 = 2;

/// Usable slots of the tiers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TierSizes {
    /// The device pool.
    pub(crate) device: PoolSize,
    /// Logical pages of the host tier.
    pub(crate) host_pages: u32,
    /// Ends of prefixes that the host tier keeps.
    pub(crate) host_ends: u32,
}

impl TierSizes {
    /// Of a run with `in_flight` turns at one time.
    pub(crate) fn of(
        schema: &CacheSchema,
        plan: &Plan,
        turns: &TurnOptions,
        in_flight: u32,
    ) -> TierSizes {
        let request = schema.slots_for(plan.longest_tokens());
        let (stored_pages, ends) = plan.stored();
        let least = request.of(Space::Page) + SPARE_PAGES;
        let pages = |asked: TierPages, share: u32| match asked {
            // Each turn in flight has pages of its own.
            TierPages::Everything => stored_pages + least * in_flight,
            TierPages::Small => (stored_pages / share).max(least),
            TierPages::Pages(pages) => pages,
        };
        let (device_pages, host_pages) = (pages(turns.device_pages, 8), pages(turns.host_pages, 2));
        // Ends take window slots in the measure in which pages are there for them.
        let share = |pages: u32| {
            let ends = u64::from(ends) * u64::from(pages) / u64::from(stored_pages.max(1));
            (ends as u32).clamp(2, ends.max(2) as u32)
        };
        let device = PoolSize {
            pages: device_pages,
            windows: request.of(Space::Window) * in_flight + share(device_pages),
            requests: in_flight,
        };
        TierSizes {
            device,
            host_pages,
            host_ends: share(host_pages),
        }
    }
}

/// The name of a tier in every output.
pub(crate) fn name_of(origin: Origin) -> &'static str {
    match origin {
        Origin::Device => "device",
        Origin::Host => "host",
        Origin::Storage => "storage",
        Origin::Remote => "remote",
    }
}

/// The cache over the device pools, which are registered with `agent`, and a host tier in this process, and the
/// namespace of both.
pub(crate) fn connect(
    agent: &Agent,
    pools: &PoolSet,
    sizes: &TierSizes,
    salt: &str,
) -> Result<(Hicache, Namespace), kvcache::Error> {
    let schema = pools.schema();
    let namespace = Namespace::new(schema, PAGE_TOKENS, salt.as_bytes())?;
    let tree = PrefixTree::in_namespace(pools, namespace.clone(), Box::<S3Fifo>::default())?;
    let device = Side::new(agent, pools, tree)?;
    let host = host_side(
        schema,
        namespace.clone(),
        HostConfig {
            pages: sizes.host_pages,
            checkpoints: sizes.host_ends,
            memory: MemoryKind::Host,
            policy: None,
        },
    )?;
    let (to_host, to_device) = Agent::connect_local(device.agent(), host.agent())?;
    let cache = Hicache::over(device, host, to_host, to_device)?;
    Ok((cache, namespace))
}
