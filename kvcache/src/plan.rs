//! [`TransferPlan`]: what crosses for one request, in which pieces, from whom. Both sides compile it from
//! the same facts: the schema, the prompt length, the segments and who delivers which layers. The chunks
//! the receiver waits for and the descriptors the sender posts come from the same list (I-4).
//!
//! Pages of compressed entries go per segment, as soon as their last token is written. The window, the
//! states and the request row are final only after the last token, and go with the last segment.

use std::ops::Range;

use bytes::Bytes;
use kvgate_transfer::sync::Arc;
use kvgate_transfer::{
    Arrival, BarrierPlan, ChunkId, ChunkSpec, DescriptorList, Epoch, Incarnation, PoolId,
    SourceReady, StageId, WriterRank,
};

use crate::block_table::BlockTable;
use crate::canary::{Provenance, VerifyMode, provenance_of};
use crate::error::{Error, ErrorKind};
use crate::ids::{LayerId, Room};
use crate::lease::{SourceLease, WrittenLayer, stage_of};
use crate::pool::PoolSet;
use crate::schema::{CacheSchema, ComponentRow, PAGE_TOKENS, PoolIndex, Space};

/// The layers that one sending process delivers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriterLayers {
    /// The process.
    pub rank: WriterRank,
    /// Its layers.
    pub layers: Range<u16>,
}

/// What one completion reports: the pages of one component of one layer that one segment adds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedChunk {
    /// The pool.
    pub pool: PoolIndex,
    /// Its number inside the stage of its layer.
    pub chunk: ChunkId,
    /// The segment it goes with.
    pub segment: u32,
    /// Who sends it.
    pub writer: WriterRank,
    /// Which physical pages of the sequence, by ordinal; not empty.
    pub ordinals: Range<u32>,
}

/// The plan of one hand-off.
#[derive(Clone, Debug)]
pub struct TransferPlan {
    schema: Arc<CacheSchema>,
    prompt_tokens: u32,
    /// Ends of the segments in tokens; the last one is the prompt length.
    segment_ends: Vec<u32>,
    writers: Vec<WriterLayers>,
}

/// Where a post goes: the receiver's block table, and its pools by the receiver's names.
#[derive(Clone, Copy, Debug)]
pub struct PostTarget<'a> {
    /// The process that the names belong to.
    pub incarnation: Incarnation,
    /// Its pools, in schema order.
    pub pools: &'a [PoolId],
    /// Its slots for this request.
    pub table: &'a BlockTable,
    /// The attempt the arrival counts for.
    pub epoch: Epoch,
    /// The request.
    pub room: Room,
    /// `Off`: no provenance records travel.
    pub verify: VerifyMode,
}

/// Everything that one segment adds to one layer, ready to be posted.
///
/// The source witness comes with it, so the pages cannot be posted without one.
#[derive(Debug)]
#[must_use = "a layer that is not posted never lands"]
pub struct KvPost {
    /// Pages here and pages there, chunk by chunk.
    pub moves: Vec<PageMove>,
    /// The proof that the rows are written.
    pub source: SourceReady,
    /// Keeps the source pages while they are read. For the post's keepalive.
    pub keepalive: SourceLease,
    /// What the receiver is told when all pages are visible there.
    pub arrival: Arrival,
    local_pools: Vec<PoolId>,
    remote_pools: Vec<PoolId>,
    incarnation: Incarnation,
}

/// The pages of one chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageMove {
    /// The pool, on both sides.
    pub pool: PoolIndex,
    /// Physical pages here.
    pub from: Vec<u32>,
    /// Physical pages there, in the same order.
    pub to: Vec<u32>,
    /// Bytes of the whole pages.
    pub bytes: u64,
    /// Bytes of the live rows on them.
    pub row_bytes: u64,
}

