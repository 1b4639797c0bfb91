//! What a fetch asks the cost model.

use std::time::Duration;

use kvgate_kvcache::schema::PAGE_TOKENS;

use super::fetch::Plan;
use super::stack::Shared;
use super::{Candidate, Choice, CostModel};
use crate::miss::Miss;
use crate::record::{RecordShape, Verified};

/// Cuts the plan to what comes sooner from the tiers than from the model. `false` when that is nothing.
pub(super) fn weigh(shared: &Shared, plan: &mut Plan) -> bool {
    let Some(cost) = &shared.cost else {
        return true;
    };
    let choice = cost.choose(plan.known_tokens, &candidates(shared, plan));
    let mut counts = shared.counts.lock();
    let counts = &mut counts.fetches;
    match choice {
        // Counted where the fetch ends.
        Choice::Compute => return false,
        Choice::Unweighed => counts.unweighed += 1,
        Choice::Retry => counts.retried += 1,
        Choice::Load(0) => {}
        Choice::Load(index) => {
            counts.trimmed += 1;
            plan.ends.drain(..index);
            let end = plan.ends.first().map_or(0, |(end, _)| *end);
            plan.blocks.truncate(end.saturating_sub(plan.held));
        }
    }
    true
}

/// The ends that could be brought, with what each takes from which tier.
fn candidates(shared: &Shared, plan: &Plan) -> Vec<Candidate> {
    let tier_count = shared.config.tiers.len();
    let block_bytes = shared.block.payload_bytes();
    let schema = shared.host.pools().schema();
    let of = |(end, tier): &(usize, usize)| {
        let tokens = *end as u32 * PAGE_TOKENS;
        let mut bytes = vec![0; tier_count];
        let blocks = plan.blocks.iter().take(end.saturating_sub(plan.held));
        blocks.for_each(|tier| bytes[*tier] += block_bytes);
        let checkpoint = RecordShape::checkpoint(schema, PAGE_TOKENS, tokens);
        bytes[*tier] += checkpoint.map_or(0, |shape| shape.payload_bytes());
        let used = bytes.iter().zip(&shared.gates).filter(|(b, _)| **b > 0);
        let wait = used.map(|(_, gate)| gate.read_wait()).max();
        Candidate {
            tokens,
            bytes,
            wait: wait.unwrap_or(Duration::ZERO),
        }
    };
    plan.ends.iter().map(of).collect()
}

/// What a read says about its tier. A record that is not there says nothing.
pub(super) fn note_read(
    cost: &CostModel,
    tier: usize,
    outcome: &Result<Verified<'_>, Miss>,
    elapsed: Duration,
) {
    match outcome {
        Ok(record) => cost.note_read(tier, record.payload_bytes(), elapsed),
        Err(Miss::Absent) => {}
        Err(_) => cost.note_read(tier, 0, elapsed),
    }
}
