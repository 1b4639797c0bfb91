//! The prefill side: submits requests, computes their prompts, and sends each layer of each segment as
//! soon as it is written.

mod caches;
mod compute;
mod flight;
mod outbox;
#[cfg(feature = "fault-injection")]
mod pieces;
#[cfg(feature = "fault-injection")]
mod planter;
#[cfg(not(feature = "fault-injection"))]
#[path = "no_planter.rs"]
mod planter;
mod session;
mod talk;
mod tiers;
mod turn;

use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvgate_kvcache::PoolSet;
use kvgate_transfer::{Agent, Incarnation};

use super::activity::Activity;
use super::endpoint::Target;
use super::failure::Failure;
use super::link::{self, PeerWatch};
use super::model::Host;
use super::observer::{Observer, Phase, PhaseMarkers};
use super::options::{HostOptions, PromptOptions};
use super::plan::{self, PrefillSummary, RunPlan};
use super::prompt::PromptSource;
use super::protocol::Speaker;
use super::turns::schedule;
use super::turns::sizes::TierSizes;
use super::{cancel, sizing, timeline};

use talk::Talk;
use tiers::Tiers;

/// What the decode side reports at the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    /// The exit code of the run.
    pub code: u8,
    /// The verdict line.
    pub text: String,
}

/// What the threads of the prefill side share.
struct Side {
    host: Host,
    agent: Agent,
    pools: PoolSet,
    /// Prefixes, in a run of conversations.
    tiers: Option<Tiers>,
    activity: Arc<Activity>,
    markers: PhaseMarkers,
    observer: Arc<dyn Observer>,
    watch: PeerWatch,
    peer_incarnation: Incarnation,
    speaker: Speaker,
    planter: planter::Planter,
    plan: RunPlan,
    moments: Vec<Option<cancel::CancelMoment>>,
    source: PromptSource,
    summary: Mutex<PrefillSummary>,
}

impl Side {
    /// Adds to what is told at the end.
    fn note(&self, add: impl FnOnce(&mut PrefillSummary)) {
        add(&mut self.summary.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Every page of the pools is free again.
    fn pages_conserved(&self) -> bool {
        let stats = self.pools.stats();
        let busy =
            [stats.pages, stats.windows, stats.requests].map(|space| space.owned + space.draining);
        stats.is_conserved() && busy == [0; 3]
    }
}

/// Runs the prefill side until the decode side has reported.
pub fn run(
    options: &HostOptions,
    prompt: &PromptOptions,
    target: &Target,
    observer: Arc<dyn Observer>,
) -> Result<Finish, Failure> {
    let deadline = Duration::from_millis(options.deadline_ms);
    let markers = PhaseMarkers::new(options.phase_markers);
    markers.enter(Phase::Handshake);
    let agent = link::build_agent("prefill", options)?;
    let (alive, progress) = (Arc::clone(&observer), agent.clone());
    let activity = Activity::start(move || alive.alive(), move || progress.report_progress())
        .map_err(|error| Failure::internal(format!("cannot start a thread: {error}")))?;
    let host = Host::load(options)?;
    let source = PromptSource::of(prompt, options.seed, host.vocab_size())?;
    let talk = prompt
        .turns
        .as_ref()
        .map(|turns| schedule::Plan::of(options.seed, turns, &source));
    let (tokens, size, tier_sizes) = match (&talk, &prompt.turns) {
        (Some(plan), Some(turns)) => {
            let sizes = TierSizes::of(&host.schema, plan, turns, prompt.concurrency);
            (plan.longest_prompt(), sizes.device, Some(sizes))
        }
        _ => {
            let tokens = prompt.tokens.unwrap_or(source.token_count());
            let size = sizing::sender(options, &host.schema, tokens, prompt);
            (tokens, size, None)
        }
    };
    let pools = link::make_pools(options, &host, size, &agent)?;
    let tiers = match (tier_sizes, &prompt.turns, &talk) {
        (Some(sizes), Some(turns), Some(plan)) => Some(Tiers::connect(
            &agent,
            &pools,
            &sizes,
            &turns.storage,
            plan,
        )?),
        _ => None,
    };
    let peer = link::connect(&agent, target, deadline)?;
    let plan = RunPlan {
        prefill_pid: std::process::id(),
        boot_id: plan::boot_id(),
        sent_at_us: timeline::now_us(),
        requests: prompt.requests,
        concurrency: prompt.concurrency,
        prompt_tokens: tokens,
        steps: prompt.steps,
        chunk: prompt.chunk,
        seed: options.seed,
        cancel_share: prompt.cancel_share,
        hold: prompt.hold,
        fault: options.fault.clone(),
        fed_ids: prompt.given.as_ref().map(|given| given.steps.clone()),
        conversations: prompt.turns.clone(),
    };
    let peer_incarnation = link::incarnation(&agent, peer)?;
    let side = Arc::new(Side {
        watch: PeerWatch::new(&agent, peer, deadline),
        peer_incarnation,
        speaker: Speaker {
            incarnation: agent.incarnation(),
        },
        planter: planter::Planter::new(plan.fault.as_ref(), &host, &plan)?,
        moments: cancel::draw(plan.seed, plan.requests, plan.cancel_share, plan.steps),
        host,
        agent,
        pools,
        tiers,
        activity,
        markers,
        observer,
        plan,
        source,
        summary: Mutex::default(),
    });
    let (work, flights) = mpsc::channel();
    let (tell, inbox) = mpsc::channel();
    compute::start(Arc::clone(&side), flights, tell)?;
    session::Session::new(side, work, talk.map(Talk::new)).run(&inbox)
}
