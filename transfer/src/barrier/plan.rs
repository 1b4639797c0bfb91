//! [`BarrierPlan`]: everything a flight waits for, written down before anybody is told where to write.

use std::collections::BTreeMap;

use crate::{
    error::{Error, ErrorKind, PlanFault},
    ids::{ChunkId, StageId, WriterRank},
};

/// One chunk: the descriptors that one completion of one writer reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkSpec {
    /// The gate it counts for.
    pub stage: StageId,
    /// Its number inside the stage.
    pub chunk: ChunkId,
    /// The process that sends it.
    pub writer: WriterRank,
    /// Slots it fills; at least one.
    pub descriptor_count: u32,
}

/// The set of chunks of a flight. It can be built from chunks only, never from a number, so the count a
/// gate waits for is the count of what was planned (I-4).
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "a plan is for Barrier::new"]
pub struct BarrierPlan {
    /// Per stage, per chunk: index into `writers`.
    pub(super) stages: Vec<Vec<u16>>,
    /// Each writer and the number of its chunks.
    pub(super) writers: Vec<(WriterRank, u32)>,
}

impl BarrierPlan {
    /// A plan of these chunks, in any order. Stages are 0, 1, 2, … and so are the chunks of each stage;
    /// any number of both.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidPlan`] with the first fault: an empty list, a gap, a repeat, or a chunk
    /// without descriptors.
    pub fn from_chunks(mut chunks: Vec<ChunkSpec>) -> Result<Self, Error> {
        let fault = |fault| Err(ErrorKind::InvalidPlan(fault).into());
        chunks.sort_unstable_by_key(|c| (c.stage, c.chunk));
        if chunks.is_empty() {
            return fault(PlanFault::Empty);
        }
        let mut writer_index = BTreeMap::new();
        let mut writers: Vec<(WriterRank, u32)> = Vec::new();
        let mut stages: Vec<Vec<u16>> = Vec::new();
        for c in chunks {
            let stage_index = usize::from(c.stage.0);
            if stage_index + 1 > stages.len() {
                if stage_index > stages.len() {
                    let stage = StageId(u16::try_from(stages.len()).unwrap_or(u16::MAX));
                    return fault(PlanFault::MissingStage { stage });
                }
                stages.push(Vec::new());
            }
            let (stage, chunk) = (c.stage, u32::from(c.chunk.0));
            let expected = u32::try_from(stages[stage_index].len()).unwrap_or(u32::MAX);
            if chunk < expected {
                return fault(PlanFault::DuplicateChunk { stage, chunk });
            }
            if chunk > expected {
                return fault(PlanFault::MissingChunk {
                    stage,
                    chunk: expected,
                });
            }
            if c.descriptor_count == 0 {
                return fault(PlanFault::NoDescriptors { stage, chunk });
            }
            // At most 65,536 ranks exist, so the index of the last one fits.
            let index = *writer_index.entry(c.writer).or_insert_with(|| {
                writers.push((c.writer, 0));
                (writers.len() - 1) as u16
            });
            writers[usize::from(index)].1 += 1;
            stages[stage_index].push(index);
        }
        Ok(Self { stages, writers })
    }

    /// Number of stages.
    pub fn stage_count(&self) -> u32 {
        self.stages.len() as u32
    }

    /// Number of chunks of a stage; 0 for a stage outside the plan.
    pub fn chunk_count(&self, stage: StageId) -> u32 {
        self.stages
            .get(usize::from(stage.0))
            .map_or(0, |chunks| chunks.len() as u32)
    }

    /// The writers, each with the number of its chunks.
    pub fn writers(&self) -> &[(WriterRank, u32)] {
        &self.writers
    }
}

#[cfg(all(test, not(kv_loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn chunk(stage: u16, chunk: u16, writer: u16, descriptor_count: u32) -> ChunkSpec {
        ChunkSpec {
            stage: StageId(stage),
            chunk: ChunkId(chunk),
            writer: WriterRank(writer),
            descriptor_count,
        }
    }

    fn fault_of(chunks: Vec<ChunkSpec>) -> PlanFault {
        match BarrierPlan::from_chunks(chunks).unwrap_err().kind() {
            ErrorKind::InvalidPlan(fault) => *fault,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn chunks_may_come_in_any_order() {
        let plan = BarrierPlan::from_chunks(vec![
            chunk(1, 0, 7, 1),
            chunk(0, 1, 3, 2),
            chunk(0, 0, 7, 1),
        ])
        .unwrap();
        assert_eq!(plan.stage_count(), 2);
        assert_eq!(plan.chunk_count(StageId(0)), 2);
        assert_eq!(plan.chunk_count(StageId(9)), 0);
        assert_eq!(plan.writers(), &[(WriterRank(7), 2), (WriterRank(3), 1)]);
    }

    #[test]
    fn every_fault_is_named() {
        let stage = StageId(0);
        assert_eq!(fault_of(vec![]), PlanFault::Empty);
        assert_eq!(
            fault_of(vec![chunk(1, 0, 0, 1)]),
            PlanFault::MissingStage { stage }
        );
        assert_eq!(
            fault_of(vec![chunk(0, 1, 0, 1)]),
            PlanFault::MissingChunk { stage, chunk: 0 }
        );
        assert_eq!(
            fault_of(vec![chunk(0, 0, 0, 1), chunk(0, 0, 1, 1)]),
            PlanFault::DuplicateChunk { stage, chunk: 0 }
        );
        assert_eq!(
            fault_of(vec![chunk(0, 0, 0, 0)]),
            PlanFault::NoDescriptors { stage, chunk: 0 }
        );
    }

    #[test]
    fn a_stage_may_have_all_chunks_that_an_id_can_name() {
        let chunks = (0..=u16::MAX).map(|c| chunk(0, c, 0, 1)).collect();
        let plan = BarrierPlan::from_chunks(chunks).unwrap();
        assert_eq!(plan.chunk_count(StageId(0)), 65_536);
    }
}
