//! The peer: owns the target pools, receives flights, does what it is told.

use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use kvgate_transfer::{
    Address, Agent, AgentEvent, Barrier, BarrierPlan, ChunkId, ChunkSpec, Deadline, Epoch,
    Expectation, Memory, MemoryRegion, PeerId, StageId, WriterRank, bare,
};
use rustix::time::{ClockId, clock_gettime};

use super::bare_stream;
use super::control::{Answer, CHUNKS, Control, Order, Started};
use super::layout::Layout;
use super::options::Backend;
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::link::transfer_failure;

/// The one writer of every flight.
pub const RANK: WriterRank = WriterRank(0);

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
        let answer = target.obey(&order).unwrap_or_else(Answer::Failed);
        control.answer(&answer)?;
    }
    Ok(())
}

struct Target {
    agent: Agent,
    layout: Layout,
    memory: Arc<Memory>,
    _region: MemoryRegion,
    deadline: Duration,
    /// Who connected; known with the first flight.
    peer: Option<PeerId>,
    epoch: u64,
    flight: Option<Expectation>,
}

impl Target {
    fn start(
        backend: Backend,
        layout: Layout,
        agent: Option<Agent>,
        deadline: Duration,
    ) -> Result<(Self, Started), Failure> {
        let memory = Memory::shared("kvgate-bench-target", layout.memory_bytes())
            .map_err(|error| transfer_failure(&error))?;
        let memory = Arc::new(memory);
        let agent = match agent {
            Some(agent) => agent,
            None => build_agent("target")?,
        };
        let region = agent
            .register(memory.clone(), &layout.geometries())
            .map_err(|error| transfer_failure(&error))?;
        let address = listen(&agent, backend)?;
        let memory_fd = bare::file(&memory).map_or(-1, |file| file.as_raw_fd());
        let started = Started {
            address,
            pid: std::process::id(),
            memory_fd,
        };
        let target = Self {
            agent,
            layout,
            memory,
            _region: region,
            deadline,
            peer: None,
            epoch: 0,
            flight: None,
        };
        Ok((target, started))
    }

    fn obey(&mut self, order: &Order) -> Result<Answer, Failure> {
        match order {
            Order::Start { .. } => Err(Failure::internal("started twice")),
            Order::Flight { stages } => self.next_flight(*stages),
            Order::Cpu => Ok(Answer::Cpu { ns: cpu_ns() }),
            Order::BareStream => {
                let port = bare_stream::serve(&self.memory, &self.layout)?;
                Ok(Answer::BareStream { port })
            }
        }
    }

    fn next_flight(&mut self, stages: u16) -> Result<Answer, Failure> {
        let peer = self.peer()?;
        if let Some(flight) = self.flight.take() {
            let draining = flight.close();
            // The other side asks for the next flight when its operations are terminal.
            draining.writer_answered(peer, RANK);
            let quiet = draining.wait(Deadline::after(self.deadline));
            // Every flight fills the same slots, so nothing is reused against the proof.
            drop(quiet.map_err(|_| {
                Failure::new(
                    FailureKind::DeadlineExceeded,
                    "a flight did not become quiet",
                )
            })?);
        }
        self.epoch += 1;
        let chunk = |stage, chunk| ChunkSpec {
            stage: StageId(stage),
            chunk: ChunkId(chunk),
            writer: RANK,
            descriptor_count: 1,
        };
        let chunks = (0..stages).flat_map(|s| (0..CHUNKS).map(move |c| chunk(s, c)));
        let plan =
            BarrierPlan::from_chunks(chunks.collect()).map_err(|error| transfer_failure(&error))?;
        let barrier = Barrier::new(plan, Epoch(self.epoch));
        let flight = self
            .agent
            .expect(&barrier, &[(peer, RANK)], None)
            .map_err(|error| transfer_failure(&error))?;
        barrier
            .arm()
            .map_err(|error| Failure::internal(error.to_string()))?;
        self.flight = Some(flight);
        Ok(Answer::Armed { epoch: self.epoch })
    }

    fn peer(&mut self) -> Result<PeerId, Failure> {
        if let Some(peer) = self.peer {
            return Ok(peer);
        }
        match self.agent.next_event(Deadline::after(self.deadline)) {
            Some(AgentEvent::PeerUp { peer }) => Ok(*self.peer.insert(peer)),
            Some(AgentEvent::Refused { reason, .. }) => Err(Failure::internal(reason)),
            _ => Err(Failure::new(
                FailureKind::PeerLost,
                "the measuring side did not connect",
            )),
        }
    }
}

/// An agent in the configuration that users get.
pub fn build_agent(name: &str) -> Result<Agent, Failure> {
    Agent::builder(name)
        .build()
        .map_err(|error| transfer_failure(&error))
}

fn listen(agent: &Agent, backend: Backend) -> Result<String, Failure> {
    let address = match backend {
        Backend::Local => return Ok(String::new()),
        Backend::Tcp => Address::Tcp(([127, 0, 0, 1], 0).into()),
        _ => Address::Shm(format!("kvgate-transfer-bench-{}", std::process::id())),
    };
    let bound = agent
        .listen(&address)
        .map_err(|error| transfer_failure(&error))?;
    match bound {
        Address::Tcp(address) => Ok(address.to_string()),
        Address::Shm(name) => Ok(name),
        other => Err(Failure::internal(format!("listens on {other:?}"))),
    }
}

/// Processor time of all threads of this process.
#[must_use]
pub fn cpu_ns() -> u64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec.unsigned_abs() * 1_000_000_000 + time.tv_nsec.unsigned_abs()
}
