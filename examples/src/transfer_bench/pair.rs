//! The measuring side: starts the peer, connects to it, and moves lists with the engine.

use std::fs::OpenOptions;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use bytes::Bytes;
use kvgate_transfer::bare::{AwaySlots, Slots, View};
use kvgate_transfer::{
    Agent, AgentEvent, Arrival, ChunkId, Contact, Deadline, DescriptorList, Epoch, ErrorKind,
    Incarnation, MemoryRegion, Op, PathChoice, PeerId, PoolId, PostOptions, PreparedTransfer,
    SourceReady, StageId, Status, TransferHandle, Visibility,
};
#[cfg(any(feature = "ucx", feature = "libfabric"))]
use kvgate_transfer::{BackendKind, BareLibrary};

use super::activity::{self, Activity};
use super::bare_stream::BareStream;
use super::control::{Answer, Control, Order, Started, out_of_turn};
use super::far::FarLink;
use super::flights::Flights;
#[cfg(feature = "fault-injection")]
use super::layout::Group;
use super::layout::{self, Layout, PageList};
use super::options::{Backend, Direction, Load};
use super::other::{Other, start_failure, start_process, start_thread};
use super::route::{Route, backend_of};
use super::target;
use super::watch::{WORD_BYTES, Words};
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::link::transfer_failure;

/// Stages of a flight, and chunks of each, while throughput is measured.
const STAGES: (u16, u16) = (1024, 64);

/// Two agents that are connected, with pools on both sides and a view of both here.
pub struct Pair {
    // The peer ends when its control socket closes, so this comes before `other`.
    control: Control,
    agent: Agent,
    peer: PeerId,
    incarnation: Incarnation,
    /// The peer's word that its pools may be read.
    told: Option<AgentEvent>,
    /// Flights of reads: they land here.
    flights: Flights,
    here: View,
    /// The peer's pools; of another host, a memory of the same shape that stands in for the plain copies.
    there: View,
    /// The path that carries the connection.
    backend: Backend,
    /// Where the peer is.
    ip: IpAddr,
    started: Started,
    layout: Layout,
    pools: Vec<PoolId>,
    remote_pools: Vec<PoolId>,
    deadline: Duration,
    epoch: Epoch,
    /// Chunks of a stage of the open flight.
    chunks: u32,
    next_ticket: u32,
    last_ticket: u32,
    _region: MemoryRegion,
    other: Other,
}

/// The slots of one list.
pub struct Sides {
    /// On this side.
    pub here: Slots,
    there: Slots,
    away: AwaySlots,
}

impl Pair {
    /// Starts the peer, or finds the one on another host, and connects to it.
    pub fn start(route: &Route, layout: Layout) -> Result<Self, Failure> {
        let (backend, deadline) = (route.backend, route.deadline);
        let token = route.far.as_ref().and_then(|far| far.token.clone());
        let agent = target::build_agent("initiator", token)?;
        let (here, region) = target::make_pools(&agent, "kvgate-bench-initiator", &layout)?;
        let in_process = match backend {
            Backend::Local => Some(target::build_agent("target", None)?),
            _ => None,
        };
        let (mut control, other, ip) = meet(route, in_process.clone())?;
        let order = Order::Start {
            backend,
            layout: layout.clone(),
        };
        let started = match control.ask(&order)? {
            Answer::Started(started) => started,
            other => return Err(out_of_turn(&other)),
        };
        let there = match other {
            Other::Far => View::shared("kvgate-bench-scratch", layout.memory_bytes(), WORD_BYTES)
                .map_err(|error| transfer_failure(&error))?,
            _ => view_of(&started, &layout)?,
        };
        let peer = match &in_process {
            Some(target) => Agent::connect_local(&agent, target)
                .map(|(peer, _)| peer)
                .map_err(|error| transfer_failure(&error))?,
            None => connect(&agent, &started, route, ip)?,
        };
        let info = agent.peer(peer).ok_or_else(peer_lost)?;
        Ok(Self {
            control,
            incarnation: info.incarnation,
            told: None,
            flights: Flights::new(&agent, peer, deadline),
            remote_pools: info.pools.iter().map(|pool| pool.pool).collect(),
            pools: region.pools().to_vec(),
            agent,
            peer,
            here,
            there,
            backend: backend_of(info.backend),
            ip,
            started,
            layout,
            deadline,
            epoch: Epoch(0),
            chunks: 1,
            next_ticket: 0,
            last_ticket: 0,
            _region: region,
            other,
        })
    }

    /// The path that carries the connection: of `auto`, the one that was chosen.
    #[must_use]
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// Whether the peer is on another host, with other memory and another clock.
    #[must_use]
    pub fn is_far(&self) -> bool {
        matches!(self.other, Other::Far)
    }

