//! The peer: owns the target pools, receives flights, does what it is told.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::time::Duration;

use kvgate_transfer::bare::{Slots, View};
use kvgate_transfer::sync::{Arc, Mutex};
use kvgate_transfer::{
    Address, Agent, AgentEvent, ArrivalSink, Barrier, Deadline, MemoryRegion, PeerId,
};

use super::SCHEMA;
use super::activity::{Activity, cpu_ns};
use super::bare_stream;
use super::control::{Answer, Control, Order, Started, Watch};
use super::flights::Flights;
use super::layout::{self, Layout, PageList};
use super::options::{Backend, Load};
use super::watch::{self, Bell, Notes, WORD_BYTES, Words};
use crate::handoff::console;
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::link::{libraries, transfer_failure};

/// Where a peer lives, and who may reach it.
pub struct Home {
    /// Within one process, where the other side connects the two.
    pub agent: Option<Agent>,
    /// Where it listens.
    pub ip: IpAddr,
    /// Port of the connection that moves the bytes; 0 lets the system choose.
    pub port: u16,
    /// The measuring side is on another host: it has no view of the pools here.
    pub is_far: bool,
    /// The secret of both sides.
    pub token: Option<Vec<u8>>,
}

impl Home {
    /// On this host, for the run that has started it.
    #[must_use]
    pub fn here(agent: Option<Agent>) -> Self {
        Self {
            agent,
            ip: Ipv4Addr::LOCALHOST.into(),
            port: 0,
            is_far: false,
            token: None,
        }
    }
}

/// Serves one run. Without an end that was said, a run of another host has been lost.
pub fn run(mut control: Control, home: &Home, deadline: Duration) -> Result<(), Failure> {
    let order = control.next_order()?;
    let Some(Order::Start { backend, layout }) = order else {
        return ended(home, order.is_none());
    };
    let mut target = match Target::start(backend, layout, home, deadline) {
        Ok((target, started)) => {
            control.answer(&Answer::Started(started))?;
            target
        }
        Err(failure) => {
            control.answer(&Answer::Failed(failure.clone()))?;
            return match home.is_far {
                true => Err(failure),
                false => Ok(()),
            };
        }
    };
    while let Some(order) = control.next_order()? {
        if let Order::End = order {
            return control.answer(&Answer::Done);
        }
        let seen = |answer: &Answer| control.answer(answer);
        let answer = target.obey(order, seen).unwrap_or_else(Answer::Failed);
        control.answer(&answer)?;
    }
    ended(home, true)
}

/// A peer process ends with its control socket; a host must not.
fn ended(home: &Home, is_lost: bool) -> Result<(), Failure> {
    match (home.is_far, is_lost) {
        (false, _) => Ok(()),
        (true, true) => Err(Failure::new(
            FailureKind::PeerLost,
            "the measuring side was lost",
        )),
        (true, false) => Err(Failure::new(
            FailureKind::SchemaMismatch,
            "the measuring side did not begin with a start",
        )),
    }
}

struct Target {
    flights: Option<Flights>,
    barrier: Option<Arc<Barrier>>,
    notes: Arc<Notes>,
    bell: Bell,
    words: Words,
    agent: Agent,
    layout: Layout,
    /// Where the bare loops are served.
    ip: IpAddr,
    /// The path that was asked for.
    backend: Backend,
    #[cfg(any(feature = "ucx", feature = "libfabric"))]
    bare_server: Option<super::bare_library::Server>,
    /// Of a measuring side that cannot reach the memory here.
    lists: Vec<Slots>,
    /// The bare loop of a stream has a thread of its own.
    view: Arc<Mutex<View>>,
    _region: MemoryRegion,
    deadline: Duration,
}

impl Target {
    fn start(
        backend: Backend,
        layout: Layout,
        home: &Home,
        deadline: Duration,
    ) -> Result<(Self, Started), Failure> {
        let agent = match &home.agent {
            Some(agent) => agent.clone(),
            None => build_agent("target", home.token.clone())?,
        };
        let (view, region) = make_pools(&agent, "kvgate-bench-target", &layout)?;
        listen(&agent, backend, home)?;
        let contact = match backend {
            Backend::Local => String::new(),
            _ => agent.contact().to_string(),
        };
        let bell = Bell::new()?;
        let started = Started {
            contact,
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
            ip: home.ip,
            backend,
            #[cfg(any(feature = "ucx", feature = "libfabric"))]
            bare_server: None,
            lists: Vec::new(),
            view: Arc::new(Mutex::new(view)),
            _region: region,
            deadline,
        };
        Ok((target, started))
    }

    fn obey(
        &mut self,
        order: Order,
        seen: impl Fn(&Answer) -> Result<(), Failure>,
    ) -> Result<Answer, Failure> {
        match order {
            Order::Start { .. } => Err(Failure::internal("started twice")),
            Order::Flight {
                stages,
                chunks,
                is_noted,
            } => self.next_flight((stages, chunks), is_noted),
            Order::Activity => Ok(Answer::Activity(Activity::now())),
            Order::Cpu => Ok(Answer::Cpu { ns: cpu_ns() }),
            Order::BareStream => {
                let (port, cookie) = bare_stream::serve(self.ip, &self.view, &self.layout)?;
                Ok(Answer::BareStream { port, cookie })
            }
            Order::BareLibrary => self.serve_library(),
            Order::Lists { load, seed } => self.make_lists(&load, seed),
            Order::Fill { list, seed } => {
                let mut view = self.view.lock();
                self.list(list)?.fill(&mut view, seed);
                Ok(Answer::Done)
            }
            Order::Differing { list, seed } => {
                let view = self.view.lock();
                let pages = self.list(list)?.differing(&view, seed);
                Ok(Answer::Bad { pages })
            }
            Order::End => Ok(Answer::Done),
            Order::Watch {
                watch,
                slots,
                first_seed,
                is_answered,
            } => {
                let seen = || match is_answered {
                    true => seen(&Answer::SeenOne),
                    false => Ok(()),
                };
                self.watch(watch, &slots, first_seed, seen)
            }
        }
    }

