//! Two prefill ranks that deliver different layers of one request, and how its slots come back.
#![allow(clippy::needless_update, reason = "a feature adds a field")]
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::*;
use kvgate_kvcache::canary::{VerifyMode, page_digests};
use kvgate_kvcache::*;
use kvgate_transfer::{
    Agent, Cause, Deadline, Epoch, Op, PeerId, PostOptions, Side, Status, WriterRank,
};

const TOKENS: u32 = 700;

/// One sending process with its pools.
struct Rank {
    rank: WriterRank,
    agent: Agent,
    pools: PoolSet,
    to_receiver: PeerId,
    at_receiver: PeerId,
    layers: std::ops::Range<u16>,
}

struct World {
    receiver: Agent,
    target: PoolSet,
    ranks: Vec<Rank>,
    plan: TransferPlan,
}

fn world() -> World {
    let schema = small_schema();
    let config = PoolConfig {
        pages: 6,
        windows: 4,
        requests: 2,
        memory: MemoryKind::Host,
    };
    let receiver = Agent::builder("decode").build().unwrap();
    let target = PoolSet::new(schema.clone(), config).unwrap();
    target.register(&receiver).unwrap();
    let ranks: Vec<Rank> = [(0, 0..1), (1, 1..3)]
        .into_iter()
        .map(|(rank, layers)| {
            let agent = Agent::builder(format!("prefill-{rank}")).build().unwrap();
            let pools = PoolSet::new(schema.clone(), config).unwrap();
            pools.register(&agent).unwrap();
            let (to_receiver, at_receiver) = Agent::connect_local(&agent, &receiver).unwrap();
            Rank {
                rank: WriterRank(rank),
                agent,
                pools,
                to_receiver,
                at_receiver,
                layers,
            }
        })
        .collect();
    let writer = |rank: &Rank| WriterLayers {
        rank: rank.rank,
        layers: rank.layers.clone(),
    };
    let writers = ranks.iter().map(writer).collect();
    let plan = TransferPlan::compile(schema, TOKENS, vec![256, TOKENS], writers).unwrap();
    World {
        receiver,
        target,
        ranks,
        plan,
    }
}

impl World {
    fn flight(&self, epoch: u64) -> InFlight {
        let lease = self.target.reserve(TOKENS + 50, Room(1)).unwrap();
        let writers: Vec<_> = self
            .ranks
            .iter()
            .map(|rank| (rank.at_receiver, rank.rank))
            .collect();
        let flight = lease.into_inflight(&self.plan, Epoch(epoch), &writers);
        let mut flight = flight.map_err(|refused| refused.1).unwrap();
        flight.arm(&self.receiver, None).unwrap();
        flight
    }

    /// One rank computes everything it delivers and sends it.
    fn send(&self, rank: &Rank, flight: &InFlight) {
        let mut lease = rank.pools.reserve(TOKENS, Room(1)).unwrap();
        let peer = rank.agent.peer(rank.to_receiver).unwrap();
        let pools: Vec<_> = peer.pools.iter().map(|pool| pool.pool).collect();
        let target = PostTarget {
            incarnation: peer.incarnation,
            pools: &pools,
            table: flight.block_table(),
            epoch: flight.barrier().epoch(),
            room: Room(1),
            verify: VerifyMode::Off,
        };
        for layer in rank.layers.clone().map(LayerId) {
            fill_layer(&rank.pools, &mut lease, layer, TOKENS, 3);
            let written = lease.commit_layer(layer, 0..TOKENS).unwrap();
            for segment in 0..2 {
                let post = self
                    .plan
                    .post(&rank.pools, segment, &written, &target)
                    .unwrap();
                if post.is_empty() {
                    continue;
                }
                let (local, remote) = post.descriptors();
                let x = rank
                    .agent
                    .prepare(Op::Write, &local, &remote, rank.to_receiver)
                    .unwrap();
                let options = PostOptions {
                    arrival: Some(post.arrival),
                    keepalive: Some(Box::new(post.keepalive)),
                    ledger: Some(lease.ledger().clone()),
                    ..PostOptions::default()
                };
                let handle = rank.agent.post(&x, post.source, options).unwrap();
                assert!(matches!(handle.wait(deadline()), Status::Done(_)));
            }
        }
        lease.close().wait(deadline()).unwrap();
        assert!(rank.pools.stats().is_conserved());
    }
}

fn abort() -> Cause {
    Cause::Aborted {
        by: Side::Local,
        reason: "test".to_owned(),
    }
}

