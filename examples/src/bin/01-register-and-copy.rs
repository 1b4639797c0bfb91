//! One idea: a transfer is two lists of slot numbers, and its end is a type.
//!
//! Two agents of one process register memory as pools of equal slots. The sender writes three slots into
//! three others, in another order. The receiver reads behind a barrier, the sender learns how far its
//! bytes have come, and the memory may be reused only against a proof.

use std::error::Error;
use std::sync::Arc;

use kvgate_transfer::{
    Agent, Arrival, Barrier, BarrierPlan, ChunkId, ChunkSpec, Deadline, DescriptorList, Epoch,
    Memory, Op, PoolGeometry, PostOptions, SourceReady, StageId, StageState, Status, WriterRank,
};

/// Eight slots of 4 KiB.
const POOL: PoolGeometry = PoolGeometry {
    offset_bytes: 0,
    stride_bytes: 4096,
    slot_bytes: 4096,
    slot_count: 8,
};
const MEMORY_BYTES: u64 = POOL.stride_bytes * POOL.slot_count as u64;

fn main() -> Result<(), Box<dyn Error>> {
    let (sender, receiver) = (
        Agent::builder("sender").build()?,
        Agent::builder("receiver").build()?,
    );
    let mut source = Memory::host(MEMORY_BYTES)?;
    for slot in [1_u8, 2, 5] {
        source.write_at(u64::from(slot) * POOL.stride_bytes, &[slot; 4096])?;
    }
    let source = sender.register(Arc::new(source), &[POOL])?;
    let target_memory = Arc::new(Memory::host(MEMORY_BYTES)?);
    let target = receiver.register(Arc::clone(&target_memory), &[POOL])?;
    let (to_receiver, from_sender) = Agent::connect_local(&sender, &receiver)?;

    // The receiver says what it waits for before anybody may write: one chunk of three slots.
    let (stage, chunk, writer) = (StageId(0), ChunkId(0), WriterRank(0));
    let plan = BarrierPlan::from_chunks(vec![ChunkSpec {
        stage,
        chunk,
        writer,
        descriptor_count: 3,
    }])?;
    let barrier = Barrier::new(plan, Epoch(1));
    let flight = receiver.expect(&barrier, &[(from_sender, writer)], None)?;
    println!("before arming: {:?}", barrier.check(stage));
    barrier.arm()?;
    println!("armed:         {:?}", barrier.check(stage));

    // Slots 1, 2, 5 here go to slots 7, 6, 3 there.
    let peer = sender.peer(to_receiver).ok_or("the receiver is gone")?;
    let remote_pool = peer.pools.first().ok_or("the receiver has no pool")?.pool;
    let local_pool = *source.pools().first().ok_or("no pool was registered")?;
    let (mut local, mut remote) = (
        DescriptorList::new(),
        DescriptorList::remote(peer.incarnation),
    );
    local.push(local_pool, &[1, 2, 5]);
    remote.push(remote_pool, &[7, 6, 3]);
    let transfer = sender.prepare(Op::Write, &local, &remote, to_receiver)?;
    let arrival = Arrival {
        epoch: Epoch(1),
        tickets: vec![(stage, chunk)],
        note: Default::default(),
    };
    let options = PostOptions {
        arrival: Some(arrival),
        ..Default::default()
    };
    let handle = sender
        .post(&transfer, SourceReady::host_written(), options)
        .map_err(|refused| refused.error)?;

    barrier.wait(stage, Deadline::after_ms(5_000))?;
    println!("landed:        {:?}", barrier.check(stage));
    assert_eq!(barrier.check(stage), StageState::Ready);
    let Status::Done(level) = handle.wait(Deadline::after_ms(5_000)) else {
        return Err("the transfer did not end well".into());
    };
    println!("the sender knows its bytes are {level:?}");

    let proof = flight
        .close()
        .wait(Deadline::after_ms(5_000))
        .map_err(|_| "somebody may still write")?;
    println!(
        "flight {:?} is over, its slots may have a new owner",
        proof.epoch()
    );
    target
        .close(Deadline::after_ms(5_000))
        .map_err(|(_, error)| error)?;
    source
        .close(Deadline::after_ms(5_000))
        .map_err(|(_, error)| error)?;
    // Nobody else has the memory now, so its bytes can be read without a gate.
    let mut memory =
        Arc::try_unwrap(target_memory).map_err(|_| "the memory is still registered")?;
    for (slot, expected) in [(7_u64, 1_u8), (6, 2), (3, 5)] {
        let mut bytes = [0; 4096];
        memory.read_at(slot * POOL.stride_bytes, &mut bytes)?;
        assert!(bytes.iter().all(|&byte| byte == expected), "slot {slot}");
        println!("slot {slot} holds {expected}");
    }
    Ok(())
}