impl TransferPlan {
    /// A plan for a prompt of `prompt_tokens` tokens.
    ///
    /// `segment_ends` are token counts: rising, all but the last a multiple of 256, the last one the
    /// prompt length. Every layer is delivered by exactly one of `writers`.
    ///
    /// # Errors
    /// `InvalidRequest` naming what does not fit.
    pub fn compile(
        schema: Arc<CacheSchema>,
        prompt_tokens: u32,
        segment_ends: Vec<u32>,
        writers: Vec<WriterLayers>,
    ) -> Result<TransferPlan, Error> {
        check_segments(prompt_tokens, &segment_ends)?;
        for layer in schema.layers() {
            let count = writers
                .iter()
                .filter(|writer| writer.layers.contains(&layer.0))
                .count();
            if count != 1 {
                let expected = format!("one writer for layer {layer}");
                return Err(invalid("writers", count as u64, expected));
            }
        }
        Ok(TransferPlan {
            schema,
            prompt_tokens,
            segment_ends,
            writers,
        })
    }

    /// The prompt length.
    pub fn prompt_tokens(&self) -> u32 {
        self.prompt_tokens
    }

    /// The ends of the segments.
    pub fn segment_ends(&self) -> &[u32] {
        &self.segment_ends
    }

    /// Tokens of one segment.
    pub fn segment_tokens(&self, segment: u32) -> Option<Range<u32>> {
        let end = *self.segment_ends.get(segment as usize)?;
        let start = segment
            .checked_sub(1)
            .map_or(0, |before| self.segment_ends[before as usize]);
        Some(start..end)
    }

    /// Who delivers a layer.
    pub fn writer_of(&self, layer: LayerId) -> Option<WriterRank> {
        self.writers
            .iter()
            .find(|writer| writer.layers.contains(&layer.0))
            .map(|writer| writer.rank)
    }

    /// Every chunk of a layer, in chunk order. A layer without a live row (the draft block after one
    /// token) has one chunk of one page, so that its gate has something to wait for.
    pub fn chunks(&self, layer: LayerId) -> Vec<PlannedChunk> {
        let Some(writer) = self.writer_of(layer) else {
            return Vec::new();
        };
        let mut chunks = Vec::new();
        for row in self.schema.rows_of(layer) {
            for segment in 0..self.segment_ends.len() as u32 {
                let ordinals = self.ordinals(row, segment);
                if ordinals.is_empty() {
                    continue;
                }
                let chunk = ChunkId(chunks.len() as u16);
                chunks.push(PlannedChunk {
                    pool: row.pool,
                    chunk,
                    segment,
                    writer,
                    ordinals,
                });
            }
        }
        if chunks.is_empty()
            && let Some(row) = self.schema.rows_of(layer).first()
        {
            let segment = self.segment_ends.len() as u32 - 1;
            let (pool, chunk, ordinals) = (row.pool, ChunkId(0), 0..1);
            chunks.push(PlannedChunk {
                pool,
                chunk,
                segment,
                writer,
                ordinals,
            });
        }
        chunks
    }

    /// The pages of one component that one segment adds.
    fn ordinals(&self, row: &ComponentRow, segment: u32) -> Range<u32> {
        let live = self.schema.live_ordinals(row, self.prompt_tokens);
        let is_last = segment as usize + 1 == self.segment_ends.len();
        if row.space != Space::Page {
            return if is_last { live } else { 0..0 };
        }
        let Some(tokens) = self.segment_tokens(segment) else {
            return 0..0;
        };
        let pages = tokens.start / PAGE_TOKENS..tokens.end.div_ceil(PAGE_TOKENS);
        live.start.max(pages.start)..live.end.min(pages.end)
    }

    /// What the receiver waits for: every chunk of every layer.
    ///
    /// # Errors
    /// `Transfer` when the engine refuses the plan.
    pub fn barrier_plan(&self) -> Result<BarrierPlan, Error> {
        let spec = |layer: LayerId, planned: PlannedChunk| ChunkSpec {
            stage: stage_of(layer),
            chunk: planned.chunk,
            writer: planned.writer,
            descriptor_count: planned.ordinals.end - planned.ordinals.start,
        };
        let chunks = |layer| {
            self.chunks(layer)
                .into_iter()
                .map(move |planned| spec(layer, planned))
        };
        let chunks = self.schema.layers().flat_map(chunks).collect();
        Ok(BarrierPlan::from_chunks(chunks)?)
    }

