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
    Arrival, BarrierPlan, ChunkId, ChunkSpec, Deadline, DescriptorList, Epoch, Incarnation, PoolId,
    SourceReady, StageId, WriterRank,
};

use crate::block_table::BlockTable;
use crate::canary::{Provenance, VerifyMode, provenance_of};
use crate::error::{Error, ErrorKind};
use crate::ids::{LayerId, Room};
use crate::lease::{SourceLease, WrittenLayer, stage_of};
use crate::pool::PoolSet;
use crate::prefix::{PrefixLayer, PrefixLease};
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
    /// Tokens that the receiver has already; a multiple of 256.
    start_tokens: u32,
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
        TransferPlan::compile_from(schema, 0, prompt_tokens, segment_ends, writers)
    }

    /// As [`TransferPlan::compile`], for a receiver that has the pages of the first `start_tokens` tokens
    /// already: they do not cross. The window and the states cross whole, they are those of the end.
    ///
    /// # Errors
    /// `InvalidRequest` naming what does not fit: also a start that is no multiple of 256, or one that
    /// leaves nothing to the first segment.
    pub fn compile_from(
        schema: Arc<CacheSchema>,
        start_tokens: u32,
        prompt_tokens: u32,
        segment_ends: Vec<u32>,
        writers: Vec<WriterLayers>,
    ) -> Result<TransferPlan, Error> {
        if !start_tokens.is_multiple_of(PAGE_TOKENS) {
            let expected = format!("a multiple of {PAGE_TOKENS}");
            return Err(invalid("start_tokens", start_tokens.into(), expected));
        }
        check_segments(start_tokens, prompt_tokens, &segment_ends)?;
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
            start_tokens,
            prompt_tokens,
            segment_ends,
            writers,
        })
    }

    /// Tokens whose pages the receiver has already.
    pub fn start_tokens(&self) -> u32 {
        self.start_tokens
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
        let start = segment.checked_sub(1).map_or(self.start_tokens, |before| {
            self.segment_ends[before as usize]
        });
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
        let is_prefix = table.is_prefix() && self.prompt_tokens.is_multiple_of(PAGE_TOKENS);
        for space in Space::ALL {
            let found = table.slots_of(space).len() as u64;
            let needed = match space {
                Space::Window if is_prefix => {
                    self.schema.boundary_windows(self.prompt_tokens).len() as u32
                }
                Space::Request if is_prefix => 0,
                _ => counts.of(space),
            };
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

    /// Checks that the receiver has exactly the pages that the plan leaves out.
    ///
    /// # Errors
    /// `InvalidRequest`.
    pub(crate) fn check_start(&self, held_tokens: u32) -> Result<(), Error> {
        if self.start_tokens == held_tokens {
            return Ok(());
        }
        let expected = format!("{held_tokens}, the tokens that the slots hold already");
        Err(invalid("start_tokens", self.start_tokens.into(), expected))
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
        let from = Source {
            layer,
            table: written.source().block_table(),
            ready: source_ready(written),
            keepalive: written.source().clone(),
        };
        self.assemble(pools, segment, from, target)
    }

    /// What the whole plan adds to one layer, from a prefix of the tree whose layer has landed.
    ///
    /// A plan of one segment that ends where the prefix ends; with window rows, the prefix must have
    /// its checkpoint.
    ///
    /// # Errors
    /// As [`TransferPlan::post`].
    pub fn post_prefix(
        &self,
        pools: &PoolSet,
        lease: &Arc<PrefixLease>,
        layer: LayerId,
        deadline: Deadline,
        target: &PostTarget<'_>,
    ) -> Result<KvPost, Error> {
        if self.segment_ends.len() != 1 || self.prompt_tokens != lease.block_table().tokens() {
            let expected = format!("one segment of {} tokens", lease.block_table().tokens());
            return Err(invalid("plan", self.prompt_tokens.into(), expected));
        }
        let landed = lease.layer(layer, deadline)?;
        let from = Source {
            layer,
            table: lease.block_table(),
            ready: landed_ready(&landed),
            keepalive: SourceLease::of_prefix(lease),
        };
        self.assemble(pools, 0, from, target)
    }

    fn assemble(
        &self,
        pools: &PoolSet,
        segment: u32,
        from: Source<'_>,
        target: &PostTarget<'_>,
    ) -> Result<KvPost, Error> {
        let (layer, source) = (from.layer, from.table);
        self.check_fits(source)?;
        self.check_fits(target.table)?;
        let local_pools = from.keepalive.pool_ids_in(pools)?;
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
            source: from.ready,
            keepalive: from.keepalive,
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

fn check_segments(start_tokens: u32, prompt_tokens: u32, ends: &[u32]) -> Result<(), Error> {
    let mut start = start_tokens;
    for (index, &end) in ends.iter().enumerate() {
        let is_last = index + 1 == ends.len();
        // Behind a prefix that is the whole prompt, only the window and the states are left.
        let is_tail_only = index == 0 && start_tokens > 0 && end == start;
        if end <= start && !is_tail_only {
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
    if start != prompt_tokens || start == 0 || ends.is_empty() {
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

/// Where a post comes from.
struct Source<'a> {
    layer: LayerId,
    table: &'a BlockTable,
    ready: SourceReady,
    keepalive: SourceLease,
}

/// The witness for pages of the prefix tree: a prefix is published against the witnesses of all its
/// layers, or it came in a flight whose layer has landed here (I-7).
fn landed_ready(_landed: &PrefixLayer<'_>) -> SourceReady {
    SourceReady::host_written()
}

/// The witness that the transfer engine asks for. With `landed_ready` the one place of this crate that makes it
/// (I-7): the layer was committed by the thread that wrote it, and the caller got the witness from that thread.
fn source_ready(_written: &WrittenLayer) -> SourceReady {
    SourceReady::host_written()
}
