//! What a plan and its posts cost, apart from the bytes: the cache of a long prompt whose pools have addresses
//! and no memory, and a peer whose queue nobody runs.

use std::time::Instant;

use clap::Parser;
use kvgate_kvcache::canary::VerifyMode;
use kvgate_kvcache::{
    BlockTable, CacheSchema, MemoryKind, PoolConfig, PoolSet, PostTarget, Room, Space,
    TransferPlan, WriteLease, WriterLayers, WrittenLayer,
};
use kvgate_transfer::sync::Arc;
use kvgate_transfer::{
    Agent, Epoch, Incarnation, Op, PeerId, PoolId, PostOptions, TransferHandle, WriterRank, bare,
};
use serde::Serialize;
use serde_json::json;

use super::layout::{block_table, schema};
use super::options::ModelName;
use super::row::median;
use crate::bench::Heap;
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::link::transfer_failure;
use crate::handoff::model::cache_failure;
use crate::handoff::options::IndexK;
use crate::handoff::version;
use crate::tool::Finished;

/// Rounds; the middle one counts.
const ROUNDS: usize = 9;

/// Names the JSON object.
pub const SCHEMA: &str = "kvgate.plan-bench/1";

/// Measures what a plan and its posts cost, apart from the bytes.
#[derive(Clone, Debug, Parser)]
#[command(name = "plan-bench", version = version::LINE)]
pub struct Args {
    /// Whose cache
    #[arg(long, value_enum, default_value = "flash")]
    pub model: ModelName,
    /// Tokens of the prompt
    #[arg(long, value_name = "T", value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pub tokens: u32,
    /// Storage of the indexer keys
    #[arg(long, value_enum, value_name = "F", default_value_t)]
    pub index_k: IndexK,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// What a plan costs.
#[derive(Clone, Debug, Serialize)]
pub struct PlanReport {
    /// The model.
    pub model: &'static str,
    /// Tokens of the prompt.
    pub tokens: u32,
    /// Pages that are described.
    pub descriptors: u64,
    /// Operations that carry them: one per layer.
    pub posts: usize,
    /// The plan, and for every layer which pages go where.
    pub plan_us: f64,
    /// Checks and posts of every layer.
    pub post_us: f64,
    /// The most heap in use in between, for one descriptor.
    pub bytes_per_descriptor: f64,
    /// Rounds; the times are those of the middle one.
    pub rounds: usize,
}

/// Runs the tool.
///
/// # Errors
/// There is no cache for so many tokens, or the engine refuses a post.
pub fn run(args: &Args, heap: Heap) -> Result<Finished, Failure> {
    let report = measure(args, heap)?;
    Ok(Finished {
        json: json!({"schema": SCHEMA, "verdict": "good", "plan": report}),
        lines: vec![report.line()],
        exit_code: 0,
    })
}

/// Plans and posts everything `ROUNDS` times.
fn measure(args: &Args, heap: Heap) -> Result<PlanReport, Failure> {
    let &Args {
        model,
        tokens,
        index_k,
        ..
    } = args;
    let bench = Bench::start(schema(model, index_k)?, tokens)?;
    let spent: Vec<Spent> = (0..ROUNDS)
        .map(|_| bench.round(heap))
        .collect::<Result<_, _>>()?;
    let descriptors = spent.first().map_or(0, |spent| spent.descriptors);
    // What other threads allocate meanwhile only adds.
    let heap_bytes = spent
        .iter()
        .map(|spent| spent.heap_bytes)
        .min()
        .unwrap_or(0);
    let us = |ns: fn(&Spent) -> u64| median(spent.iter().map(|one| ns(one) as f64 / 1e3).collect());
    Ok(PlanReport {
        model: model.id(),
        tokens,
        descriptors,
        posts: bench.written.len(),
        plan_us: us(|spent| spent.plan_ns),
        post_us: us(|spent| spent.post_ns),
        bytes_per_descriptor: heap_bytes as f64 / descriptors.max(1) as f64,
        rounds: ROUNDS,
    })
}

/// What one round took.
#[derive(Clone, Copy, Default)]
struct Spent {
    plan_ns: u64,
    post_ns: u64,
    descriptors: u64,
    heap_bytes: u64,
}

/// A prompt that is written, and a peer that offers its slots in random order.
struct Bench {
    written: Vec<WrittenLayer>,
    lease: WriteLease,
    table: BlockTable,
    incarnation: Incarnation,
    remote_pools: Vec<PoolId>,
    peer: PeerId,
    schema: Arc<CacheSchema>,
    tokens: u32,
    agent: Agent,
    pools: PoolSet,
    _other: (Agent, PoolSet),
}

impl Bench {
    fn start(schema: Arc<CacheSchema>, tokens: u32) -> Result<Self, Failure> {
        let counts = schema.slots_for(tokens);
        let config = PoolConfig {
            pages: counts.of(Space::Page),
            windows: counts.of(Space::Window),
            requests: counts.of(Space::Request),
            memory: MemoryKind::Host,
        };
        let (agent, other) =
            bare::agents_without_workers().map_err(|error| transfer_failure(&error))?;
        let registered = |agent: &Agent| {
            let pools = PoolSet::over(schema.clone(), config, bare::unpopulated)?;
            pools.register(agent).map(|()| pools)
        };
        let pools = registered(&agent).map_err(|error| cache_failure(&error))?;
        let other_pools = registered(&other).map_err(|error| cache_failure(&error))?;
        let (peer, _) =
            Agent::connect_local(&agent, &other).map_err(|error| transfer_failure(&error))?;
        let info = agent
            .peer(peer)
            .ok_or_else(|| Failure::new(FailureKind::PeerLost, "the peer was lost"))?;
        let mut lease = pools
            .reserve(tokens, Room(1))
            .map_err(|error| cache_failure(&error))?;
        let written = schema
            .layers()
            .map(|layer| lease.commit_layer(layer, 0..tokens))
            .collect::<Result<_, _>>()
            .map_err(|error| cache_failure(&error))?;
        Ok(Self {
            written,
            lease,
            table: block_table(&schema, tokens, 1),
            incarnation: info.incarnation,
            remote_pools: info.pools.iter().map(|pool| pool.pool).collect(),
            peer,
            schema,
            tokens,
            agent,
            pools,
            _other: (other, other_pools),
        })
    }

