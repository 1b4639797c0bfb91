//! Plans: what crosses for one request, in which pieces, from whom.

use std::sync::Arc;

use kvgate_kvcache::{CacheSchema, TransferPlan, WriterLayers};
use kvgate_transfer::WriterRank;

use crate::arg;
use crate::cache::schema::kv_schema;
use crate::handle::{Handle, handle};
use crate::status::{Failure, Outcome, guard, kv_status};

/// What crosses for one request. Both sides make it from the same facts, so both count the same chunks.
pub struct kv_plan {
    _opaque: (),
}

pub(crate) struct PlanObject {
    pub(crate) plan: TransferPlan,
    schema: Arc<CacheSchema>,
}

impl PlanObject {
    pub(crate) fn compile(
        schema: Arc<CacheSchema>,
        prompt_tokens: u32,
        segment_ends: Vec<u32>,
        writers: Vec<WriterLayers>,
    ) -> Outcome<Self> {
        let plan = TransferPlan::compile(schema.clone(), prompt_tokens, segment_ends, writers)?;
        Ok(Self { plan, schema })
    }

    /// Whether the plan is one for pools of this schema.
    pub(crate) fn check_schema(&self, schema: &Arc<CacheSchema>) -> Outcome<()> {
        let same = Arc::ptr_eq(schema, &self.schema);
        if same || schema.fingerprint() == self.schema.fingerprint() {
            return Ok(());
        }
        let message = "the plan was made for a cache of another schema";
        Err(Failure::new(kv_status::Refused, message))
    }
}

handle!(kv_plan => PlanObject, "plan");

/// The layers that one sending process delivers.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct kv_writer_layers {
    /// The rank of the process, below 65536.
    pub rank: u32,
    /// Its first layer.
    pub first_layer: u32,
    /// The layer behind its last one.
    pub end_layer: u32,
}

/// Makes the plan for a prompt of `prompt_tokens` tokens. `segment_ends` are token counts: rising, all but
/// the last a multiple of 256, the last one the length of the prompt; a segment is what is sent of a layer
/// in one piece. Every layer is delivered by exactly one of `writers`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_plan_create(
    schema: *const kv_schema,
    prompt_tokens: u32,
    segment_ends: *const u32,
    segment_count: usize,
    writers: *const kv_writer_layers,
    writer_count: usize,
    plan: *mut *mut kv_plan,
) -> kv_status {
    guard(|| {
        let schema = kv_schema::open(schema)?;
        // SAFETY: the contract of the header.
        let (ends, writers, out) = unsafe {
            let ends = arg::slice(segment_ends, segment_count, "segment_ends")?;
            let writers = arg::slice(writers, writer_count, "writers")?;
            (ends, writers, arg::out(plan, "plan")?)
        };
        let writers = writers_of(writers)?;
        let ends = ends.to_vec();
        let made = PlanObject::compile((*schema).clone(), prompt_tokens, ends, writers)?;
        out.set(kv_plan::create(made));
        Ok(())
    })
}

pub(crate) fn writers_of(writers: &[kv_writer_layers]) -> Outcome<Vec<WriterLayers>> {
    let writer = |writer: &kv_writer_layers| {
        let first = arg::small(writer.first_layer, "kv_writer_layers.first_layer")?;
        let end = arg::small(writer.end_layer, "kv_writer_layers.end_layer")?;
        Ok(WriterLayers {
            rank: WriterRank(arg::small(writer.rank, "kv_writer_layers.rank")?),
            layers: first..end,
        })
    };
    writers.iter().map(writer).collect()
}

/// Ends the handle; NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_plan_release(plan: *mut kv_plan) -> kv_status {
    guard(|| kv_plan::release(plan))
}
