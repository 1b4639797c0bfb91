//! The measuring side: starts the peer, connects to it, and moves lists with the engine.

use std::fs::OpenOptions;
use std::net::ToSocketAddrs;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use kvgate_transfer::bare::{AwaySlots, Slots, View};
use kvgate_transfer::{
    Address, Agent, AgentEvent, Arrival, ChunkId, Deadline, DescriptorList, Epoch, Incarnation,
    MemoryRegion, Op, PeerId, PoolId, PostOptions, PreparedTransfer, SourceReady, StageId, Status,
    TransferHandle, Visibility,
};

use super::activity::{self, Activity};
use super::bare_stream::BareStream;
use super::control::{Answer, Control, Order, Started, out_of_turn};
use super::flights::Flights;
use super::layout::{Layout, PageList};
use super::options::{Backend, Direction};
use super::target;
use super::watch::{WORD_BYTES, Words};
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::link::transfer_failure;

/// The word after the program's name that makes it the peer of a run; the number of the run's process follows.
pub const SUBCOMMAND: &str = "target";

/// Stages of a flight, and chunks of each, while throughput is measured.
const STAGES: (u16, u16) = (1024, 64);

/// The other side: a process, or a thread for `local`.
#[derive(Debug)]
enum Other {
    Process(Child),
    Thread(Option<thread::JoinHandle<()>>),
}

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
    there: View,
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
    /// Starts the peer and connects to it.
    pub fn start(backend: Backend, layout: Layout, deadline: Duration) -> Result<Self, Failure> {
        let agent = target::build_agent("initiator")?;
        let (here, region) = target::make_pools(&agent, "kvgate-bench-initiator", &layout)?;
        let (ours, theirs) = UnixStream::pair().map_err(|error| start_failure(&error))?;
        let in_process = match backend {
            Backend::Local => Some(target::build_agent("target")?),
            _ => None,
        };
        let other = match in_process.clone() {
            Some(target) => start_thread(theirs, target, deadline)?,
            None => start_process(theirs)?,
        };
        let mut control = Control::new(ours, Some(deadline))?;
        let order = Order::Start {
            backend,
            layout: layout.clone(),
        };
        let started = match control.ask(&order)? {
            Answer::Started(started) => started,
            other => return Err(out_of_turn(&other)),
        };
        let there = view_of(&started, &layout)?;
        let peer = match &in_process {
            Some(target) => Agent::connect_local(&agent, target).map(|(peer, _)| peer),
            None => agent.connect(
                &address_of(backend, &started.address)?,
                Deadline::after(deadline),
            ),
        };
        let peer = peer.map_err(|error| transfer_failure(&error))?;
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

    /// Writes bytes that depend on `seed` into the source. Nothing may be in flight.
    pub fn fill_source(&mut self, direction: Direction, sides: &Sides, seed: u64) {
        match direction {
            Direction::Write => sides.here.fill(&mut self.here, seed),
            Direction::Read => sides.there.fill(&mut self.there, seed),
        }
    }

    /// How many slots of the target do not hold what [`Pair::fill_source`] has written.
    #[must_use]
    pub fn bad_slots(&self, direction: Direction, sides: &Sides, seed: u64) -> u64 {
        match direction {
            Direction::Write => sides.there.differing(&self.there, seed),
            Direction::Read => sides.here.differing(&self.here, seed),
        }
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
        self.next_flight(direction, STAGES)
    }

    /// Opens a flight where the bytes land.
    pub fn next_flight(
        &mut self,
        direction: Direction,
        (stages, chunks): (u16, u16),
    ) -> Result<(), Failure> {
        if direction == Direction::Write || self.told.is_none() {
            match self.control.ask(&Order::Flight { stages, chunks })? {
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
            Other::Process(_) => match self.control.ask(&Order::Cpu)? {
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

impl Drop for Other {
    fn drop(&mut self) {
        match self {
            Self::Process(child) => {
                // The control socket is closed: a peer that works ends by itself.
                for _ in 0..200 {
                    if !matches!(child.try_wait(), Ok(None)) {
                        return;
                    }
                    thread::sleep(Duration::from_millis(5));
                }
                let _ = child.kill();
                let _ = child.wait();
            }
            Self::Thread(handle) => {
                if let Some(handle) = handle.take() {
                    // A panic has been reported by its own hook.
                    let _ = handle.join();
                }
            }
        }
    }
}

/// The kernel ends the peer with the calling *thread*, which is the main one.
fn start_process(control: UnixStream) -> Result<Other, Failure> {
    let program = std::env::current_exe().map_err(|error| start_failure(&error))?;
    let child = Command::new(program)
        .args([SUBCOMMAND, &std::process::id().to_string()])
        .stdin(Stdio::from(OwnedFd::from(control)))
        .stdout(Stdio::null())
        .spawn()
        .map_err(|error| start_failure(&error))?;
    Ok(Other::Process(child))
}

fn start_thread(control: UnixStream, agent: Agent, deadline: Duration) -> Result<Other, Failure> {
    let body = move || {
        if let Err(failure) = target::run(control, Some(agent), deadline) {
            crate::handoff::console::note(&format!("transfer-bench: target: {failure}"));
        }
    };
    let spawned = thread::Builder::new().name("target".to_owned()).spawn(body);
    let handle = spawned.map_err(|error| start_failure(&error))?;
    Ok(Other::Thread(Some(handle)))
}

fn address_of(backend: Backend, text: &str) -> Result<Address, Failure> {
    match backend {
        Backend::Tcp => {}
        Backend::Cma => return Ok(Address::Cma(text.to_owned())),
        _ => return Ok(Address::Shm(text.to_owned())),
    }
    let found = text.to_socket_addrs().ok().and_then(|mut all| all.next());
    found
        .map(Address::Tcp)
        .ok_or_else(|| Failure::internal(format!("the peer listens on {text:?}")))
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

fn start_failure(error: &std::io::Error) -> Failure {
    Failure::internal(format!("cannot start the peer process: {error}"))
}

fn peer_lost() -> Failure {
    Failure::new(FailureKind::PeerLost, "the peer was lost")
}
