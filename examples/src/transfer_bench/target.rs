//! The peer: owns the target pools, receives flights, does what it is told.

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use kvgate_transfer::bare::{Slots, View};
use kvgate_transfer::sync::{Arc, Mutex};
use kvgate_transfer::{Address, Agent, AgentEvent, Barrier, Deadline, MemoryRegion, PeerId};

use super::activity::{Activity, cpu_ns};
use super::bare_stream;
use super::control::{Answer, Control, Order, Started, Watch};
use super::flights::Flights;
use super::layout::Layout;
use super::options::Backend;
use super::watch::{self, Bell, Notes, WORD_BYTES, Words};
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::link::transfer_failure;

/// Serves one run. `agent` is given within one process, where the other side connects the two.
pub fn run(control: UnixStream, agent: Option<Agent>, deadline: Duration) -> Result<(), Failure> {
    let mut control = Control::new(control, None)?;
    let Some(Order::Start { backend, layout }) = control.next_order()? else {
        return Ok(());
    };
    let mut target = match Target::start(backend, layout, agent, deadline) {
        Ok((target, started)) => {
            control.answer(&Answer::Started(started))?;
            target
        }
        Err(failure) => return control.answer(&Answer::Failed(failure)),
    };
    while let Some(order) = control.next_order()? {
        let answer = target.obey(order).unwrap_or_else(Answer::Failed);
        control.answer(&answer)?;
    }
    Ok(())
}

struct Target {
    flights: Option<Flights>,
    barrier: Option<Arc<Barrier>>,
    notes: Arc<Notes>,
    bell: Bell,
    words: Words,
    agent: Agent,
    layout: Layout,
    /// The bare loop of a stream has a thread of its own.
    view: Arc<Mutex<View>>,
    _region: MemoryRegion,
    deadline: Duration,
}

impl Target {
    fn start(
        backend: Backend,
        layout: Layout,
        agent: Option<Agent>,
        deadline: Duration,
    ) -> Result<(Self, Started), Failure> {
        let agent = match agent {
            Some(agent) => agent,
            None => build_agent("target")?,
        };
        let (view, region) = make_pools(&agent, "kvgate-bench-target", &layout)?;
        let address = listen(&agent, backend)?;
        let bell = Bell::new()?;
        let started = Started {
            address,
            pid: std::process::id(),
            memory_fd: view.descriptor().unwrap_or(-1),
            memory_address: view.address(),
            event_fd: bell.event.as_raw_fd(),
        };
        let words = Words::new(&view);
        let target = Self {
            flights: None,
            barrier: None,
            notes: Arc::default(),
            bell,
            words,
            agent,
            layout,
            view: Arc::new(Mutex::new(view)),
            _region: region,
            deadline,
        };
        Ok((target, started))
    }

    fn obey(&mut self, order: Order) -> Result<Answer, Failure> {
        match order {
            Order::Start { .. } => Err(Failure::internal("started twice")),
            Order::Flight { stages, chunks } => self.next_flight(stages, chunks),
            Order::Activity => Ok(Answer::Activity(Activity::now())),
            Order::Cpu => Ok(Answer::Cpu { ns: cpu_ns() }),
            Order::BareStream => {
                let port = bare_stream::serve(&self.view, &self.layout)?;
                Ok(Answer::BareStream { port })
            }
            Order::Watch {
                watch,
                slots,
                first_seed,
            } => self.watch(watch, &slots, first_seed),
        }
    }

    fn next_flight(&mut self, stages: u16, chunks: u16) -> Result<Answer, Failure> {
        self.notes = Arc::new(Notes::new(&self.words));
        let flights = match &mut self.flights {
            Some(flights) => flights,
            None => {
                let peer = self.greet()?;
                let flights = Flights::new(&self.agent, peer, self.deadline);
                self.flights.insert(flights)
            }
        };
        let barrier = flights.next_flight(stages, chunks, Some(self.notes.clone()))?;
        let epoch = barrier.epoch().0;
        self.barrier = Some(barrier);
        Ok(Answer::Armed { epoch })
    }

    /// Waits for the measuring side, and gives it the word that the pools may be read.
    fn greet(&self) -> Result<PeerId, Failure> {
        match self.agent.next_event(Deadline::after(self.deadline)) {
            Some(AgentEvent::PeerUp { peer }) => {
                let told = self.agent.send(peer, "the pools may be read");
                told.map_err(|error| transfer_failure(&error))?;
                Ok(peer)
            }
            Some(AgentEvent::Refused { reason, .. }) => Err(Failure::internal(reason)),
            _ => Err(Failure::new(
                FailureKind::PeerLost,
                "the measuring side did not connect",
            )),
        }
    }

    fn watch(&mut self, watch: Watch, slots: &[u32], seed: u64) -> Result<Answer, Failure> {
        let view = self.view.lock();
        let pool = self.layout.pools.first().map(|pool| pool.geometry());
        let pool = pool.ok_or_else(|| Failure::internal("no pool"))?;
        let page = |(slot, seed): (&u32, u64)| {
            let slots = Slots::new(&view, vec![(pool, vec![*slot])]);
            slots
                .map(|slots| (slots, seed))
                .map_err(|error| transfer_failure(&error))
        };
        let pages = slots.iter().zip(seed..).map(page);
        let pages: Vec<(Slots, u64)> = pages.collect::<Result<_, _>>()?;
        let (at_ns, bad_pages) = watch::run(
            watch,
            (&view, &pages),
            self.barrier.as_deref(),
            (&self.words, &self.bell, &self.notes),
            || Deadline::after(self.deadline),
        )?;
        Ok(Answer::Seen { at_ns, bad_pages })
    }
}

/// An agent in the configuration that users get.
pub fn build_agent(name: &str) -> Result<Agent, Failure> {
    Agent::builder(name)
        .build()
        .map_err(|error| transfer_failure(&error))
}

/// Pools, and behind them a few words for the bare wake-ups.
pub fn make_pools(
    agent: &Agent,
    name: &str,
    layout: &Layout,
) -> Result<(View, MemoryRegion), Failure> {
    let view = View::shared(name, layout.memory_bytes(), WORD_BYTES);
    let view = view.map_err(|error| transfer_failure(&error))?;
    let region = view.register(agent, &layout.geometries());
    Ok((view, region.map_err(|error| transfer_failure(&error))?))
}

fn listen(agent: &Agent, backend: Backend) -> Result<String, Failure> {
    let name = format!("kvgate-transfer-bench-{}", std::process::id());
    let address = match backend {
        Backend::Local => return Ok(String::new()),
        Backend::Tcp => Address::Tcp(([127, 0, 0, 1], 0).into()),
        Backend::Cma => Address::Cma(name),
        _ => Address::Shm(name),
    };
    let bound = agent
        .listen(&address)
        .map_err(|error| transfer_failure(&error))?;
    match bound {
        Address::Tcp(address) => Ok(address.to_string()),
        Address::Shm(name) | Address::Cma(name) => Ok(name),
        other => Err(Failure::internal(format!("listens on {other:?}"))),
    }
}
