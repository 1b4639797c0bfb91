//! The decode side: takes requests, receives their caches, decodes behind the gates, and judges.

mod admit;
mod caches;
mod detector;
mod flight;
mod prefixes;
mod session;
mod strangers;
mod verdict;
mod worker;

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use kvgate_kvcache::PoolSet;
use kvgate_transfer::{Agent, AgentEvent};

use super::activity::Activity;
use super::endpoint::{self, Listening};
use super::failure::Failure;
use super::link;
use super::model::Host;
use super::observer::{Observer, Phase, PhaseMarkers};
use super::options::{HostOptions, OutputOptions, PromptOptions, Transport};
use super::prompt::PromptSource;
use super::reference::{ReferenceEvent, ReferenceLink};
use super::report::Report;
use super::sizing::{self, PoolSize};
use super::tally::Notes;
use super::timeline::Timeline;
use super::turns::schedule::Plan;
use super::turns::sizes::TierSizes;

/// Where the decode side waits for its peer.
#[derive(Debug)]
pub enum Listen {
    /// At a private place of this host; the launcher passes it on, and knows the run.
    Privately(Box<PromptOptions>),
    /// Where the user said.
    At(Listening),
}

/// Takes the report before the peer hears of the verdict, and says what the peer is told: the exit code
/// and the last line.
pub type Conclude<'a> = &'a mut dyn FnMut(Report, Timeline) -> (u8, String);

/// What the threads of the decode side share.
struct Side {
    options: HostOptions,
    host: Host,
    agent: Agent,
    pools: PoolSet,
    /// Pages of finished prompts; counted on in a run of conversations.
    prefixes: prefixes::Prefixes,
    size: PoolSize,
    activity: Arc<Activity>,
    markers: PhaseMarkers,
    observer: Arc<dyn Observer>,
    deadline: Duration,
    notes: Mutex<Notes>,
    found: Mutex<detector::Found>,
    decoded_tokens: AtomicU64,
}

/// What the main thread of the decode side hears.
enum Inbox {
    Agent(AgentEvent),
    Reference(ReferenceEvent),
    Worker(worker::Said),
}

/// Runs the decode side to the verdict.
pub fn run(
    options: &HostOptions,
    output: &OutputOptions,
    listen: Listen,
    reference: UnixStream,
    observer: Arc<dyn Observer>,
    conclude: Conclude<'_>,
) -> Result<(), Failure> {
    let deadline = Duration::from_millis(options.deadline_ms);
    let markers = PhaseMarkers::new(options.phase_markers);
    markers.enter(Phase::Handshake);
    let agent = link::build_agent("decode", options)?;
    let (alive, progress) = (Arc::clone(&observer), agent.clone());
    let activity = Activity::start(move || alive.alive(), move || progress.report_progress())
        .map_err(|error| Failure::internal(format!("cannot start a thread: {error}")))?;
    let loading = activity.busy();
    let host = Host::load(options)?;
    let size = pool_size(options, &listen, &host)?;
    let pools = link::make_pools(options, &host, size, &agent)?;
    drop(loading);
    let (inbox, events) = mpsc::channel();
    let is_over = Arc::new(AtomicBool::new(false));
    pump(&agent, inbox.clone(), Arc::clone(&is_over))?;
    let on_reference = inbox.clone();
    let reference = ReferenceLink::start(reference, deadline, move |event| {
        drop(on_reference.send(Inbox::Reference(event)));
    })?;
    let _reservation = start_listening(&agent, options, listen, &*observer)?;
    let side = Arc::new(Side {
        options: options.clone(),
        host,
        agent,
        prefixes: prefixes::Prefixes::new(&pools),
        pools,
        size,
        activity,
        markers,
        observer,
        deadline,
        notes: Mutex::default(),
        found: Mutex::default(),
        decoded_tokens: AtomicU64::new(0),
    });
    let ran = session::Session::new(side, output.clone(), reference, inbox).run(&events, conclude);
    is_over.store(true, Ordering::Relaxed);
    ran
}

fn pool_size(options: &HostOptions, listen: &Listen, host: &Host) -> Result<PoolSize, Failure> {
    Ok(match listen {
        Listen::Privately(prompt) => match &prompt.turns {
            Some(turns) => {
                let file = prompt.prompt_file.as_deref();
                let source = PromptSource::open(file, options.seed, host.vocab_size())?;
                let plan = Plan::of(options.seed, turns, &source);
                TierSizes::of(&host.schema, &plan, turns, prompt.concurrency).device
            }
            None => {
                let tokens = super::resolve::prompt_tokens(options, prompt, host.vocab_size())?;
                sizing::receiver(options, &host.schema, tokens, prompt)
            }
        },
        Listen::At(_) => sizing::unknown(options, &host.schema, host.context_tokens()),
    })
}

/// Moves the agent's events into the inbox.
fn pump(agent: &Agent, inbox: Sender<Inbox>, is_over: Arc<AtomicBool>) -> Result<(), Failure> {
    let agent = agent.clone();
    let body = move || {
        while !is_over.load(Ordering::Relaxed) {
            if let Some(event) = agent.next_event(link::slice())
                && inbox.send(Inbox::Agent(event)).is_err()
            {
                return;
            }
        }
    };
    thread::Builder::new()
        .name("events".to_owned())
        .spawn(body)
        .map(drop)
        .map_err(|error| Failure::internal(format!("cannot start a thread: {error}")))
}

fn start_listening(
    agent: &Agent,
    options: &HostOptions,
    listen: Listen,
    observer: &dyn Observer,
) -> Result<Listening, Failure> {
    let listening = match listen {
        Listen::Privately(_) => endpoint::private(options.transport),
        Listen::At(listening) => listening,
    };
    if options.transport == Transport::Local {
        let name = endpoint::to_text(&listening, &listening.address);
        link::wait_in_process(&name, agent);
        observer.listening(&name);
        return Ok(listening);
    }
    let bound = agent
        .listen(&listening.address)
        .map_err(|error| link::transfer_failure(&error))?;
    if options.transport == Transport::Auto {
        for address in endpoint::nearer(&bound) {
            // A way that this host does not offer is one less to choose from.
            match agent.listen(&address) {
                Ok(_) => {}
                Err(error) => tracing::warn!(%error, "not reachable at {address}"),
            }
        }
    }
    observer.listening(&endpoint::to_text(&listening, &bound));
    Ok(listening)
}

impl Side {
    /// Adds to what is reported at the end.
    fn note(&self, add: impl FnOnce(&mut Notes)) {
        add(&mut self.notes.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// One more token is decoded.
    fn count_decoded(&self) -> u64 {
        self.decoded_tokens.fetch_add(1, Ordering::Relaxed) + 1
    }
}
