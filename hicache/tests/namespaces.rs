//! Tiers of two tenants are not joined.
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used)]

use kvgate_transfer::sync::Arc;

use kvgate_hicache::{Hicache, Side};
use kvgate_kvcache::identity::Namespace;
use kvgate_kvcache::prefix::Lru;
use kvgate_kvcache::{CacheSchema, ErrorKind, PoolConfig, PoolSet, PrefixTree};
use kvgate_transfer::{Agent, MemoryKind};

mod common;

fn side(schema: &Arc<CacheSchema>, salt: &[u8]) -> Side {
    let agent = Agent::builder("side").build().unwrap();
    let config = PoolConfig {
        pages: 2,
        windows: 2,
        requests: 1,
        memory: MemoryKind::Host,
    };
    let pools = PoolSet::new(schema.clone(), config).unwrap();
    pools.register(&agent).unwrap();
    let namespace = Namespace::new(schema, 256, salt).unwrap();
    let tree = PrefixTree::in_namespace(&pools, namespace, Box::<Lru>::default()).unwrap();
    Side::new(&agent, &pools, tree).unwrap()
}

#[test]
fn a_host_tier_of_another_tenant_is_refused() {
    let schema = common::schema();
    for (salt, is_joined) in [(b"one", true), (b"two", false)] {
        let (device, host) = (side(&schema, b"one"), side(&schema, salt));
        let (to_host, to_device) = Agent::connect_local(device.agent(), host.agent()).unwrap();
        match Hicache::over(device, host, to_host, to_device) {
            Ok(_) => assert!(is_joined),
            Err(error) => {
                assert!(!is_joined);
                assert!(
                    matches!(error.kind(), ErrorKind::InvalidRequest { .. }),
                    "{error}"
                );
            }
        }
    }
}

/// Page numbers of one set of pools are other bytes in another one.
#[test]
fn a_tree_over_other_pools_is_refused() {
    let schema = common::schema();
    let (one, two) = (side(&schema, b""), side(&schema, b""));
    let refused = Side::new(one.agent(), one.pools(), PrefixTree::new(two.pools()));
    let error = refused.unwrap_err();
    assert!(
        matches!(
            error.kind(),
            ErrorKind::InvalidRequest { field: "tree", .. }
        ),
        "{error}"
    );
    assert!(Side::new(one.agent(), one.pools(), PrefixTree::new(one.pools())).is_ok());
}