    fn round(&self, heap: Heap) -> Result<Spent, Failure> {
        let mut spent = Spent::default();
        let begin = heap.begin();
        let began = Instant::now();
        let writers = vec![WriterLayers {
            rank: WriterRank(0),
            layers: 0..self.schema.layer_count(),
        }];
        let ends = vec![self.tokens];
        let plan = TransferPlan::compile(self.schema.clone(), self.tokens, ends, writers)
            .map_err(|error| cache_failure(&error))?;
        spent.plan_ns += began.elapsed().as_nanos() as u64;
        let mut handles = Vec::with_capacity(self.written.len());
        for layer in &self.written {
            handles.push(self.layer(&plan, layer, &mut spent)?);
        }
        spent.heap_bytes = heap.extra_since(begin);
        handles.iter().for_each(TransferHandle::cancel);
        Ok(spent)
    }

    fn layer(
        &self,
        plan: &TransferPlan,
        layer: &WrittenLayer,
        spent: &mut Spent,
    ) -> Result<TransferHandle, Failure> {
        let target = PostTarget {
            incarnation: self.incarnation,
            pools: &self.remote_pools,
            table: &self.table,
            epoch: Epoch(1),
            room: Room(1),
            verify: VerifyMode::Off,
        };
        let began = Instant::now();
        let post = plan
            .post(&self.pools, 0, layer, &target)
            .map_err(|error| cache_failure(&error))?;
        let (local, remote) = post.descriptors();
        spent.plan_ns += began.elapsed().as_nanos() as u64;
        let began = Instant::now();
        let transfer = self
            .agent
            .prepare(Op::Write, &local, &remote, self.peer)
            .map_err(|error| transfer_failure(&error))?;
        spent.descriptors += transfer.descriptor_count();
        #[allow(
            clippy::needless_update,
            reason = "the feature fault-injection adds a field"
        )]
        let options = PostOptions {
            arrival: Some(post.arrival),
            keepalive: Some(Box::new(post.keepalive)),
            ledger: Some(self.lease.ledger().clone()),
            ..PostOptions::default()
        };
        let posted = self.agent.post(&transfer, post.source, options);
        let handle = posted.map_err(|refused| transfer_failure(&refused.error))?;
        spent.post_ns += began.elapsed().as_nanos() as u64;
        Ok(handle)
    }
}

impl PlanReport {
    /// One line for people.
    #[must_use]
    pub fn line(&self) -> String {
        format!(
            "{} {} tokens: {} descriptors in {} posts, plan {:.0} us, post {:.0} us, {:.1} bytes a descriptor",
            self.model,
            self.tokens,
            self.descriptors,
            self.posts,
            self.plan_us,
            self.post_us,
            self.bytes_per_descriptor
        )
    }
}
