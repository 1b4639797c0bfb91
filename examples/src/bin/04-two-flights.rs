//! One idea: a step of a batch joins its flights layer by layer, and a flight that is given up takes
//! nothing from the others.
//!
//! Two sequences arrive at the same time. The batch uses a layer when both have it. Then the second one
//! is aborted half-way: its gates fail at once, the first one goes on, and the slots of the second come
//! back only when its writer has said that nothing of it is under way.

use std::error::Error;
use std::sync::Arc;

use kvgate_kvcache::canary::VerifyMode;
use kvgate_kvcache::{
    CacheSchema, Formats, InFlight, LayerId, MemoryKind, PoolConfig, PoolSet, PostTarget, Room,
    TransferPlan, V4Geometry, WriteLease, WriterLayers,
};
use kvgate_transfer::{Agent, Cause, Deadline, Epoch, Op, PeerId, PostOptions, Side, WriterRank};

const TOKENS: u32 = 200;
const RANK: WriterRank = WriterRank(0);

struct Writer {
    agent: Agent,
    peer: PeerId,
    pools: PoolSet,
    plan: TransferPlan,
}

fn main() -> Result<(), Box<dyn Error>> {
    let geometry = V4Geometry {
        layer_ratios: vec![0, 4, 128],
        ..V4Geometry::flash()
    };
    let schema = Arc::new(CacheSchema::deepseek_v4(&geometry, &Formats::default())?);
    let config = PoolConfig {
        pages: 2,
        windows: 2,
        requests: 2,
        memory: MemoryKind::Host,
    };
    let (source, target) = (
        PoolSet::new(Arc::clone(&schema), config)?,
        PoolSet::new(Arc::clone(&schema), config)?,
    );
    let (sender, reader) = (
        Agent::builder("writer").build()?,
        Agent::builder("reader").build()?,
    );
    source.register(&sender)?;
    target.register(&reader)?;
    let (to_reader, from_writer) = Agent::connect_local(&sender, &reader)?;
    let layers = WriterLayers {
        rank: RANK,
        layers: 0..schema.layer_count(),
    };
    let plan = TransferPlan::compile(Arc::clone(&schema), TOKENS, vec![TOKENS], vec![layers])?;
    let writer = Writer {
        agent: sender,
        peer: to_reader,
        pools: source,
        plan,
    };

    let (first, mut first_source) = writer.begin(1, &target, &reader, from_writer)?;
    let (second, mut second_source) = writer.begin(2, &target, &reader, from_writer)?;

    // Layer 0 of the first is not enough for the batch.
    let (one, other) = (first.lease()?, second.lease()?);
    writer.send(LayerId(0), &mut first_source, &first)?;
    drop(one.layer(LayerId(0), Deadline::after_ms(5_000))?);
    let waiting = other
        .layer(LayerId(0), Deadline::after_ms(1))
        .err()
        .ok_or("nothing was sent yet")?;
    println!("the batch waits: {waiting}");
    writer.send(LayerId(0), &mut second_source, &second)?;
    for (number, lease) in [(1, &one), (2, &other)] {
        let ready = lease.layer(LayerId(0), Deadline::after_ms(5_000))?;
        println!("sequence {number} has layer {}", ready.layer());
    }

    // The second one is given up.
    let cause = Cause::Aborted {
        by: Side::Local,
        reason: "the client went away".to_owned(),
    };
    let draining = second.abort(cause);
    let failed = other
        .layer(LayerId(1), Deadline::after_ms(5_000))
        .err()
        .ok_or("the gate has failed")?;
    println!("its gate: {failed}");
    drop(other);
    assert!(
        target.reserve(TOKENS, Room(3)).is_err(),
        "its slots may still be written"
    );
    let still_draining = draining
        .wait(Deadline::after_ms(1))
        .err()
        .ok_or("nobody has said that it is quiet")?;
    println!(
        "its slots wait for {:?}",
        still_draining.unquiet().1.writers
    );

    // The first one does not notice.
    for layer in [LayerId(1), LayerId(2)] {
        writer.send(layer, &mut first_source, &first)?;
        println!(
            "sequence 1 has layer {}",
            one.layer(layer, Deadline::after_ms(5_000))?.layer()
        );
    }

    // The writer's last operation of the second flight is terminal, and it says so.
    second_source
        .close()
        .wait(Deadline::after_ms(5_000))
        .map_err(|_| "its source is still read")?;
    assert!(still_draining.writer_answered(from_writer, RANK));
    still_draining
        .wait(Deadline::after_ms(5_000))
        .map_err(|_| "the writer is quiet")?;
    let third = target.reserve(TOKENS, Room(3))?;
    println!(
        "its slots have a new owner, generation {}",
        third.block_table().request().generation
    );
    drop((one, third));
    first
        .close()
        .wait(Deadline::after_ms(5_000))
        .map_err(|_| "somebody may still write")?;
    assert!(target.stats().is_conserved());
    Ok(())
}

impl Writer {
    /// Slots at the reader, armed, and slots here.
    fn begin(
        &self,
        number: u64,
        target: &PoolSet,
        reader: &Agent,
        from_writer: PeerId,
    ) -> Result<(InFlight, WriteLease), Box<dyn Error>> {
        let slots = target.reserve(TOKENS, Room(number))?;
        let writers = [(from_writer, RANK)];
        let mut flight = slots
            .into_inflight(&self.plan, Epoch(number), &writers)
            .map_err(|refused| refused.1)?;
        flight.arm(reader, None)?;
        Ok((flight, self.pools.reserve(TOKENS, Room(number))?))
    }

    /// Sends one layer as it is; what matters here is when.
    fn send(
        &self,
        layer: LayerId,
        source: &mut WriteLease,
        flight: &InFlight,
    ) -> Result<(), Box<dyn Error>> {
        let written = source.commit_layer(layer, 0..TOKENS)?;
        let info = self.agent.peer(self.peer).ok_or("the reader is gone")?;
        let pools: Vec<_> = info.pools.iter().map(|pool| pool.pool).collect();
        let target = PostTarget {
            incarnation: info.incarnation,
            pools: &pools,
            table: flight.block_table(),
            epoch: flight.barrier().epoch(),
            room: flight.room(),
            verify: VerifyMode::Canary,
        };
        let post = self.plan.post(&self.pools, 0, &written, &target)?;
        let (here, there) = post.descriptors();
        let transfer = self.agent.prepare(Op::Write, &here, &there, self.peer)?;
        #[allow(
            clippy::needless_update,
            reason = "the feature fault-injection adds a field"
        )]
        let options = PostOptions {
            arrival: Some(post.arrival),
            keepalive: Some(Box::new(post.keepalive)),
            ledger: Some(source.ledger().clone()),
            ..PostOptions::default()
        };
        let _handle = self
            .agent
            .post(&transfer, post.source, options)
            .map_err(|refused| refused.error)?;
        Ok(())
    }
}
