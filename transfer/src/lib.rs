//! Moves pages of a KV cache between agents so that a reader never sees a byte that has not landed, and
//! a writer never hits a page that has a new owner.
//!
//! # The model
//! An [`Agent`] is one participant: it registers [`Memory`] as pools of equal slots and is connected to
//! peers. A transfer is two lists of slot numbers ([`DescriptorList`]), checked once
//! ([`Agent::prepare`]) and posted as often as needed ([`Agent::post`]). A *flight* is one attempt to
//! fill a set of pages; the receiver numbers it ([`Epoch`]), writes down every chunk it waits for
//! ([`BarrierPlan`]), arms one [`Barrier`] and tells the writers where to write. Each operation carries
//! an [`Arrival`]; when its bytes are visible at the receiver, its tickets are redeemed, and a stage
//! (a layer) opens when none is missing.
//!
//! # Three rules that are types
//! * Bytes are **sent** only against [`SourceReady`]: somebody has said what orders the producer before.
//! * Bytes are **read** only after [`Barrier::wait`] or its siblings: closed until armed, closed for good
//!   when failed, opened by [`Visibility::RemoteVisible`] and by nothing less.
//! * Memory is **reused** only against [`Quiesced`]: every operation terminal, every writer heard of or
//!   proven dead, every reading step passed. A timeout is none of these.
//!
//! *Landed* and *terminal* are two counts. An operation that failed is terminal and has not landed.
//!
//! # Threads, waiting, errors
//! Each connection has a worker and a receive thread of this crate; both sleep when idle. Futures
//! ([`TransferHandle`], [`Barrier::poll`]) need no runtime. Every blocking call takes a [`Deadline`],
//! whose passing ends the wait and changes nothing else. A full queue is back-pressure and gives the
//! arguments back. Unknown is never done and never failed: it keeps its memory.
//!
//! # Example
//! ```
//! use kvgate_transfer::{sync::Arc, *};
//!
//! let (prefill, decode) = (Agent::builder("prefill").build()?, Agent::builder("decode").build()?);
//! // Two pools of four slots of 64 bytes.
//! let pool = PoolGeometry { offset_bytes: 0, stride_bytes: 64, slot_bytes: 64, slot_count: 4 };
//! let mut source = Memory::host(256)?;
//! source.write_at(2 * 64, &[7; 64])?;
//! let source = prefill.register(Arc::new(source), &[pool])?;
//! let target = decode.register(Arc::new(Memory::host(256)?), &[pool])?;
//! let (to_decode, from_prefill) = Agent::connect_local(&prefill, &decode)?;
//!
//! // The receiver writes down what it waits for, before anybody may write.
//! let (stage, chunk, writer) = (StageId(0), ChunkId(0), WriterRank(0));
//! let plan = BarrierPlan::from_chunks(vec![ChunkSpec { stage, chunk, writer, descriptor_count: 1 }])?;
//! let barrier = Barrier::new(plan, Epoch(1));
//! let flight = decode.expect(&barrier, &[(from_prefill, writer)], None)?;
//! barrier.arm()?;
//!
//! // The sender moves its slot 2 into the receiver's slot 3.
//! let peer = prefill.peer(to_decode).expect("connected above");
//! let (mut local, mut remote) = (DescriptorList::new(), DescriptorList::remote(peer.incarnation));
//! local.push(source.pools()[0], &[2]);
//! remote.push(peer.pools[0].pool, &[3]);
//! let transfer = prefill.prepare(Op::Write, &local, &remote, to_decode)?;
//! let arrival = Arrival { epoch: Epoch(1), tickets: vec![(stage, chunk)], note: Default::default() };
//! let options = PostOptions { arrival: Some(arrival), ..Default::default() };
//! let handle = prefill.post(&transfer, SourceReady::host_written(), options)?;
//!
//! // The gate opens when the bytes are there; the memory is free again against the proof.
//! barrier.wait(stage, Deadline::after_ms(5_000))?;
//! assert!(matches!(handle.wait(Deadline::after_ms(5_000)), Status::Done(Visibility::RemoteVisible)));
//! let proof: Quiesced = flight.close().wait(Deadline::after_ms(5_000)).expect("everything has landed");
//! assert_eq!(proof.epoch(), Epoch(1));
//! # drop(target);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Features
//! `metrics`: what happened, as Prometheus text ([`Agent`]`::metrics_text`). `status`: [`Agent`]`::serve_status` answers
//! on a Unix socket what is in flight, as JSON. `tracing`: every [`Event`] also goes to the `tracing` crate. `sim`: the seeded simulation (`sim` module),
//! for tests of everything above. `ucx`, `libfabric`: backends over these libraries, which are loaded when
//! they are asked for. `fault-injection`: hidden switches that break the guards, for tests of the
//! detectors. `bare`: hidden loops without an engine, for benchmarks. `fuzzing`: hidden entries for the
//! targets in `fuzz/`. Under `--cfg kv_loom` the crate compiles for
//! the model checker, without backends. Linux only.

