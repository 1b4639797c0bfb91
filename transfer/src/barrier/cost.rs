//! What a gate costs, measured on barriers of its own: nobody gets the right to redeem by it.

use std::{hint::black_box, time::Instant};

use super::{Barrier, BarrierError, BarrierPlan, ChunkSpec, StageState};
use crate::{
    error::Error,
    ids::{ChunkId, Epoch, StageId, TicketId, WriterRank},
    sync::Arc,
    visibility::Visibility,
};

const STAGES: u16 = 43;
const CHUNKS: u16 = 4;
const CHECKS: u32 = 1_000;

/// Medians, in nanoseconds, over barriers of 43 stages of 4 chunks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BarrierCost {
    /// [`Barrier::check`] of a ready stage.
    pub gate_check_ns_p50: f64,
    /// One redemption, the wake-up of the last one of a stage included; one reading of the clock
    /// (measured apart) is taken off.
    pub chunk_complete_ns_p50: f64,
}

/// Measures `round_count` barriers.
///
/// # Errors
/// Those of plan and barrier, which do not occur.
pub fn barrier_cost(round_count: u64) -> Result<BarrierCost, Box<dyn std::error::Error>> {
    let (mut checks, mut completes, mut clocks) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..round_count {
        let barrier = armed(Epoch(round))?;
        for stage in (0..STAGES).map(StageId) {
            for chunk in (0..CHUNKS).map(ChunkId) {
                let ticket = TicketId {
                    epoch: Epoch(round),
                    stage,
                    chunk,
                };
                let start = Instant::now();
                let redeemed =
                    black_box(&barrier).redeem(black_box(ticket), Visibility::RemoteVisible);
                completes.push(nanoseconds(start));
                let _ = black_box(redeemed?);
                clocks.push(nanoseconds(Instant::now()));
            }
        }
        let start = Instant::now();
        for _ in 0..CHECKS {
            if black_box(&barrier).check(black_box(StageId(7))) != StageState::Ready {
                return Err(BarrierError::NotArmed.into());
            }
        }
        checks.push(nanoseconds(start) / f64::from(CHECKS));
    }
    Ok(BarrierCost {
        gate_check_ns_p50: median(checks),
        chunk_complete_ns_p50: (median(completes) - median(clocks)).max(0.0),
    })
}

fn armed(epoch: Epoch) -> Result<Arc<Barrier>, Box<dyn std::error::Error>> {
    let chunks = (0..STAGES).flat_map(|stage| {
        (0..CHUNKS).map(move |chunk| ChunkSpec {
            stage: StageId(stage),
            chunk: ChunkId(chunk),
            writer: WriterRank(0),
            descriptor_count: 1,
        })
    });
    let plan =
        BarrierPlan::from_chunks(chunks.collect()).map_err(|error: Error| Box::new(error))?;
    let barrier = Barrier::new(plan, epoch);
    barrier.arm()?;
    Ok(barrier)
}

fn nanoseconds(since: Instant) -> f64 {
    since.elapsed().as_nanos() as f64
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
