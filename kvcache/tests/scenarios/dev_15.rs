//! DEV-15: asynchronous scheduling frees pages before the step in flight is done.
//!
//! **Given** step N + 1 is launched when the output of step N finishes request R, and R's pages go to a
//! request that receives its cache over the network. **When** the kernel of the stale step writes R's last
//! row after the network has filled the page. **Expected** the pages are free only when the newest step that
//! may touch them is over. **In the field** the stale kernel overwrote what had been received.
//!
//! Guard: I-20. A flight is fenced with the newest step (`kvcache/src/lease/inflight.rs`,
//! `transfer/src/stream.rs`), and the proof waits for the fence (`transfer/src/engine/quiesce.rs`).
#![allow(unsafe_code)]

use kvgate_kvcache::{ComponentView, InFlight};
use kvgate_transfer::StepClock;

use crate::host::stream::{Delays, Gate, Stream};
use crate::host::{Host, Net, Request, Shape, patience, rows, seeds};

const TOKENS: u32 = 300;

/// The bytes of a row as a kernel knows them: by address, beyond the life of every lease.
struct RowAddress {
    first: usize,
    len: usize,
}

impl RowAddress {
    fn of(view: &ComponentView<'_>, entry: u32) -> RowAddress {
        let table = view.table();
        let page = table[(entry / view.entries_per_page()) as usize % table.len()];
        let row = entry % view.rows_per_page();
        let place = view.format().row_place(row, view.rows_per_page());
        let offset = u64::from(page) * view.stride_bytes() + place.data.start;
        RowAddress {
            first: view.base_ptr() as usize + offset as usize,
            len: (place.data.end - place.data.start) as usize,
        }
    }

    fn write(&self, value: u8) {
        // SAFETY: I-16: the row lies inside its pool, which outlives the stream; I-20: the step of this
        // kernel is not over, so the page has no other owner.
        unsafe { (self.first as *mut u8).write_bytes(value, self.len) };
    }
}

/// Some row that decoding could write; both requests have it.
fn some_row(host: &Host, flight: &InFlight, seed: u64) -> RowAddress {
    let schema = host.receiver.pools.schema();
    let row = schema.rows()[seed as usize % schema.rows().len()];
    let entry = row.live_entries(TOKENS, 128).end - 1;
    let (lease, mut append) = (flight.lease().unwrap(), flight.append_lease().unwrap());
    let ready = lease.layer(row.layer, patience()).unwrap();
    let layer = append.layer(&ready).unwrap();
    RowAddress::of(&layer.component(row.component).unwrap(), entry)
}

/// B is received into whatever it gets.
fn receive(host: &Host, b: Request) -> Option<InFlight> {
    let lease = match host.reserve(b) {
        Ok(lease) => lease,
        Err(error) => {
            assert!(error.is_retryable(), "not back-pressure: {error}");
            return None;
        }
    };
    let flight = host.arm(lease, b);
    host.hand_over(b, &flight);
    Some(flight)
}

fn check(host: &Host, flight: &InFlight, b: Request) {
    let lease = flight.lease().unwrap();
    for layer in host.layers() {
        let ready = lease.layer(layer, patience()).unwrap();
        let foreign = rows::foreign(host.receiver.pools.schema(), &ready.view(), b);
        assert_eq!(foreign, None, "the stale step wrote into what B received");
    }
}

/// Two steps in flight, and the request that they belong to ends: with the output of the first one, or
/// before it.
fn end_between_steps(seed: u64, is_cancelled: bool) {
    println!("DEV-15: seed {seed}");
    let shape = Shape {
        windows: 2,
        requests: 1,
        ..Shape::of(&[0, 4, 128], 2)
    };
    let host = Host::new(Net::Local, shape, 1);
    let (r, b) = (Request::new(1, TOKENS), Request::new(2, TOKENS));
    let flight = host.flight(r);
    host.hand_over(r, &flight);
    let stale_row = some_row(&host, &flight, seed);

    let (clock, stream) = (StepClock::new(), Stream::new());
    let (first, second) = (Gate::default(), Gate::default());
    let schema = host.receiver.pools.schema().clone();
    stream.hold(&first);
    let (step, clock_of_step) = (clock.begin_step(), clock.clone());
    let output = stream.launch(move || {
        for row in schema.rows() {
            Delays::new(seed).pause(row.layer, row.component);
        }
        clock_of_step.finish(step);
    });
    // The scheduler runs ahead: the next step is launched before this one has said anything.
    stream.hold(&second);
    let (next, clock_of_next) = (clock.begin_step(), clock.clone());
    let stale = stream.launch(move || {
        stale_row.write(0xee);
        clock_of_next.finish(next);
    });

    let end = |flight: InFlight| {
        flight.fence(&clock).unwrap();
        flight.close()
    };
    let mut ended = if is_cancelled {
        let ended = end(flight);
        first.open();
        output.wait();
        ended
    } else {
        first.open();
        output.wait();
        end(flight)
    };
    let is_free = ended.poll();
    let early = receive(&host, b);
    second.open();
    stale.wait();
    if let Some(flight) = &early {
        check(&host, flight, b);
    }
    assert!(
        early.is_none() && !is_free,
        "R's pages were given away under a running step"
    );
    assert!(ended.poll(), "the newest step is over");
    let flight = receive(&host, b).expect("there is room now");
    check(&host, &flight, b);
    assert!(flight.close().poll());
}

#[test]
fn dev_15_pages_wait_for_the_newest_step_in_flight() {
    for seed in seeds(18) {
        end_between_steps(seed, false);
    }
}

#[test]
fn dev_15_the_end_of_the_older_step_frees_nothing() {
    for seed in seeds(18) {
        end_between_steps(seed, true);
    }
}
