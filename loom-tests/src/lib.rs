//! Scenario kit of the model checks: bytes that loom watches, a link whose arrivals the model decides,
//! and the frame every model runs in.
//!
//! The models check the production code of `kvgate-transfer` and `kvgate-kvcache` compiled with
//! `--cfg kv_loom`; there is no second implementation of anything here. Without that cfg this crate is
//! empty. Run them with `cargo xtask loom`.

#![cfg(kv_loom)]
#![deny(missing_docs)]

mod bytes_of_pages;
mod cache;
mod direct;
mod link;

pub use bytes_of_pages::Cell;
pub use cache::{flight, plan, pools};
pub use direct::DirectLink;
pub use link::{ModelLink, model_peer, model_region};

use kvgate_transfer::sync::Arc;
use kvgate_transfer::{
    Agent, AgentBuilder, Barrier, BarrierPlan, ChunkId, ChunkSpec, Deadline, Epoch, Recorder,
    Redeemed, StageId, TicketId, TransferConfig, Visibility, WriterRank,
};

/// Explores every interleaving of `body` within the preemption bound of `LOOM_MAX_PREEMPTIONS`, and says
/// how many there were.
pub fn model(name: &str, body: impl Fn() + Sync + Send + 'static) {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    let executions = std::sync::Arc::new(AtomicUsize::new(0));
    let counter = executions.clone();
    let begin = std::time::Instant::now();
    let mut builder = loom::model::Builder::new();
    // The engine's own steps are long; a model that never ends still runs into this.
    builder.max_branches = 20_000;
    builder.check(move || {
        counter.fetch_add(1, Relaxed);
        body();
    });
    eprintln!(
        "{name}: {} executions, {:?}",
        executions.load(Relaxed),
        begin.elapsed()
    );
}

/// A deadline that a model never reaches: loom has no time.
pub fn deadline() -> Deadline {
    Deadline::after_ms(60_000)
}

/// A closed barrier: `chunks[s]` chunks in stage s, chunk c of writer c.
pub fn barrier(chunks: &[u16], epoch: u64) -> Arc<Barrier> {
    let spec = |stage: usize, chunk: u16| ChunkSpec {
        stage: StageId(stage as u16),
        chunk: ChunkId(chunk),
        writer: WriterRank(chunk),
        descriptor_count: 1,
    };
    let specs = chunks
        .iter()
        .enumerate()
        .flat_map(|(s, n)| (0..*n).map(move |c| spec(s, c)))
        .collect();
    Barrier::new(
        BarrierPlan::from_chunks(specs).expect("the model's plan is sound"),
        Epoch(epoch),
    )
}

/// [`barrier`], armed.
pub fn armed(chunks: &[u16], epoch: u64) -> Arc<Barrier> {
    let barrier = barrier(chunks, epoch);
    barrier.arm().expect("a fresh barrier");
    barrier
}

/// The name of a chunk.
pub fn ticket(epoch: u64, stage: u16, chunk: u16) -> TicketId {
    TicketId {
        epoch: Epoch(epoch),
        stage: StageId(stage),
        chunk: ChunkId(chunk),
    }
}

/// The bytes of a chunk are visible: it counts, and it has not counted before.
pub fn land(barrier: &Barrier, epoch: u64, stage: u16, chunk: u16) {
    let redeemed = barrier.redeem(ticket(epoch, stage, chunk), Visibility::RemoteVisible);
    assert!(
        matches!(redeemed, Ok(Redeemed::First | Redeemed::Last)),
        "{redeemed:?}"
    );
}

/// An agent that runs nothing by itself, and looks for no stalls.
pub fn still_agent(name: &str) -> Agent {
    agent_with(name, 0)
}

/// An agent that runs nothing by itself, and takes note of what goes on.
pub fn watched_agent(name: &str) -> Agent {
    agent_with(name, 1_000)
}

/// [`watched_agent`], whose events `recorder` gets.
pub fn recorded_agent(name: &str, recorder: Arc<dyn Recorder>) -> Agent {
    build(builder(name, 1_000).recorder(recorder))
}

fn agent_with(name: &str, stall_ms: u64) -> Agent {
    build(builder(name, stall_ms))
}

fn builder(name: &str, stall_ms: u64) -> AgentBuilder {
    let config = TransferConfig {
        stall_ms,
        ..TransferConfig::default()
    };
    Agent::builder(name).config(config).without_threads()
}

fn build(builder: AgentBuilder) -> Agent {
    builder
        .build()
        .expect("an agent without backends needs nothing")
}