#![deny(unsafe_code, missing_docs)]

#[cfg(not(target_os = "linux"))]
compile_error!("kvgate-transfer needs Linux: memfd, pidfd and SCM_RIGHTS");

mod agent;
// Public to the models of loom-tests.
#[cfg(kv_loom)]
#[doc(hidden)]
pub mod attend;
#[cfg(not(kv_loom))]
#[allow(unreachable_pub)]
mod attend;
// The seam is public to the models of loom-tests and private otherwise: a foreign link could claim
// arrivals that never happened.
#[cfg(kv_loom)]
pub mod backend;
#[cfg(not(kv_loom))]
#[allow(unreachable_pub)]
mod backend;
mod barrier;
mod config;
mod deadline;
mod desc;
mod engine;
mod error;
#[cfg(all(feature = "fault-injection", not(kv_loom)))]
#[doc(hidden)]
pub mod fault;
#[cfg(not(all(feature = "fault-injection", not(kv_loom))))]
mod fault;
#[cfg(all(feature = "fuzzing", not(kv_loom)))]
#[doc(hidden)]
pub mod fuzz {
    //! What a fuzzer calls.

    pub use crate::agent::fuzz::{frame, metadata};
}
mod ids;
#[allow(unreachable_pub)] // Reachable for the models, as a field of the seam.
mod landed;
#[allow(unsafe_code)]
#[cfg_attr(kv_loom, allow(dead_code))]
mod mem;
mod obs;
mod op;
mod priority;
#[cfg(all(feature = "sim", not(kv_loom)))]
pub mod sim {
    //! The seeded simulation: agents on one thread and a virtual clock.

    pub use crate::backend::sim::{Death, SimCounts, SimFaults, SimNet};
}
mod source;
mod stall;
mod status;
mod stopwatch;
mod stream;
#[doc(hidden)]
pub mod sync;
mod visibility;

#[cfg(kv_loom)]
pub use agent::ModelPeer;
#[cfg(all(feature = "etcd", not(kv_loom)))]
mod etcd;

#[cfg(not(kv_loom))]
pub use agent::{Address, Contact, HostId, PathChoice};
pub use agent::{
    Agent, AgentBuilder, AgentEvent, Arrival, Draining, Expectation, MemoryRegion, PeerInfo,
    PeerState, PostError, PostOptions, RemotePoolInfo,
};
pub use backend::BackendKind;
#[cfg(all(feature = "bare", feature = "one-sided", not(kv_loom)))]
#[doc(hidden)]
pub use backend::rma::bare::{BareCard, BareLibrary};
pub use barrier::{
    Barrier, BarrierError, BarrierPlan, ChunkSpec, LateCounts, Redeemed, StageSel, StageState,
};
#[cfg(not(kv_loom))]
#[doc(hidden)]
pub use barrier::{BarrierCost, barrier_cost};
#[cfg(all(feature = "libfabric", not(kv_loom)))]
pub use config::LibfabricConfig;
pub use config::TransferConfig;
#[cfg(all(feature = "ucx", not(kv_loom)))]
pub use config::UcxConfig;
pub use deadline::Deadline;
pub use desc::DescriptorList;
#[cfg(kv_loom)]
#[doc(hidden)]
pub use engine::queue::model as turn_model;
#[cfg(kv_loom)]
#[doc(hidden)]
pub use engine::session as session_model;
pub use engine::{
    ArrivalSink, FlightLedger, Outstanding, PreparedTransfer, Quiesced, ShutdownReport, Status,
    TransferHandle, Unquiet,
};
pub use error::{Cause, Error, ErrorKind, PlanFault, Side, WriterFault};
#[cfg(all(feature = "etcd", not(kv_loom)))]
pub use etcd::{Etcd, Publication};
pub use ids::{
    ChunkId, Epoch, Incarnation, OpId, PeerId, PoolId, RegionId, StageId, TicketId, WriterRank,
};
#[cfg(kv_loom)]
#[doc(hidden)]
pub use landed::Landing;
pub use landed::{Landed, SlotState};
#[cfg(all(feature = "bare", not(kv_loom)))]
#[doc(hidden)]
pub use mem::bare;
#[cfg(kv_loom)]
#[doc(hidden)]
pub use mem::ring::model as ring_model;
pub use mem::{Huge, Memory, MemoryKind, MemoryOptions, PoolGeometry};
pub use obs::{Counters, Event, Recorder, RefusedField};
pub use op::Op;
pub use priority::Priority;
pub use source::SourceReady;
pub use stall::StallCause;
pub use status::{
    AgentStatus, FlightState, FlightStatus, PeerMemory, PeerStatus, RegionStatus, TransferState,
    TransferStatus, WriterStatus,
};
pub use stream::{Step, StepClock, StepId};
pub use visibility::Visibility;