    /// Checks that a sequence with these slots can hold the prompt.
    ///
    /// # Errors
    /// `InvalidRequest` with the missing count.
    pub(crate) fn check_fits(&self, table: &BlockTable) -> Result<(), Error> {
        let counts = self.schema.slots_for(self.prompt_tokens);
        for space in Space::ALL {
            let found = table.slots_of(space).len() as u64;
            let needed = counts.of(space);
            if found < u64::from(needed) {
                return Err(invalid(
                    "slots",
                    found,
                    format!("{needed} {space} slots for the prompt"),
                ));
            }
        }
        Ok(())
    }

    /// What one segment adds to one layer, as seen by its writer.
    ///
    /// ```
    /// use kvgate_kvcache::{PoolSet, PostTarget, TransferPlan, WriteLease, WrittenLayer};
    /// fn can_send(plan: &TransferPlan, pools: &PoolSet, lease: &WriteLease, written: &WrittenLayer, to: &PostTarget<'_>) -> bool {
    ///     plan.post(pools, 0, written, to).is_ok()
    /// }
    /// ```
    /// The right to write a layer is no proof that it is written:
    /// ```compile_fail,E0308
    /// use kvgate_kvcache::{PoolSet, PostTarget, TransferPlan, WriteLease, WrittenLayer};
    /// fn can_send(plan: &TransferPlan, pools: &PoolSet, lease: &WriteLease, written: &WrittenLayer, to: &PostTarget<'_>) -> bool {
    ///     plan.post(pools, 0, lease, to).is_ok()
    /// }
    /// ```
    ///
    /// # Errors
    /// `NotWritten` when the witness proves too little, or for the last segment too much; `InvalidRequest` when there
    /// is no such segment, the tables are too small or the target lacks pools, `NotRegistered`.
    pub fn post(
        &self,
        pools: &PoolSet,
        segment: u32,
        written: &WrittenLayer,
        target: &PostTarget<'_>,
    ) -> Result<KvPost, Error> {
        let layer = written.layer();
        let segment_count = self.segment_ends.len() as u64;
        let Some(&needed_tokens) = self.segment_ends.get(segment as usize) else {
            return Err(invalid(
                "segment",
                segment.into(),
                format!("below {segment_count}"),
            ));
        };
        // Window and states go with the last segment: rows behind the prompt would have moved them on.
        let is_last = u64::from(segment) + 1 == segment_count;
        let written_end = written.tokens().end;
        if written_end < needed_tokens || (is_last && written_end != needed_tokens) {
            return Err(not_written(layer, needed_tokens, written));
        }
        let source = written.source().block_table();
        self.check_fits(source)?;
        self.check_fits(target.table)?;
        let local_pools = pools.pool_ids().ok_or(ErrorKind::NotRegistered)?;
        if target.pools.len() != local_pools.len() {
            let expected = format!("{} pools", local_pools.len());
            return Err(invalid("target.pools", target.pools.len() as u64, expected));
        }
        let chunks: Vec<PlannedChunk> = self
            .chunks(layer)
            .into_iter()
            .filter(|chunk| chunk.segment == segment)
            .collect();
        let moves = chunks
            .iter()
            .map(|chunk| self.page_move(chunk, source, target.table))
            .collect();
        let note = self.note(pools, &chunks, source, target);
        let tickets = chunks
            .iter()
            .map(|chunk| (StageId(layer.0), chunk.chunk))
            .collect();
        Ok(KvPost {
            moves,
            source: source_ready(written),
            keepalive: written.source().clone(),
            arrival: Arrival {
                epoch: target.epoch,
                tickets,
                note,
            },
            local_pools,
            remote_pools: target.pools.to_vec(),
            incarnation: target.incarnation,
        })
    }

    fn page_move(
        &self,
        chunk: &PlannedChunk,
        source: &BlockTable,
        target: &BlockTable,
    ) -> PageMove {
        let row = &self.schema.rows()[chunk.pool.index()];
        let pages = |table: &BlockTable| -> Vec<u32> {
            chunk
                .ordinals
                .clone()
                .map(|ordinal| table.physical_page(row, ordinal))
                .collect()
        };
        let live = chunk.ordinals.clone();
        let live =
            live.filter_map(|ordinal| self.schema.live_page(row, self.prompt_tokens, ordinal));
        PageMove {
            pool: chunk.pool,
            from: pages(source),
            to: pages(target),
            bytes: row.stride_bytes * chunk.ordinals.len() as u64,
            row_bytes: live.map(|page| page.row_bytes_live).sum(),
        }
    }

