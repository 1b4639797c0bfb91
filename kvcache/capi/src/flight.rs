//! Flights: what a receiver waits for, its gates, and the proof that its memory is quiet.

use std::ffi::c_char;
use std::task::Context;

use kvgate_transfer::{
    Barrier, BarrierPlan, Cause, ChunkId, ChunkSpec, Epoch, PeerId, Side, StageId, StageState,
    WriterRank,
};

use crate::agent::kv_agent;
use crate::arg::{self, Versioned};
use crate::handle::{Handle, handle};
use crate::receiving::{FlightObject, Open};
use crate::status::{Outcome, guard, kv_status};

/// A flight that this agent receives: one attempt to fill a set of slots, with one gate per stage.
///
/// Ended by `kv_flight_close` or `kv_flight_abort`; the memory may be reused once
/// `kv_flight_wait_quiet` has answered `KV_STATUS_OK`.
pub struct kv_flight {
    _opaque: (),
}

handle!(kv_flight => FlightObject, "flight");

/// One chunk that a flight waits for: what one completion of one writer reports.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct kv_chunk {
    /// The stage, below 65536. Stages are 0, 1, 2, … without a gap.
    pub stage: u32,
    /// The chunk of that stage, below 65536; 0, 1, 2, … without a gap.
    pub chunk: u32,
    /// The rank of the writer that sends it, below 65536.
    pub writer: u32,
    /// Slots that it fills; at least one.
    pub descriptor_count: u32,
}

/// A writer of a flight: which connection delivers the chunks of a rank.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct kv_writer {
    /// The connection.
    pub peer: u32,
    /// The rank, below 65536.
    pub rank: u32,
}

impl kv_writer {
    pub(crate) fn parse(&self) -> Outcome<(PeerId, WriterRank)> {
        let rank = arg::small(self.rank, "kv_writer.rank")?;
        Ok((PeerId(self.peer), WriterRank(rank)))
    }
}

/// The state of a gate.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum kv_stage_state {
    /// The flight was not armed: closed.
    NotArmed = 1,
    /// Chunks have not landed: closed.
    Pending = 2,
    /// Every chunk is visible to the thread that got this answer: open.
    Ready = 3,
    /// It will never open.
    Failed = 4,
}

/// A gate at one moment.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_stage {
    /// `sizeof(struct kv_stage)`; set it before the call.
    pub struct_bytes: u32,
    /// An `enum kv_stage_state`. Only `KV_STAGE_STATE_READY` allows reading.
    pub state: u32,
    /// Chunks that have not landed.
    pub missing: u32,
    /// Zero.
    pub reserved: u32,
}

// SAFETY: `repr(C)`, numbers, `struct_bytes` first.
unsafe impl Versioned for kv_stage {
    const NAME: &'static str = "kv_stage";
}

/// Begins to expect a flight: completions of `epoch` by these writers are weighed against these chunks.
/// Every gate is closed until `kv_flight_arm`. The receiver gives out the epoch and never uses a number
/// twice. A writer that is lost before all of its chunks have landed fails every stage at once.
///
/// `KV_STATUS_BUSY` when a flight of that epoch is not quiet yet, `KV_STATUS_PEER_DOWN`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_flight_create(
    agent: *const kv_agent,
    epoch: u64,
    chunks: *const kv_chunk,
    chunk_count: usize,
    writers: *const kv_writer,
    writer_count: usize,
    flight: *mut *mut kv_flight,
) -> kv_status {
    guard(|| {
        let agent = kv_agent::open(agent)?;
        // SAFETY: the contract of the header.
        let (chunks, writers, out) = unsafe {
            let chunks = arg::slice(chunks, chunk_count, "chunks")?;
            let writers = arg::slice(writers, writer_count, "writers")?;
            (chunks, writers, arg::out(flight, "flight")?)
        };
        let chunks = chunks.iter().map(chunk_spec).collect::<Outcome<_>>()?;
        let writers: Vec<_> = writers
            .iter()
            .map(kv_writer::parse)
            .collect::<Outcome<_>>()?;
        let barrier = Barrier::new(BarrierPlan::from_chunks(chunks)?, Epoch(epoch));
        let expectation = agent.agent.expect(&barrier, &writers, None)?;
        let flight = FlightObject::new(Open::Slots(expectation), barrier, agent.waker());
        out.set(kv_flight::create(flight));
        Ok(())
    })
}

fn chunk_spec(chunk: &kv_chunk) -> Outcome<ChunkSpec> {
    Ok(ChunkSpec {
        stage: StageId(arg::small(chunk.stage, "kv_chunk.stage")?),
        chunk: ChunkId(arg::small(chunk.chunk, "kv_chunk.chunk")?),
        writer: WriterRank(arg::small(chunk.writer, "kv_chunk.writer")?),
        descriptor_count: chunk.descriptor_count,
    })
}