#[test]
fn each_layer_opens_with_its_own_writer_and_the_whole_equals_one_computation() {
    let world = world();
    let flight = world.flight(1);
    let lease = flight.lease().unwrap();
    world.send(&world.ranks[1], &flight);
    let _ready = lease.layer(LayerId(2), deadline()).unwrap();
    let error = lease.layer(LayerId(0), Deadline::after_ms(1)).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Gate { .. }), "{error}");
    world.send(&world.ranks[0], &flight);
    let _all = lease.all_layers(deadline()).unwrap();

    let one = PoolSet::new(
        small_schema(),
        PoolConfig {
            pages: 3,
            windows: 2,
            requests: 1,
            memory: MemoryKind::Host,
        },
    )
    .unwrap();
    let mut computed = one.reserve(TOKENS, Room(2)).unwrap();
    for layer in one.schema().layers() {
        fill_layer(&one, &mut computed, layer, TOKENS, 3);
    }
    let expected = page_digests(&one, computed.block_table(), TOKENS);
    let found = page_digests(&world.target, flight.block_table(), TOKENS);
    assert_eq!(found, expected);
    drop(lease);
    flight.close().wait(deadline()).unwrap();
    assert_eq!(world.target.stats().pages.free, 6);
}

#[test]
fn after_an_abort_every_writer_that_has_not_delivered_must_be_heard_of() {
    let world = world();
    let flight = world.flight(1);
    let lease = flight.lease().unwrap();
    world.send(&world.ranks[0], &flight);
    let mut draining = flight.abort(abort());
    assert!(
        lease.layer(LayerId(1), deadline()).is_err(),
        "waiters get the cause at once"
    );
    assert!(
        !draining.poll(),
        "a lease is left, and rank 1 may still write"
    );
    drop(lease);
    assert!(!draining.poll(), "rank 1 may still write");
    let (_, elsewhere) = draining.unquiet();
    assert_eq!(
        elsewhere.writers,
        [WriterRank(1)],
        "rank 0 has delivered everything"
    );
    let stats = world.target.stats();
    assert!(stats.is_conserved());
    assert_eq!((stats.pages.draining, stats.pages.free), (3, 3));
    let at = |rank: usize| world.ranks[rank].at_receiver;
    assert!(
        !draining.writer_answered(at(0), WriterRank(1)),
        "nobody answers for another"
    );
    assert!(!draining.poll());
    assert!(draining.writer_answered(at(1), WriterRank(1)));
    assert!(draining.poll());
    assert_eq!(world.target.stats().pages.free, 6);
}

#[test]
fn a_quarantined_flight_comes_back_when_its_writer_answers_after_all() {
    let world = world();
    let draining = world.flight(7).abort(abort());
    let draining = draining.wait(Deadline::after_ms(1)).unwrap_err();
    draining.quarantine();
    let stats = world.target.stats();
    assert!(stats.is_conserved());
    assert_eq!(
        (
            stats.pages.quarantined,
            stats.pages.draining,
            stats.pages.free
        ),
        (3, 3, 3)
    );
    assert_eq!(stats.windows.quarantined, 2);
    let answer = |epoch, peer: usize, rank| {
        let peer = world.ranks[peer].at_receiver;
        world
            .target
            .writer_answered(Epoch(epoch), peer, WriterRank(rank))
    };
    assert!(!answer(8, 0, 0), "no such flight");
    assert!(!answer(7, 1, 0), "nobody answers for another");
    assert!(answer(7, 0, 0));
    assert_eq!(
        world.target.stats().pages.quarantined,
        3,
        "one writer is not enough"
    );
    assert!(answer(7, 1, 1));
    let stats = world.target.stats();
    assert_eq!(
        (
            stats.pages.quarantined,
            stats.pages.free,
            stats.requests.free
        ),
        (0, 6, 2)
    );
}

#[test]
fn a_flight_that_was_never_armed_gives_its_slots_back_at_once() {
    let world = world();
    let lease = world.target.reserve(TOKENS, Room(1)).unwrap();
    let writers: Vec<_> = world
        .ranks
        .iter()
        .map(|rank| (rank.at_receiver, rank.rank))
        .collect();
    let flight = lease
        .into_inflight(&world.plan, Epoch(1), &writers)
        .map_err(|e| e.1)
        .unwrap();
    let reader = flight.lease().unwrap();
    assert!(
        reader.layer(LayerId(0), deadline()).is_err(),
        "closed before it is armed"
    );
    drop((reader, flight));
    assert_eq!(world.target.stats().pages.free, 6);
}
