//! DEV-01: index_k forgotten by the host tier.
//!
//! **Given** a prefix that was backed up and evicted from the device, whose slots others have used since.
//! **When** it is asked for again and loaded back. **Expected** every component of every page is as it was;
//! a tier that lacks a component is refused when it is attached, and the component is named. **In the field** latents and
//! states came back, indexer keys did not, and the top-k chose wrong tokens.
//!
//! Guard: I-4, I-15. What moves is the schema's list of components (`kvcache/src/plan.rs`), and two sides with
//! different schemas are not connected (`hicache/src/cache.rs`).

use kvgate_hicache::{Hicache, Side};
use kvgate_kvcache::*;
use kvgate_transfer::sync::Arc;
use kvgate_transfer::{Agent, PeerId};

use crate::common::*;

#[test]
fn dev_01_every_component_comes_back() {
    let world = World::local(&ROOMY);
    let digests = world.compute(1, 512);
    let components: std::collections::BTreeSet<_> = digests.iter().map(|d| d.component).collect();
    // c128_state is empty at a boundary, and nothing is drafted here.
    assert_eq!(components.len(), Component::COUNT - 2);
    world.cache.backup(&tokens(1, 512)).unwrap();
    world.run();
    world.evict_device();
    let found = world.cache.lookup(&tokens(1, 513)).unwrap();
    world.run();
    let (lease, restored) = world.resume(found, 1).unwrap();
    let differs = restored.iter().zip(&digests).find(|(a, b)| a != b);
    assert_eq!(differs, None, "a component that the tier forgot");
    assert_eq!(restored.len(), digests.len());
    drop(lease);
    world.check_conserved();
}

#[test]
fn dev_01_a_tier_without_a_component_is_refused() {
    let side = |name: &str, ratios: Vec<u32>, index_k: IndexKFormat| {
        let geometry = V4Geometry {
            layer_ratios: ratios,
            ..V4Geometry::flash()
        };
        let formats = Formats {
            index_k,
            ..Formats::default()
        };
        let schema = Arc::new(CacheSchema::deepseek_v4(&geometry, &formats).unwrap());
        let config = PoolConfig {
            pages: 1,
            windows: 1,
            requests: 1,
            memory: MemoryKind::Host,
        };
        let pools = PoolSet::new(schema, config).unwrap();
        let agent = Agent::builder(name).build().unwrap();
        pools.register(&agent).unwrap();
        Side::new(&agent, &pools, PrefixTree::new(&pools)).unwrap()
    };
    let over = |ratios: Vec<u32>, index_k| {
        let device = side("device", vec![0, 4], IndexKFormat::Bf16);
        let host = side("host", ratios, index_k);
        Hicache::over(device, host, PeerId(0), PeerId(0))
            .unwrap_err()
            .to_string()
    };
    for (ratios, index_k) in [
        (vec![0, 0], IndexKFormat::Bf16),
        (vec![0, 4], IndexKFormat::Fp8),
    ] {
        let said = over(ratios, index_k);
        assert!(said.contains("index_k"), "{said}");
    }
}
