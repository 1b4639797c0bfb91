//! Figures that are counted where something happens: how long prefixes are, and what each component came to.

use std::collections::BTreeMap;

use kvgate_kvcache::schema::PAGE_TOKENS;

#[cfg(not(kv_loom))]
use crate::record::RecordShape;

/// Buckets of [`Lengths`]: 256, 512, … 1,048,576 tokens, and more.
pub const LENGTH_BUCKETS: usize = 14;

/// How many prefixes had which length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lengths {
    /// Prefixes of at most [`Lengths::limit_tokens`] of the index and more than that of the bucket before; what is longer
    /// than the last limit is in the last bucket.
    pub buckets: [u64; LENGTH_BUCKETS],
    /// All tokens.
    pub tokens: u64,
}

impl Lengths {
    /// Longest prefix of a bucket, in tokens; `None` for the last one, which has none.
    pub fn limit_tokens(bucket: usize) -> Option<u32> {
        (bucket + 1 < LENGTH_BUCKETS).then(|| PAGE_TOKENS << bucket)
    }

    /// Counts a prefix.
    pub fn note(&mut self, tokens: u32) {
        let fits = |bucket| Lengths::limit_tokens(bucket).is_none_or(|limit| tokens <= limit);
        let bucket = (0..LENGTH_BUCKETS).find(|bucket| fits(*bucket));
        self.buckets[bucket.unwrap_or(LENGTH_BUCKETS - 1)] += 1;
        self.tokens += u64::from(tokens);
    }

    /// All prefixes.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }
}

/// What one component of the records of a tier came to, all layers together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ComponentCounts {
    /// Verified bytes that were read.
    pub read_bytes: u64,
    /// Bytes that were stored.
    pub stored_bytes: u64,
    /// Reads that its checksum turned into a miss.
    pub damaged: u64,
}

/// By the name of the component.
pub type ComponentTable = BTreeMap<&'static str, ComponentCounts>;

/// Counts the parts of a record, each where `of` says.
#[cfg(not(kv_loom))]
pub(crate) fn note_parts(
    table: &mut ComponentTable,
    shape: &RecordShape,
    of: fn(&mut ComponentCounts) -> &mut u64,
) {
    for part in shape.parts() {
        *of(table.entry(part.component.id()).or_default()) += part.length_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_is_in_the_first_bucket_that_takes_it() {
        let mut lengths = Lengths::default();
        for tokens in [256, 257, 512, 1 << 20, (1 << 20) + 256] {
            lengths.note(tokens);
        }
        assert_eq!(lengths.buckets[..2], [1, 2]);
        assert_eq!(lengths.buckets[LENGTH_BUCKETS - 2..], [1, 1]);
        assert_eq!(Lengths::limit_tokens(LENGTH_BUCKETS - 2), Some(1 << 20));
        assert_eq!(lengths.count(), 5);
        assert_eq!(lengths.tokens, 256 + 257 + 512 + (1 << 20) * 2 + 256);
    }
}
