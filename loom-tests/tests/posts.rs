//! I-9, I-24: a move is given up while another thread still posts its layers.
#![cfg(kv_loom)]
#![allow(clippy::unwrap_used)]

use kvgate_hicache::flight::Posts;
use kvgate_loom_tests::{Cell, deadline, model};
use kvgate_transfer::Cause;
use kvgate_transfer::sync::{Arc, AtomicU32, Ordering, thread};

/// An operation that was posted: whether it was cancelled.
type Handle = AtomicU32;

const LAYERS: u32 = 2;

fn is_cancelled(handle: &Arc<Handle>) -> bool {
    handle.load(Ordering::Acquire) == 1
}

/// Posts layer after layer: each writes the slots of the move, and is cancelled by whoever learns of it too late.
fn poster(posts: &Arc<Posts<Handle>>, slots: &Arc<Cell>) -> impl FnOnce() + Send + 'static {
    let (posts, slots) = (posts.clone(), slots.clone());
    move || {
        for _ in 0..LAYERS {
            if !posts.is_wanted() {
                break;
            }
            slots.write(7);
            let handle = Arc::new(Handle::new(0));
            if !posts.push(&handle) {
                handle.store(1, Ordering::Release);
            }
        }
        posts.finish(Ok(()));
    }
}

/// The slots have their next owner only when nothing more is posted.
#[test]
fn slots_of_a_move_wait_for_its_last_post() {
    model("slots_of_a_move_wait_for_its_last_post", || {
        let (posts, slots) = (Arc::new(Posts::new()), Arc::new(Cell::new()));
        let other = thread::spawn(poster(&posts, &slots));
        let _cancelled = posts.stop();
        assert!(posts.wait_over(deadline()));
        slots.write(1);
        assert_eq!(slots.read(), 1);
        other.join().unwrap();
    });
}

/// No operation of a move that was given up goes on: one of the two threads knows of each.
#[test]
fn every_post_of_a_move_given_up_is_cancelled() {
    model("every_post_of_a_move_given_up_is_cancelled", || {
        let (posts, slots) = (Arc::new(Posts::new()), Arc::new(Cell::new()));
        let other = thread::spawn(poster(&posts, &slots));
        for handle in posts.stop() {
            handle.store(1, Ordering::Release);
        }
        assert!(posts.wait_over(deadline()));
        assert!(posts.so_far().iter().all(is_cancelled));
        other.join().unwrap();
    });
}

/// Why a layer was not posted is known to whoever sees that nothing more is posted.
#[test]
fn the_cause_comes_with_the_end() {
    model("the_cause_comes_with_the_end", || {
        let posts: Arc<Posts<Handle>> = Arc::new(Posts::new());
        let other = {
            let posts = posts.clone();
            thread::spawn(move || posts.finish(Err(Cause::Shutdown)))
        };
        match posts.is_over() {
            true => assert!(posts.failure().is_some()),
            false => assert!(posts.wait_over(deadline()) && posts.failure().is_some()),
        }
        other.join().unwrap();
    });
}
