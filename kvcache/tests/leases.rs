//! Leases over real pools: reservation, rows through views, the end of a lease.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::small_schema;
use kvgate_kvcache::{Component, ErrorKind, LayerId, PoolConfig, PoolSet, Room};
use kvgate_transfer::{Deadline, MemoryKind};

fn pools(pages: u32, windows: u32, requests: u32) -> PoolSet {
    let config = PoolConfig {
        pages,
        windows,
        requests,
        memory: MemoryKind::Host,
    };
    PoolSet::new(small_schema(), config).unwrap()
}

#[test]
fn rows_come_back_as_written_in_every_component() {
    let pools = pools(8, 4, 2);
    let mut lease = pools.reserve(700, Room(1)).unwrap();
    let schema = pools.schema().clone();
    for row in schema.rows() {
        let layer = lease.layer_mut(row.layer).unwrap();
        let mut view = layer.component(row.component).unwrap();
        assert!(
            view.table()
                .iter()
                .all(|&page| page != 0 && page < view.slot_count())
        );
        let entries = row.live_entries(700, 128);
        let image = |entry: u32| -> Vec<u8> {
            let entry = if row.rows_per_page == 1 { 0 } else { entry };
            let seed = row.pool.0.wrapping_mul(31).wrapping_add(entry);
            (0..view.row_image_bytes())
                .map(|byte| (seed as usize + byte) as u8)
                .collect()
        };
        let images: Vec<_> = entries.clone().map(image).collect();
        for (entry, image) in entries.clone().zip(&images) {
            view.write_row(entry, image).unwrap();
        }
        let mut read = vec![0; view.row_image_bytes()];
        for (entry, image) in entries.zip(&images) {
            view.read_row(entry, &mut read);
            assert_eq!(&read, image, "{} entry {entry}", row.component);
        }
    }
}

#[test]
fn components_that_a_layer_lacks_have_no_view() {
    let pools = pools(2, 2, 1);
    let mut lease = pools.reserve(10, Room(1)).unwrap();
    {
        let layer = lease.layer_mut(LayerId(0)).unwrap();
        assert!(layer.component(Component::SwaLatent).is_some());
        assert!(layer.component(Component::IndexK).is_none());
    }
    let error = lease.layer_mut(LayerId(3)).unwrap_err();
    let expected = ErrorKind::UnknownLayer {
        layer: LayerId(3),
        layer_count: 3,
    };
    assert_eq!(*error.kind(), expected);
}

#[test]
fn a_reservation_takes_everything_or_nothing() {
    let pools = pools(8, 2, 4);
    let first = pools.reserve(300, Room(1)).unwrap();
    // Pages and requests are left, windows are not.
    let error = pools.reserve(10, Room(2)).unwrap_err();
    assert!(error.is_retryable(), "{error}");
    let stats = pools.stats();
    assert!(stats.is_conserved(), "{stats:?}");
    assert_eq!(
        (stats.pages.free, stats.windows.free, stats.requests.free),
        (6, 0, 3)
    );
    let error = pools.reserve(256 * 9, Room(2)).unwrap_err();
    assert!(!error.is_retryable(), "{error}");
    drop(first);
    let stats = pools.stats();
    assert_eq!(
        (stats.pages.free, stats.windows.free, stats.requests.free),
        (8, 2, 4)
    );
    let again = pools.reserve(10, Room(3)).unwrap();
    assert_eq!(again.block_table().pages()[0].generation, 1);
    assert_eq!(pools.stats().pages.reuses, 1);
}

#[test]
fn slots_stay_while_a_posted_operation_reads_them() {
    let pools = pools(2, 2, 1);
    let mut lease = pools.reserve(300, Room(1)).unwrap();
    let source = lease.source_lease().unwrap();
    let mut draining = lease.close();
    assert!(!draining.poll());
    let draining = draining.wait(Deadline::after_ms(1)).unwrap_err();
    drop(draining);
    let stats = pools.stats();
    assert_eq!((stats.pages.free, stats.pages.draining), (0, 2));
    assert!(stats.is_conserved());
    drop(source);
    assert_eq!(pools.stats().pages.free, 2);
}

#[test]
fn commits_leave_no_gap() {
    let pools = pools(2, 2, 1);
    let mut lease = pools.reserve(300, Room(1)).unwrap();
    let layer = LayerId(1);
    assert_eq!(lease.commit_layer(layer, 0..100).unwrap().tokens(), 0..100);
    let error = lease.commit_layer(layer, 101..200).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::CommitGap { committed: 100, .. }),
        "{error}"
    );
    assert!(lease.commit_layer(layer, 100..301).is_err());
    assert_eq!(
        lease.commit_layer(layer, 100..300).unwrap().tokens(),
        0..300
    );
}

#[test]
fn the_last_generation_is_retired() {
    let config = PoolConfig {
        pages: 1,
        windows: 1,
        requests: 1,
        memory: MemoryKind::Host,
    };
    let pools = PoolSet::with_first_generation(small_schema(), config, u32::MAX).unwrap();
    drop(pools.reserve(1, Room(1)).unwrap());
    let stats = pools.stats();
    assert_eq!((stats.pages.retired, stats.pages.free), (1, 0));
    assert!(stats.is_conserved());
    let error = pools.reserve(1, Room(2)).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::NeverFits { .. }),
        "{error}"
    );
}

#[test]
fn pools_beyond_the_memory_are_refused_before_anything_is_touched() {
    let config = PoolConfig {
        pages: 1 << 28,
        windows: 1,
        requests: 1,
        memory: MemoryKind::Shared,
    };
    let error = PoolSet::new(small_schema(), config).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::OutOfMemory { .. }),
        "{error}"
    );
}
