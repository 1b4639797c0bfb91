//! DEV-03: an abort frees pages under a running write.
//!
//! **Given** decode has reserved 31 of 44 pages for request A, and prefill has posted a write that takes
//! long. **When** A is aborted half way and B asks for 32 pages at once. **Expected** B gets none of A's
//! pages before the write is proven over, or the endpoint dead; it meets back-pressure; no clock releases
//! anything. **In the field** B got A's pages, and decoded the rest of A's write.
//!
//! Guard: I-9, I-11. The pools free slots against the proof of the flight and that of the ledger
//! (`kvcache/src/pool/drain.rs`), and the proof of the flight comes with the word of each writer
//! (`transfer/src/engine/quiesce.rs`).

use kvgate_kvcache::{DrainingFlight, WriteLease};
use kvgate_transfer::Deadline;
use kvgate_transfer::sim::{Death, SimFaults, SimNet};

use crate::host::{Host, Net, Request, Shape, cancelled, rows, seeds};

const A_PAGES: u32 = 31;
const B_PAGES: u32 = 32;

fn host(seed: u64) -> Host {
    println!("DEV-03: seed {seed}");
    let net = Net::Sim(SimNet::new(seed, SimFaults::none()));
    Host::new(net, Shape::of(&[0, 4, 128], 44), 1)
}

/// A is under way, some of its bytes have landed, and it is aborted.
fn abort_half_way(host: &Host) -> DrainingFlight {
    let a = Request::new(1, A_PAGES * 256);
    let flight = host.flight(a);
    let handles = host.post_all(a, &flight);
    assert!(handles.len() > 60, "an operation per layer and segment");
    host.net.steps(1 + host.net.sim().random(40));
    assert!(!flight.barrier().all_landed());
    flight.abort(cancelled())
}

/// B asks, and begins to fill what it gets.
fn ask(host: &Host) -> Option<(Request, WriteLease)> {
    let b = Request::new(2, B_PAGES * 256);
    match host.reserve(b) {
        Ok(mut lease) => {
            let schema = host.receiver.pools.schema();
            for layer in schema.layers() {
                rows::write(schema, &mut lease, layer, b, 0..b.tokens);
            }
            Some((b, lease))
        }
        Err(error) => {
            assert!(error.is_retryable(), "not back-pressure: {error}");
            None
        }
    }
}

/// What B reads is what B wrote.
fn check_own(host: &Host, admitted: Option<(Request, WriteLease)>) -> bool {
    let Some((b, mut lease)) = admitted else {
        return false;
    };
    let schema = host.receiver.pools.schema();
    let foreign = rows::foreign_own(schema, &mut lease, b);
    assert_eq!(foreign, None, "B decodes what A's write left in its pages");
    true
}

fn draining(host: &Host) -> (u32, u32) {
    let stats = host.receiver.pools.stats();
    assert!(stats.is_conserved(), "{stats:?}");
    (stats.pages.draining, stats.pages.free)
}

#[test]
fn dev_03_pages_of_an_aborted_request_wait_for_its_write() {
    for seed in seeds(12) {
        let host = host(seed);
        let mut a = abort_half_way(&host);
        let is_free = a.poll();
        let early = ask(&host);
        if early.is_none() {
            assert_eq!(draining(&host), (A_PAGES, 13));
        }
        // Nobody waits long enough for a clock to matter, and none does.
        let waited = a.wait(Deadline::now());
        // The write ends, long after its abort.
        host.net.run();
        let was_early = check_own(&host, early);
        assert!(
            !was_early && !is_free,
            "pages were given away under a running write"
        );
        let mut a = waited.expect_err("the end of a wait frees nothing");
        assert!(a.poll(), "everything of A has landed: its writer is quiet");
        assert!(check_own(&host, ask(&host)), "now there is room");
        assert_eq!(draining(&host), (0, 44));
    }
}

#[test]
fn dev_03_a_dead_writer_frees_pages_only_with_a_proof() {
    for seed in seeds(12) {
        for death in [Death::Proven, Death::Unprovable] {
            let host = host(seed);
            let mut a = abort_half_way(&host);
            host.net.sim().kill(&host.writers[0].node.agent, death);
            let is_free = a.poll();
            let early = ask(&host);
            // The end of the connection is heard of, and what a card had taken lands after it.
            host.net.run();
            let was_early = check_own(&host, early);
            assert!(!was_early && !is_free, "nobody had heard of the death yet");
            let is_proven = death == Death::Proven;
            assert_eq!(a.poll(), is_proven);
            assert_eq!(check_own(&host, ask(&host)), is_proven);
            let quarantined = host.receiver.pools.stats().pages.quarantined;
            drop(a);
            let kept = host.receiver.pools.stats().pages.quarantined;
            assert_eq!(quarantined, 0, "still in hand");
            assert_eq!(kept, if is_proven { 0 } else { A_PAGES });
        }
    }
}
