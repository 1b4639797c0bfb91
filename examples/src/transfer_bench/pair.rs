//! The measuring side: starts the peer, connects to it, and moves lists with the engine.

use std::fs::OpenOptions;
use std::net::ToSocketAddrs;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use kvgate_transfer::bare::{Slots, View};
use kvgate_transfer::{
    Address, Agent, Arrival, ChunkId, Deadline, DescriptorList, Epoch, Incarnation, Memory,
    MemoryRegion, Op, PeerId, PoolId, PostOptions, SourceReady, StageId, Status, TransferHandle,
    Visibility,
};

use super::control::{Answer, CHUNKS, Control, Order, Started, out_of_turn};
use super::layout::{Layout, PageList};
use super::options::{Backend, Direction};
use super::target;
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::link::transfer_failure;

/// The word after the program's name that makes it the peer of a run.
pub const SUBCOMMAND: &str = "target";

/// Stages of a flight.
const STAGES: u16 = 1024;

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
    here: Arc<View>,
    there: Arc<View>,
    layout: Layout,
    pools: Vec<PoolId>,
    remote_pools: Vec<PoolId>,
    deadline: Duration,
    epoch: Epoch,
    next_ticket: u32,
    _region: MemoryRegion,
    other: Other,
}

impl Pair {
    /// Starts the peer and connects to it.
    pub fn start(backend: Backend, layout: Layout, deadline: Duration) -> Result<Self, Failure> {
        let agent = target::build_agent("initiator")?;
        let memory = Memory::shared("kvgate-bench-initiator", layout.memory_bytes())
            .map_err(|error| transfer_failure(&error))?;
        let memory = Arc::new(memory);
        let region = agent
            .register(memory.clone(), &layout.geometries())
            .map_err(|error| transfer_failure(&error))?;
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
        let there = view_of(&started, layout.memory_bytes())?;
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
            remote_pools: info.pools.iter().map(|pool| pool.pool).collect(),
            pools: region.pools().to_vec(),
            agent,
            peer,
            here: View::own(memory),
            there,
            layout,
            deadline,
            epoch: Epoch(0),
            next_ticket: u32::MAX,
            _region: region,
            other,
        })
    }

    /// Slots of a list here and there, for the bare loops and the comparison.
    pub fn views(&self, list: &PageList) -> Result<(Slots, Slots), Failure> {
        let here = self.layout.slots(&self.here, list, |group| &group.here);
        let there = self.layout.slots(&self.there, list, |group| &group.there);
        match (here, there) {
            (Ok(here), Ok(there)) => Ok((here, there)),
            (Err(error), _) | (_, Err(error)) => Err(transfer_failure(&error)),
        }
    }

    /// Everything that a user pays for a request up to the post: lists, checks, arrival.
    pub fn post(
        &mut self,
        direction: Direction,
        list: &PageList,
    ) -> Result<TransferHandle, Failure> {
        let (mut local, mut remote) = (
            DescriptorList::new(),
            DescriptorList::remote(self.incarnation),
        );
        for group in list {
            let ours = self.pools.get(group.pools.clone()).unwrap_or_default();
            let theirs = self
                .remote_pools
                .get(group.pools.clone())
                .unwrap_or_default();
            local.push_group(ours, &group.here);
            remote.push_group(theirs, &group.there);
        }
        let Direction::Write = direction else {
            return Err(no_read());
        };
        let transfer = self
            .agent
            .prepare(Op::Write, &local, &remote, self.peer)
            .map_err(|error| transfer_failure(&error))?;
        let options = self.options();
        let source = SourceReady::host_written();
        let deadline = Deadline::after(self.deadline);
        self.agent
            .post_within(&transfer, source, options, deadline)
            .map_err(|refused| transfer_failure(&refused.error))
    }

    fn options(&mut self) -> PostOptions {
        let (stage, chunk) = (
            self.next_ticket / u32::from(CHUNKS),
            self.next_ticket % u32::from(CHUNKS),
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
        (u32::from(STAGES) * u32::from(CHUNKS)).saturating_sub(self.next_ticket)
    }

    /// Makes sure of `count` chunks. Nothing may be in flight.
    pub fn refill(&mut self, count: u32) -> Result<(), Failure> {
        if self.tickets() >= count {
            return Ok(());
        }
        match self.control.ask(&Order::Flight { stages: STAGES })? {
            Answer::Armed { epoch } => {
                self.epoch = Epoch(epoch);
                self.next_ticket = 0;
                Ok(())
            }
            other => Err(out_of_turn(&other)),
        }
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
        Ok((target::cpu_ns(), there))
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

/// Why there is no read.
#[must_use]
pub fn no_read() -> Failure {
    Failure::input(
        "op",
        "read",
        "write: this build of the engine does not read",
    )
}

fn start_process(control: UnixStream) -> Result<Other, Failure> {
    let program = std::env::current_exe().map_err(|error| start_failure(&error))?;
    let child = Command::new(program)
        .arg(SUBCOMMAND)
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
    if backend != Backend::Tcp {
        return Ok(Address::Shm(text.to_owned()));
    }
    let found = text.to_socket_addrs().ok().and_then(|mut all| all.next());
    found
        .map(Address::Tcp)
        .ok_or_else(|| Failure::internal(format!("the peer listens on {text:?}")))
}

/// Maps the peer's pools here, for comparisons and for the bare copy of the same bytes.
fn view_of(started: &Started, memory_bytes: u64) -> Result<Arc<View>, Failure> {
    let path = format!("/proc/{}/fd/{}", started.pid, started.memory_fd);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .map_err(|error| start_failure(&error))?;
    View::peer(&OwnedFd::from(file), memory_bytes).map_err(|error| transfer_failure(&error))
}

fn start_failure(error: &std::io::Error) -> Failure {
    Failure::internal(format!("cannot start the peer process: {error}"))
}

fn peer_lost() -> Failure {
    Failure::new(FailureKind::PeerLost, "the peer was lost")
}