    fn note(
        &self,
        pools: &PoolSet,
        chunks: &[PlannedChunk],
        source: &BlockTable,
        target: &PostTarget<'_>,
    ) -> Bytes {
        if target.verify == VerifyMode::Off {
            return Bytes::new();
        }
        let records = |chunk: &PlannedChunk| {
            let row = &self.schema.rows()[chunk.pool.index()];
            let (room, tokens) = (target.room, self.prompt_tokens);
            provenance_of(
                pools,
                row,
                source,
                target.table,
                room,
                tokens,
                chunk.ordinals.clone(),
            )
        };
        let records: Vec<Provenance> = chunks.iter().flat_map(records).collect();
        Provenance::encode(&records)
    }
}

impl KvPost {
    /// Whether the segment adds nothing to the layer. Then there is nothing to post.
    pub fn is_empty(&self) -> bool {
        self.moves.is_empty()
    }

    /// A post to the same place with nothing in it, against the same witness.
    #[cfg(all(feature = "fault-injection", not(kv_loom)))]
    pub(crate) fn empty_like(&self, written: &WrittenLayer) -> KvPost {
        KvPost {
            moves: Vec::new(),
            source: source_ready(written),
            keepalive: self.keepalive.clone(),
            arrival: Arrival {
                epoch: self.arrival.epoch,
                tickets: Vec::new(),
                note: Bytes::new(),
            },
            local_pools: self.local_pools.clone(),
            remote_pools: self.remote_pools.clone(),
            incarnation: self.incarnation,
        }
    }

    /// Bytes of all pages.
    pub fn bytes(&self) -> u64 {
        self.moves.iter().map(|page_move| page_move.bytes).sum()
    }

    /// Bytes of the live rows.
    pub fn row_bytes(&self) -> u64 {
        self.moves.iter().map(|page_move| page_move.row_bytes).sum()
    }

    /// The two descriptor lists, here and there.
    pub fn descriptors(&self) -> (DescriptorList, DescriptorList) {
        let mut local = DescriptorList::new();
        let mut remote = DescriptorList::remote(self.incarnation);
        for page_move in &self.moves {
            local.push(self.local_pools[page_move.pool.index()], &page_move.from);
            remote.push(self.remote_pools[page_move.pool.index()], &page_move.to);
        }
        (local, remote)
    }
}

fn check_segments(prompt_tokens: u32, ends: &[u32]) -> Result<(), Error> {
    let mut start = 0;
    for (index, &end) in ends.iter().enumerate() {
        let is_last = index + 1 == ends.len();
        if end <= start {
            return Err(invalid(
                "segment_ends",
                end.into(),
                format!("more than {start}"),
            ));
        }
        if !is_last && end % PAGE_TOKENS != 0 {
            return Err(invalid(
                "segment_ends",
                end.into(),
                format!("a multiple of {PAGE_TOKENS}"),
            ));
        }
        start = end;
    }
    if start != prompt_tokens || start == 0 {
        let expected = format!("segments that end at the prompt length, {prompt_tokens}, above 0");
        return Err(invalid("segment_ends", start.into(), expected));
    }
    Ok(())
}

fn invalid(field: &'static str, value: u64, expected: String) -> Error {
    Error::new(ErrorKind::InvalidRequest {
        field,
        value,
        expected,
    })
}

fn not_written(layer: LayerId, needed_tokens: u32, written: &WrittenLayer) -> Error {
    let written_tokens = written.tokens().end;
    Error::new(ErrorKind::NotWritten {
        layer,
        needed_tokens,
        written_tokens,
    })
}

/// The witness that the transfer engine asks for. The one place of this crate that makes it (I-7): the
/// layer was committed by the thread that wrote it, and the caller got the witness from that thread.
fn source_ready(_written: &WrittenLayer) -> SourceReady {
    SourceReady::host_written()
}