/// Begins to count what arrives. Call it once, before a writer is told where to write.
///
/// `KV_STATUS_INVALID_STATE` when it was armed before, or the pools of its cache are not registered;
/// `KV_STATUS_INVALID_ARGUMENT` when they are registered with another agent than that of the flight;
/// `KV_STATUS_BUSY` when the end of their registration has begun.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_flight_arm(flight: *const kv_flight) -> kv_status {
    guard(|| kv_flight::open(flight)?.arm())
}

/// The state of one gate now. Never blocks. When it is pending, the agent's event descriptor becomes readable
/// when it may have changed; when the flight is not armed, once it is armed or ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_flight_check(
    flight: *const kv_flight,
    stage: u32,
    answer: *mut kv_stage,
) -> kv_status {
    guard(|| {
        let flight = kv_flight::open(flight)?;
        // SAFETY: the contract of the header.
        let answer = unsafe { arg::versioned_out(answer)? };
        let stage = flight.stage(stage)?;
        // Armed first: what changes after the look below is then noticed.
        let _ = flight
            .barrier
            .poll(stage, &mut Context::from_waker(&flight.waker));
        let (state, missing) = match flight.barrier.check(stage) {
            StageState::NotArmed => (kv_stage_state::NotArmed, flight.barrier.missing(stage)),
            StageState::Pending { missing } => (kv_stage_state::Pending, missing),
            StageState::Ready => (kv_stage_state::Ready, 0),
            StageState::Failed(_) => (kv_stage_state::Failed, flight.barrier.missing(stage)),
        };
        answer.set(kv_stage {
            struct_bytes: size_of::<kv_stage>() as u32,
            state: state as u32,
            missing,
            reserved: 0,
        });
        Ok(())
    })
}

/// Waits until the gate of a stage is open, at most `timeout_ms`; 0 only looks.
///
/// `KV_STATUS_OK`: every byte of the stage is visible to this thread. `KV_STATUS_FAILED` with the cause, for
/// good. `KV_STATUS_NOT_ARMED`. `KV_STATUS_TIMED_OUT`: the gate is as it was.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_flight_wait(
    flight: *const kv_flight,
    stage: u32,
    timeout_ms: u64,
) -> kv_status {
    guard(|| {
        let flight = kv_flight::open(flight)?;
        let stage = flight.stage(stage)?;
        flight.wait(stage, timeout_ms)
    })
}

/// Ends the flight after use. A writer whose chunks have all landed is quiet; the others have to answer
/// (`kv_flight_writer_answered`) or to be proven dead. If something is missing, the gates are shut.
///
/// `KV_STATUS_INVALID_STATE` when it was ended before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_flight_close(flight: *const kv_flight) -> kv_status {
    guard(|| kv_flight::open(flight)?.end(None))
}

/// Gives the flight up: gates that miss something fail with `reason`, at once. Its memory is not free
/// by that: tell the writers, let each answer, and wait for the quiet.
///
/// `KV_STATUS_INVALID_STATE` when it was ended before.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_flight_abort(
    flight: *const kv_flight,
    reason: *const c_char,
) -> kv_status {
    guard(|| {
        let flight = kv_flight::open(flight)?;
        // SAFETY: the contract of the header.
        let reason = unsafe { arg::text(reason, "reason")? }.to_owned();
        let by = Side::Local;
        flight.end(Some(Cause::Aborted { by, reason }))
    })
}

/// Says that a peer has answered: its operations of this flight, as `rank`, have all ended.
///
/// `KV_STATUS_INVALID_ARGUMENT` when this connection is not that writer: another life of a process cannot
/// answer for a former one. `KV_STATUS_INVALID_STATE` before the flight was ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_flight_writer_answered(
    flight: *const kv_flight,
    peer: u32,
    rank: u32,
) -> kv_status {
    guard(|| {
        let flight = kv_flight::open(flight)?;
        flight.writer_answered(kv_writer { peer, rank })
    })
}

/// Waits until nobody can touch the memory of the flight any more, at most `timeout_ms`; 0 only looks.
///
/// `KV_STATUS_OK` is the right to reuse the memory, and nothing else is: `KV_STATUS_TIMED_OUT` changes nothing.
/// `KV_STATUS_INVALID_STATE` before the flight was ended.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_flight_wait_quiet(
    flight: *const kv_flight,
    timeout_ms: u64,
) -> kv_status {
    guard(|| kv_flight::open(flight)?.wait_quiet(timeout_ms))
}

/// Ends the handle; NULL is allowed. A flight that was not ended is aborted. Nobody is told any more when its
/// memory is quiet: plain slots are then lost to reuse, slots of a cache go back to their pools by
/// themselves.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_flight_release(flight: *mut kv_flight) -> kv_status {
    guard(|| {
        if let Ok(object) = kv_flight::open(flight) {
            // Whoever waits at a gate of it does not hold the flight open.
            let reason = "the flight was released".to_owned();
            let by = Side::Local;
            let _ = object.end(Some(Cause::Aborted { by, reason }));
        }
        kv_flight::release(flight)
    })
}
