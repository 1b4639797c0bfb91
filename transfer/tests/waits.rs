//! A wait that ends by its deadline says nothing about the operation (I-11).

#![allow(clippy::unwrap_used)]

use kvgate_transfer::sync::Arc;
use kvgate_transfer::{
    Agent, Deadline, DescriptorList, Memory, Op, PoolGeometry, PostOptions, SourceReady, Status,
};

const SLOT_BYTES: u64 = 1 << 20;
const SLOT_COUNT: u32 = 48;

fn pool() -> PoolGeometry {
    PoolGeometry {
        offset_bytes: 0,
        stride_bytes: SLOT_BYTES,
        slot_bytes: SLOT_BYTES,
        slot_count: SLOT_COUNT,
    }
}

#[test]
fn a_wait_that_runs_out_does_not_end_the_operation() {
    let (from, to) = (
        Agent::builder("from").build().unwrap(),
        Agent::builder("to").build().unwrap(),
    );
    let memory = || Arc::new(Memory::host(SLOT_BYTES * u64::from(SLOT_COUNT)).unwrap());
    let source = from.register(memory(), &[pool()]).unwrap();
    let target = to.register(memory(), &[pool()]).unwrap();
    let (peer, _) = Agent::connect_local(&from, &to).unwrap();
    let info = from.peer(peer).unwrap();
    let slots: Vec<u32> = (0..SLOT_COUNT).collect();
    let mut local = DescriptorList::new();
    local.push(source.pools()[0], &slots);
    let mut remote = DescriptorList::remote(info.incarnation);
    remote.push(target.pools()[0], &slots);
    let transfer = from.prepare(Op::Write, &local, &remote, peer).unwrap();
    let mut ran_out = 0;
    for _ in 0..20 {
        let handle = from
            .post(
                &transfer,
                SourceReady::host_written(),
                PostOptions::default(),
            )
            .unwrap();
        match handle.wait(Deadline::after_ms(0)) {
            Status::InFlight => ran_out += 1,
            // Then it has ended, and everybody sees so.
            answer => assert_eq!(format!("{:?}", handle.status()), format!("{answer:?}")),
        }
        let end = handle.wait(Deadline::after_ms(30_000));
        assert!(matches!(end, Status::Done(_)), "{end:?}");
    }
    assert!(ran_out > 0, "48 MiB were copied in no time, twenty times");
}