    #[cfg(any(feature = "ucx", feature = "libfabric"))]
    fn serve_library(&mut self) -> Result<Answer, Failure> {
        use super::bare_library::Server;
        let kind = super::route::kind_of(self.backend)
            .ok_or_else(|| Failure::internal("the bare loop of no library"))?;
        // The former one has to let go of the memory first.
        self.bare_server = None;
        let (server, card) = Server::start(&self.agent, kind, self.ip, &self.view)?;
        self.bare_server = Some(server);
        Ok(Answer::BareLibrary(card))
    }

    #[cfg(not(any(feature = "ucx", feature = "libfabric")))]
    fn serve_library(&mut self) -> Result<Answer, Failure> {
        let backend = self.backend.id();
        Err(Failure::internal(format!(
            "the bare loop of {backend} is not in this build"
        )))
    }

    fn make_lists(&mut self, load: &Load, seed: u64) -> Result<Answer, Failure> {
        let view = self.view.lock();
        let there = |list: PageList| {
            let slots = self.layout.slots(&view, &list, |group| &group.there);
            slots.map_err(|error| transfer_failure(&error))
        };
        let lists = layout::lists(load, &self.layout, seed)?;
        self.lists = lists.into_iter().map(there).collect::<Result<_, _>>()?;
        Ok(Answer::Done)
    }

    fn list(&self, number: usize) -> Result<&Slots, Failure> {
        let found = self.lists.get(number);
        found.ok_or_else(|| Failure::internal(format!("no list {number}")))
    }

    fn next_flight(
        &mut self,
        (stages, chunks): (u16, u16),
        is_noted: bool,
    ) -> Result<Answer, Failure> {
        self.notes = Arc::new(Notes::new(&self.words));
        let flights = match &mut self.flights {
            Some(flights) => flights,
            None => {
                let peer = self.greet()?;
                let flights = Flights::new(&self.agent, peer, self.deadline);
                self.flights.insert(flights)
            }
        };
        let notes = is_noted.then(|| self.notes.clone() as Arc<dyn ArrivalSink>);
        let barrier = flights.next_flight(stages, chunks, notes)?;
        let epoch = barrier.epoch().0;
        self.barrier = Some(barrier);
        Ok(Answer::Armed { epoch })
    }

    /// Waits for the measuring side, and gives it the word that the pools may be read.
    fn greet(&self) -> Result<PeerId, Failure> {
        let deadline = Deadline::after(self.deadline);
        loop {
            match self.agent.next_event(deadline) {
                Some(AgentEvent::PeerUp { peer }) => {
                    let told = self.agent.send(peer, "the pools may be read");
                    told.map_err(|error| transfer_failure(&error))?;
                    return Ok(peer);
                }
                Some(AgentEvent::Refused { address, reason }) => {
                    console::note(&format!("transfer-bench: refused {address}: {reason}"));
                }
                Some(_) => {}
                None => {
                    return Err(Failure::new(
                        FailureKind::PeerLost,
                        "the measuring side did not connect",
                    ));
                }
            }
        }
    }

    fn watch(
        &mut self,
        watch: Watch,
        slots: &[u32],
        seed: u64,
        seen: impl FnMut() -> Result<(), Failure>,
    ) -> Result<Answer, Failure> {
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
            seen,
        )?;
        Ok(Answer::Seen { at_ns, bad_pages })
    }
}

/// An agent in the configuration that users get.
pub fn build_agent(name: &str, token: Option<Vec<u8>>) -> Result<Agent, Failure> {
    libraries(Agent::builder(name))
        .app_metadata(SCHEMA)
        .auth_token(token)
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

/// On the path that was asked for, or on every one that `auto` chooses from.
fn listen(agent: &Agent, backend: Backend, home: &Home) -> Result<(), Failure> {
    let name = format!("kvgate-transfer-bench-{}", std::process::id());
    let socket = SocketAddr::new(home.ip, home.port);
    let addresses = match backend {
        Backend::Local => return Ok(()),
        Backend::Tcp => vec![Address::Tcp(socket)],
        Backend::Ucx => vec![Address::Ucx(socket)],
        Backend::Libfabric => vec![Address::Libfabric(socket)],
        Backend::Cma => vec![Address::Cma(name)],
        Backend::Shm => vec![Address::Shm(name)],
        // Copies by the kernel have no bare loop towards a process that is not a child.
        Backend::Auto if home.is_far => vec![Address::Shm(name), Address::Tcp(socket)],
        Backend::Auto => {
            let cma = format!("{name}-cma");
            vec![Address::Shm(name), Address::Cma(cma), Address::Tcp(socket)]
        }
    };
    for address in &addresses {
        agent
            .listen(address)
            .map_err(|error| transfer_failure(&error))?;
    }
    Ok(())
}
