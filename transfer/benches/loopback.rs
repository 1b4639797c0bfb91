//! A hand-off of the DeepSeek-V4 Flash shape over each backend, pushed and pulled, against plain copies of the
//! same slots.
//!
//! 62 pools (21 of 37,440, 21 of 8,448, 20 of 1,728 bytes a slot), 128 scattered slots in each (32,768
//! tokens), one operation per layer. `cargo bench -p kvgate-transfer --bench loopback [-- --json]`; the
//! last line is one JSON object with `--json`.

use std::time::Instant;

use kvgate_transfer::{
    Address, Agent, AgentEvent, Arrival, Barrier, BarrierPlan, ChunkId, ChunkSpec, Deadline,
    DescriptorList, Epoch, Memory, MemoryRegion, Op, PeerId, PoolGeometry, PostOptions,
    PreparedTransfer, SourceReady, StageId, Status, WriterRank, sync::Arc,
};

const SLOT_COUNT: u32 = 200;
const MOVED: u32 = 128;
const ROUNDS: u64 = 15;

fn soon() -> Deadline {
    Deadline::after_ms(60_000)
}

fn pools() -> Vec<PoolGeometry> {
    let slot_bytes = [(37_440, 21), (8_448, 21), (1_728, 20)];
    let mut offset_bytes = 0u64;
    let mut pools = Vec::new();
    for bytes in slot_bytes
        .into_iter()
        .flat_map(|(bytes, count)| std::iter::repeat_n(bytes, count))
    {
        let pool = PoolGeometry {
            offset_bytes,
            stride_bytes: bytes,
            slot_bytes: bytes,
            slot_count: SLOT_COUNT,
        };
        offset_bytes = pool.end_bytes().expect("a pool").next_multiple_of(4096);
        pools.push(pool);
    }
    pools
}

/// Pools of one layer each: latent and index of the 21, latent of the 20.
fn layers() -> Vec<Vec<usize>> {
    (0..21)
        .map(|index| vec![index, 21 + index])
        .chain((42..62).map(|index| vec![index]))
        .collect()
}

/// Every slot but the null one, in an order that leaves few neighbours.
fn slots(step: u32, start: u32) -> Vec<u32> {
    (0..MOVED)
        .map(|index| (index * step + start) % (SLOT_COUNT - 1) + 1)
        .collect()
}

struct Side {
    agent: Agent,
    region: MemoryRegion,
}

fn side(name: &str) -> Side {
    let pools = pools();
    let len_bytes = pools
        .last()
        .and_then(PoolGeometry::end_bytes)
        .expect("62 pools");
    let agent = Agent::builder(name).build().expect("an agent");
    let memory = Memory::shared(name, len_bytes).expect("memory");
    let region = agent
        .register(Arc::new(memory), &pools)
        .expect("pools that fit");
    Side { agent, region }
}

fn connect(from: &Side, to: &Side, address: Option<&Address>) -> (PeerId, PeerId) {
    let Some(address) = address else {
        return Agent::connect_local(&from.agent, &to.agent).expect("two agents of this process");
    };
    let bound = to.agent.listen(address).expect("a free address");
    let there = from
        .agent
        .connect(&bound, soon())
        .expect("a listening agent");
    match to.agent.next_event(soon()) {
        Some(AgentEvent::PeerUp { peer }) => (there, peer),
        other => panic!("{other:?}"),
    }
}

fn prepare(op: Op, from: &Side, peer: PeerId) -> Vec<PreparedTransfer> {
    let info = from.agent.peer(peer).expect("connected");
    let (sources, targets) = (slots(37, 11), slots(53, 29));
    let one = |layer: Vec<usize>| {
        let (mut local, mut remote) = (
            DescriptorList::new(),
            DescriptorList::remote(info.incarnation),
        );
        for pool in layer {
            local.push(from.region.pools()[pool], &sources);
            remote.push(info.pools[pool].pool, &targets);
        }
        from.agent
            .prepare(op, &local, &remote, peer)
            .expect("lists that fit")
    };
    layers().into_iter().map(one).collect()
}

/// Seconds from the first post to the last open gate, the best of all rounds.
fn hand_off_seconds(op: Op, address: Option<&Address>) -> f64 {
    let (poster, other) = (side("poster"), side("other"));
    let (there, here) = connect(&poster, &other, address);
    let transfers = prepare(op, &poster, there);
    let told = announcement(&other, here, &poster);
    // Where the bytes go is where the gates are.
    let (receiver, writer) = match op {
        Op::Write => (&other, here),
        _ => (&poster, there),
    };
    let mut best = f64::MAX;
    for round in 1..=ROUNDS {
        let chunk = |stage| ChunkSpec {
            stage: StageId(stage as u16),
            chunk: ChunkId(0),
            writer: WriterRank(0),
            descriptor_count: MOVED,
        };
        let plan =
            BarrierPlan::from_chunks((0..transfers.len()).map(chunk).collect()).expect("a plan");
        let barrier = Barrier::new(plan, Epoch(round));
        let flight = receiver
            .agent
            .expect(&barrier, &[(writer, WriterRank(0))], None)
            .expect("a flight");
        barrier.arm().expect("armed once");
        let started = Instant::now();
        let post = |(stage, transfer): (usize, &PreparedTransfer)| {
            let tickets = vec![(StageId(stage as u16), ChunkId(0))];
            let arrival = Some(Arrival {
                epoch: Epoch(round),
                tickets,
                note: Default::default(),
            });
            let options = PostOptions {
                arrival,
                ..Default::default()
            };
            let source = match op {
                Op::Write => SourceReady::host_written(),
                _ => SourceReady::announced(&told).expect("a message"),
            };
            let posted = poster.agent.post_within(transfer, source, options, soon());
            posted.expect("room")
        };
        let handles: Vec<_> = transfers.iter().enumerate().map(post).collect();
        barrier.wait_all(soon()).expect("every chunk lands");
        best = best.min(started.elapsed().as_secs_f64());
        for handle in handles {
            assert!(matches!(handle.wait(soon()), Status::Done(_)));
        }
        let proof = flight.close().wait(soon());
        assert_eq!(proof.expect("everything has landed").epoch(), Epoch(round));
    }
    best
}