    /// Where the peer is.
    #[must_use]
    pub fn ip(&self) -> IpAddr {
        self.ip
    }

    /// Bound of every wait for the peer.
    #[must_use]
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// The lists of a load. A peer on another host makes its own sides of them.
    pub fn lists(&mut self, load: &Load, seed: u64) -> Result<Vec<PageList>, Failure> {
        if self.is_far() {
            let load = load.clone();
            self.done(&Order::Lists { load, seed })?;
        }
        layout::lists(load, &self.layout, seed)
    }

    fn done(&mut self, order: &Order) -> Result<(), Failure> {
        match self.control.ask(order)? {
            Answer::Done => Ok(()),
            other => Err(out_of_turn(&other)),
        }
    }

    /// Tells a peer on another host that the run is over. The others end with this process.
    pub fn end(&mut self) -> Result<(), Failure> {
        match self.is_far() {
            true => self.done(&Order::End),
            false => Ok(()),
        }
    }

    /// Slots of a list here and there, for the bare loops and the comparison.
    pub fn sides(&self, list: &PageList) -> Result<Sides, Failure> {
        let here = self.layout.slots(&self.here, list, |group| &group.here);
        let there = self.layout.slots(&self.there, list, |group| &group.there);
        let away = self.layout.away_slots(self.started.memory_address, list);
        match (here, there, away) {
            (Ok(here), Ok(there), Ok(away)) => Ok(Sides { here, there, away }),
            (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => {
                Err(transfer_failure(&error))
            }
        }
    }

    /// Writes bytes that depend on `seed` into the source of a list. Nothing may be in flight.
    pub fn fill_source(
        &mut self,
        direction: Direction,
        (list, sides): (usize, &Sides),
        seed: u64,
    ) -> Result<(), Failure> {
        match direction {
            Direction::Write => sides.here.fill(&mut self.here, seed),
            Direction::Read if self.is_far() => return self.done(&Order::Fill { list, seed }),
            Direction::Read => sides.there.fill(&mut self.there, seed),
        }
        Ok(())
    }

    /// How many slots of the target do not hold what [`Pair::fill_source`] has written.
    pub fn bad_slots(
        &mut self,
        direction: Direction,
        (list, sides): (usize, &Sides),
        seed: u64,
    ) -> Result<u64, Failure> {
        match direction {
            Direction::Read => Ok(sides.here.differing(&self.here, seed)),
            Direction::Write if self.is_far() => {
                match self.control.ask(&Order::Differing { list, seed })? {
                    Answer::Bad { pages } => Ok(pages),
                    other => Err(out_of_turn(&other)),
                }
            }
            Direction::Write => Ok(sides.there.differing(&self.there, seed)),
        }
    }

    /// Overwrites the first page of the target with other bytes.
    #[cfg(feature = "fault-injection")]
    pub fn damage(
        &mut self,
        direction: Direction,
        list: &PageList,
        seed: u64,
    ) -> Result<(), Failure> {
        let first = list.first().map(|group| Group {
            pools: group.pools.start..group.pools.start + 1,
            here: group.here.iter().copied().take(1).collect(),
            there: group.there.iter().copied().take(1).collect(),
        });
        let sides = self.sides(&first.into_iter().collect())?;
        match direction {
            Direction::Write => sides.there.fill(&mut self.there, !seed),
            Direction::Read => sides.here.fill(&mut self.here, !seed),
        }
        Ok(())
    }

    /// Opens the library of a path over the pools here.
    #[cfg(any(feature = "ucx", feature = "libfabric"))]
    pub fn open_library(&self, kind: BackendKind) -> Result<BareLibrary, Failure> {
        BareLibrary::open(&self.agent, kind, self.ip, &self.here)
            .map_err(|error| transfer_failure(&error))
    }

    /// The bare loop of a library moves the list. Nothing may be in flight.
    #[cfg(any(feature = "ucx", feature = "libfabric"))]
    pub fn transfer_by_library(
        &mut self,
        library: &mut BareLibrary,
        direction: Direction,
        sides: &Sides,
        deadline: Deadline,
    ) -> Result<(), Failure> {
        let here = (&mut self.here, &sides.here);
        let there = (self.started.memory_address, &sides.away);
        library
            .transfer(direction == Direction::Read, here, there, deadline)
            .map_err(|error| transfer_failure(&error))
    }

    /// One thread copies the list. Nothing may be in flight.
    pub fn copy(&mut self, direction: Direction, sides: &Sides) {
        let (here, there) = (&mut self.here, &mut self.there);
        match direction {
            Direction::Write => sides.here.copy_to(here, &sides.there, there),
            Direction::Read => sides.there.copy_to(there, &sides.here, here),
        }
    }

    /// The bare loop of a stream socket moves the list. Nothing may be in flight.
    pub fn stream(
        &mut self,
        direction: Direction,
        list: &PageList,
        sides: &Sides,
        stream: &mut BareStream,
    ) -> Result<(), Failure> {
        stream.transfer(direction, list, &mut self.here, &sides.here)
    }

    /// The kernel copies the list between the two processes. Nothing may be in flight.
    pub fn kernel_copy(&mut self, direction: Direction, sides: &Sides) -> Result<(), Failure> {
        let Other::Process(process) = &self.other else {
            return Err(Failure::internal("the peer is no other process"));
        };
        let moved = match direction {
            Direction::Write => sides.here.write_away(&self.here, &sides.away, process),
            Direction::Read => sides.here.read_away(&mut self.here, &sides.away, process),
        };
        moved.map_err(|errno| {
            Failure::new(
                FailureKind::PeerLost,
                format!("copy by the kernel: {errno}"),
            )
        })
    }

    /// Everything that a user pays for a request up to the post: lists, checks, arrival.
    pub fn post(
        &mut self,
        direction: Direction,
        list: &PageList,
    ) -> Result<TransferHandle, Failure> {
        let transfer = self.prepare(direction, list)?;
        self.post_prepared(&transfer)
    }

    /// The two lists, checked.
    pub fn prepare(
        &self,
        direction: Direction,
        list: &PageList,
    ) -> Result<PreparedTransfer, Failure> {
        let (mut local, mut remote) = (
            DescriptorList::new(),
            DescriptorList::remote(self.incarnation),
        );
        for group in list {
            let ours = self.pools.get(group.pools.clone());
            let theirs = self.remote_pools.get(group.pools.clone());
            local.push_group(ours.unwrap_or_default(), &group.here);
            remote.push_group(theirs.unwrap_or_default(), &group.there);
        }
        let op = match direction {
            Direction::Read => Op::Read,
            Direction::Write => Op::Write,
        };
        self.agent
            .prepare(op, &local, &remote, self.peer)
            .map_err(|error| transfer_failure(&error))
    }

    /// Posts a transfer with the next chunk of the open flight.
    pub fn post_prepared(
        &mut self,
        transfer: &PreparedTransfer,
    ) -> Result<TransferHandle, Failure> {
        let source = match transfer.op() {
            Op::Read => self.told.as_ref().and_then(SourceReady::announced),
            _ => Some(SourceReady::host_written()),
        };
        let source = source.ok_or_else(|| Failure::internal("the pools were not announced"))?;
        let options = self.options();
        let deadline = Deadline::after(self.deadline);
        self.agent
            .post_within(transfer, source, options, deadline)
            .map_err(|refused| transfer_failure(&refused.error))
    }

    fn options(&mut self) -> PostOptions {
        let (stage, chunk) = (
            self.next_ticket / self.chunks,
            self.next_ticket % self.chunks,
        );
        self.next_ticket += 1;
        #[allow(
            clippy::needless_update,
            reason = "the feature fault-injection adds a field"
        )]
        PostOptions {
            arrival: Some(Arrival {
                epoch: self.epoch,
                tickets: vec![(StageId(stage as u16), ChunkId(chunk as u16))],
                note: Bytes::new(),
            }),
            ..PostOptions::default()
        }
    }

    /// Waits until the bytes of a request are visible to the peer.
    pub fn wait(&self, handle: &TransferHandle) -> Result<(), Failure> {
        match handle.wait(Deadline::after(self.deadline)) {
            Status::Done(Visibility::RemoteVisible) => Ok(()),
            Status::Failed(error) => Err(transfer_failure(&error)),
            Status::InFlight => Err(Failure::new(
                FailureKind::DeadlineExceeded,
                format!(
                    "a transfer did not end within {} ms",
                    self.deadline.as_millis()
                ),
            )
            .with_field("deadline_ms", self.deadline.as_millis())),
            other => Err(Failure::new(
                FailureKind::PeerLost,
                format!("a transfer ended as {other:?}"),
            )),
        }
    }

    /// Requests that the flight still has chunks for.
    #[must_use]
    pub fn tickets(&self) -> u32 {
        self.last_ticket.saturating_sub(self.next_ticket)
    }

    /// Makes sure of `count` chunks. Nothing may be in flight.
    pub fn refill(&mut self, direction: Direction, count: u32) -> Result<(), Failure> {
        if self.tickets() >= count {
            return Ok(());
        }
        self.next_flight(direction, STAGES, false)
    }

    /// Opens a flight where the bytes land. With `is_noted` the peer notes when each arrival came.
    pub fn next_flight(
        &mut self,
        direction: Direction,
        (stages, chunks): (u16, u16),
        is_noted: bool,
    ) -> Result<(), Failure> {
        if direction == Direction::Write || self.told.is_none() {
            match self.control.ask(&Order::Flight {
                stages,
                chunks,
                is_noted,
            })? {
                Answer::Armed { epoch } => self.epoch = Epoch(epoch),
                other => return Err(out_of_turn(&other)),
            }
            self.hear_the_word()?;
        }
        if direction == Direction::Read {
            self.epoch = self.flights.next_flight(stages, chunks, None)?.epoch();
        }
        self.chunks = u32::from(chunks);
        self.next_ticket = 0;
        self.last_ticket = u32::from(stages) * self.chunks;
        Ok(())
    }

    /// The peer says with its first flight that its pools may be read.
    fn hear_the_word(&mut self) -> Result<(), Failure> {
        while self.told.is_none() {
            let event = self.agent.next_event(Deadline::after(self.deadline));
            match event.ok_or_else(peer_lost)? {
                event @ AgentEvent::Message { .. } => self.told = Some(event),
                AgentEvent::PeerDown { .. } => return Err(peer_lost()),
                _ => {}
            }
        }
        Ok(())
    }

    /// Processor time of this process, and of the peer if that is another one.
    pub fn cpu_ns(&mut self) -> Result<(u64, u64), Failure> {
        let there = match self.other {
            Other::Thread(_) => 0,
            Other::Process(_) | Other::Far => match self.control.ask(&Order::Cpu)? {
                Answer::Cpu { ns } => ns,
                other => return Err(out_of_turn(&other)),
            },
        };
        Ok((activity::cpu_ns(), there))
    }

    /// What the peer process has used so far.
    pub fn peer_activity(&mut self) -> Result<Activity, Failure> {
        match self.control.ask(&Order::Activity)? {
            Answer::Activity(activity) => Ok(activity),
            other => Err(out_of_turn(&other)),
        }
    }

    /// Where the peer is.
    #[must_use]
    pub fn started(&self) -> &Started {
        &self.started
    }

    /// The words behind the peer's pools.
    #[must_use]
    pub fn words(&self) -> Words {
        Words::new(&self.there)
    }

    /// The conversation with the peer.
    pub fn control(&mut self) -> &mut Control {
        &mut self.control
    }
}

