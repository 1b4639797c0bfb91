//! Layer-wise overlap: a gate says something about its own layer only.
#![cfg(kv_loom)]

use kvgate_loom_tests::{Cell, armed, deadline, land, model};
use kvgate_transfer::StageId;
use kvgate_transfer::sync::{Arc, thread};

/// Layer 0 is read while layer 1 is still written.
#[test]
fn a_layer_is_read_while_the_next_one_lands() {
    model("a_layer_is_read_while_the_next_one_lands", || {
        let barrier = armed(&[2, 1], 1);
        let pages = Arc::new([Cell::new(), Cell::new(), Cell::new()]);
        let nic = {
            let (barrier, pages) = (barrier.clone(), pages.clone());
            thread::spawn(move || {
                for (page, (stage, chunk)) in [(0, 0), (0, 1), (1, 0)].into_iter().enumerate() {
                    pages[page].write(7);
                    land(&barrier, 1, stage, chunk);
                }
            })
        };
        barrier.wait(StageId(0), deadline()).unwrap();
        assert_eq!((pages[0].read(), pages[1].read()), (7, 7));
        barrier.wait(StageId(1), deadline()).unwrap();
        assert_eq!(pages[2].read(), 7);
        nic.join().unwrap();
    });
}