/// What `source` says of its slots, as `reader` hears it.
fn announcement(source: &Side, reader_there: PeerId, reader: &Side) -> AgentEvent {
    source.agent.send(reader_there, "complete").expect("queued");
    loop {
        match reader.agent.next_event(soon()).expect("an event") {
            message @ AgentEvent::Message { .. } => return message,
            _ => continue,
        }
    }
}

/// Microseconds until a read or write of one slot of 8,448 bytes is done, the median of many.
fn one_slot_us(op: Op, address: Option<&Address>) -> f64 {
    let (poster, other) = (side("poster"), side("other"));
    let (there, here) = connect(&poster, &other, address);
    let told = announcement(&other, here, &poster);
    let info = poster.agent.peer(there).expect("connected");
    let (mut local, mut remote) = (
        DescriptorList::new(),
        DescriptorList::remote(info.incarnation),
    );
    local.push(poster.region.pools()[21], &[5]);
    remote.push(info.pools[21].pool, &[9]);
    let transfer = poster.agent.prepare(op, &local, &remote, there);
    let transfer = transfer.expect("one slot");
    let mut all: Vec<f64> = (0..2_000)
        .map(|_| {
            let source = match op {
                Op::Write => SourceReady::host_written(),
                _ => SourceReady::announced(&told).expect("a message"),
            };
            let started = Instant::now();
            let posted = poster.agent.post(&transfer, source, PostOptions::default());
            let status = posted.expect("room").wait(soon());
            assert!(matches!(status, Status::Done(_)), "{status:?}");
            started.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    all.sort_unstable_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Seconds for plain copies of the same slots by one thread, and the bytes.
fn copy_seconds() -> (f64, u64) {
    let pools = pools();
    let len = pools
        .last()
        .and_then(PoolGeometry::end_bytes)
        .expect("62 pools") as usize;
    let (source, mut target) = (vec![1u8; len], vec![2u8; len]);
    let (sources, targets) = (slots(37, 11), slots(53, 29));
    let at = |pool: &PoolGeometry, slot: u32| {
        let start = (pool.offset_bytes + u64::from(slot) * pool.stride_bytes) as usize;
        start..start + pool.slot_bytes as usize
    };
    let mut best = f64::MAX;
    for _ in 0..ROUNDS {
        let started = Instant::now();
        for pool in &pools {
            for (from, to) in sources.iter().zip(&targets) {
                target[at(pool, *to)].copy_from_slice(&source[at(pool, *from)]);
            }
        }
        best = best.min(started.elapsed().as_secs_f64());
        std::hint::black_box(&mut target);
    }
    let bytes = pools
        .iter()
        .map(|pool| pool.slot_bytes * u64::from(MOVED))
        .sum();
    (best, bytes)
}

fn main() {
    let is_json = std::env::args().any(|argument| argument == "--json");
    let (copy, bytes) = copy_seconds();
    let gbps = |seconds: f64| bytes as f64 / seconds / 1e9;
    let name = format!("kvgate-bench-{}", std::process::id());
    let (shm, cma) = (Address::Shm(name.clone()), Address::Cma(name));
    let tcp = Address::Tcp(([127, 0, 0, 1], 0).into());
    let mut fields = vec![
        format!("\"bytes\":{bytes}"),
        format!("\"memcpy_gbps\":{:.3}", gbps(copy)),
    ];
    eprintln!("{bytes} bytes, memcpy {:.2} GB/s", gbps(copy));
    for (name, address) in [
        ("local", None),
        ("shm", Some(&shm)),
        ("cma", Some(&cma)),
        ("tcp", Some(&tcp)),
    ] {
        for (op, suffix) in [(Op::Write, ""), (Op::Read, "_read")] {
            let seconds = hand_off_seconds(op, address);
            let one_us = one_slot_us(op, address);
            let (rate, ratio) = (gbps(seconds), copy / seconds);
            eprintln!("{name} {op}: {rate:.2} GB/s, {ratio:.2} of memcpy, one slot {one_us:.1} us");
            fields.push(format!(
                "\"{name}{suffix}_gbps\":{rate:.3},\"{name}{suffix}_ratio\":{ratio:.3},\"{name}{suffix}_one_slot_us\":{one_us:.2}"
            ));
        }
    }
    if is_json {
        println!("{{{}}}", fields.join(","));
    }
}