/// The peer, and the conversation with it.
fn meet(route: &Route, agent: Option<Agent>) -> Result<(Control, Other, IpAddr), Failure> {
    if let Some(far) = &route.far {
        let (link, ip) = FarLink::connect(far, route.deadline)?;
        return Ok((Control::far(link), Other::Far, ip));
    }
    let (ours, theirs) = UnixStream::pair().map_err(|error| start_failure(&error))?;
    let other = match agent {
        Some(agent) => start_thread(theirs, agent, route.deadline)?,
        None => start_process(theirs)?,
    };
    let control = Control::new(ours, Some(route.deadline))?;
    Ok((control, other, Ipv4Addr::LOCALHOST.into()))
}

/// By the path that was asked for, or the best one.
fn connect(agent: &Agent, started: &Started, route: &Route, ip: IpAddr) -> Result<PeerId, Failure> {
    let contact: Contact = started
        .contact
        .parse()
        .map_err(|error| transfer_failure(&error))?;
    let contact = contact.advertised_at(ip);
    let deadline = Deadline::after(route.deadline);
    let connected = match contact.addresses.first() {
        // One address gives an error of its own kind.
        Some(address) if contact.addresses.len() == 1 => agent.connect(address, deadline),
        _ => agent.connect_to(&contact, PathChoice::Auto, deadline),
    };
    connected.map_err(|error| match error.kind() {
        ErrorKind::NoPath { .. } => Failure::new(FailureKind::PeerLost, error.to_string()),
        _ => transfer_failure(&error),
    })
}

/// Maps the peer's pools here, for comparisons and for the bare copy of the same bytes.
fn view_of(started: &Started, layout: &Layout) -> Result<View, Failure> {
    let path = format!("/proc/{}/fd/{}", started.pid, started.memory_fd);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .map_err(|error| start_failure(&error))?;
    View::peer(&OwnedFd::from(file), layout.memory_bytes(), WORD_BYTES)
        .map_err(|error| transfer_failure(&error))
}

fn peer_lost() -> Failure {
    Failure::new(FailureKind::PeerLost, "the peer was lost")
}
