//! How large the pools of a side are.

use kvgate_kvcache::{CacheSchema, ComponentRow, Space};

use super::options::{HostOptions, PoolPages, PromptOptions};

/// Pool bytes that a decode side without a launcher takes at the most when it does not know yet what a
/// prefill side will ask for.
const UNKNOWN_LIMIT_BYTES: u64 = 512 << 20;
/// Requests in flight that such a side expects.
const UNKNOWN_CONCURRENCY: u32 = 16;

/// Usable slots of the three spaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolSize {
    /// Logical pages.
    pub pages: u32,
    /// Window slots.
    pub windows: u32,
    /// Request slots.
    pub requests: u32,
}

/// Logical pages of one request.
#[must_use]
pub fn pages_per_request(schema: &CacheSchema, tokens: u32, steps: u32) -> u32 {
    schema
        .slots_for(tokens.saturating_add(steps))
        .of(Space::Page)
}

/// The pools of a decode side for requests of a known length. A planted late write needs pools without
/// any slack, so that pages change owner at once.
#[must_use]
pub fn receiver(
    options: &HostOptions,
    schema: &CacheSchema,
    tokens: u32,
    prompt: &PromptOptions,
) -> PoolSize {
    let is_tight = options
        .fault
        .as_ref()
        .is_some_and(|fault| fault.kind.is_late_write());
    known(options, schema, tokens, prompt, is_tight)
}

/// The pools of a prefill side for requests of a known length.
#[must_use]
pub fn sender(
    options: &HostOptions,
    schema: &CacheSchema,
    tokens: u32,
    prompt: &PromptOptions,
) -> PoolSize {
    known(options, schema, tokens, prompt, false)
}

/// A request that was aborted keeps its slots for a while, so `auto` has room for one more than are in
/// flight, unless the pools are to be tight.
fn known(
    options: &HostOptions,
    schema: &CacheSchema,
    tokens: u32,
    prompt: &PromptOptions,
    is_tight: bool,
) -> PoolSize {
    let one = schema.slots_for(tokens.saturating_add(prompt.steps));
    let most = prompt.concurrency.saturating_add(u32::from(!is_tight));
    let pages = match options.pool_pages {
        PoolPages::Pages(pages) => pages,
        PoolPages::Auto => one.of(Space::Page).saturating_mul(most),
    };
    // With pages to spare, aborted requests may hold many slots of the other spaces for a while.
    let holders = if is_tight {
        most
    } else {
        most.saturating_add(8)
    };
    PoolSize {
        pages,
        windows: one
            .of(Space::Window)
            .saturating_mul(holders)
            .min(pages)
            .max(one.of(Space::Window)),
        requests: holders.min(pages).max(1),
    }
}

/// The pools of a decode side that hears of the prompt later: one prompt as long as the model allows,
/// or as much as fits into a limit.
#[must_use]
pub fn unknown(options: &HostOptions, schema: &CacheSchema, context_tokens: u32) -> PoolSize {
    let one = schema.slots_for(context_tokens);
    let size = |pages: u32| PoolSize {
        pages,
        windows: one
            .of(Space::Window)
            .saturating_mul(UNKNOWN_CONCURRENCY)
            .min(pages)
            .max(one.of(Space::Window)),
        requests: UNKNOWN_CONCURRENCY.min(pages),
    };
    match options.pool_pages {
        PoolPages::Pages(pages) => size(pages),
        PoolPages::Auto => {
            let mut pages = one.of(Space::Page).saturating_mul(2);
            while pages > UNKNOWN_CONCURRENCY
                && pool_bytes(schema, size(pages)) > UNKNOWN_LIMIT_BYTES
            {
                pages -= pages / 8;
            }
            size(pages)
        }
    }
}

/// Bytes of the pools of one side, null pages included.
#[must_use]
pub fn pool_bytes(schema: &CacheSchema, size: PoolSize) -> u64 {
    let slots = |space| match space {
        Space::Page => size.pages,
        Space::Window => size.windows,
        Space::Request => size.requests,
    };
    let row_bytes = |row: &ComponentRow| {
        (u64::from(slots(row.space)) + 1) * u64::from(row.pages_per_slot) * row.stride_bytes
    };
    schema.rows().iter().map(row_bytes).sum()
}

#[cfg(test)]
mod tests {
    use kvgate_kvcache::{Formats, V4Geometry};

    use super::*;
    use crate::handoff::options::tests::{host, prompt};

    fn schema() -> CacheSchema {
        CacheSchema::deepseek_v4(&V4Geometry::flash(), &Formats::default()).unwrap()
    }

    #[test]
    fn auto_carries_what_is_in_flight_and_a_given_number_is_kept() {
        let schema = schema();
        let one = receiver(&host(), &schema, 300, &prompt());
        assert!(one.pages >= 2 * pages_per_request(&schema, 300, 8));
        let given = HostOptions {
            pool_pages: PoolPages::Pages(40),
            ..host()
        };
        let many = PromptOptions {
            concurrency: 16,
            ..prompt()
        };
        let size = receiver(&given, &schema, 300, &many);
        assert_eq!(size.pages, 40);
        assert!(size.windows >= 32 && size.requests >= 16, "{size:?}");
    }

    #[test]
    fn an_unknown_run_stays_within_its_limit() {
        let size = unknown(&host(), &schema(), 1 << 20);
        assert!(
            pool_bytes(&schema(), size) <= UNKNOWN_LIMIT_BYTES,
            "{size:?}"
        );
    }
}
