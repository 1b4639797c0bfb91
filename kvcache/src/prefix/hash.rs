//! Names of prefixes: a chain of hashes, so that a block's name says everything before it too.

use sha2::{Digest, Sha256};

use crate::fingerprint::Fingerprint;
use crate::schema::PAGE_TOKENS;

/// The name of one full page of tokens behind a certain prefix, in one schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId([u8; 32]);

impl BlockId {
    /// The name of the empty prefix. The fingerprint keeps caches of other schemas apart.
    pub(crate) fn root(fingerprint: &Fingerprint) -> BlockId {
        BlockId(*fingerprint)
    }

    /// The name of this prefix with one page of tokens more.
    pub(crate) fn child(&self, tokens: &[u32]) -> BlockId {
        let mut hasher = Sha256::new();
        hasher.update(self.0);
        for token in tokens {
            hasher.update(token.to_le_bytes());
        }
        BlockId(hasher.finalize().into())
    }
}

/// The names of all full pages of a token sequence, in order.
pub(crate) fn blocks_of(root: BlockId, tokens: &[u32]) -> Vec<BlockId> {
    let mut parent = root;
    let pages = tokens.chunks_exact(PAGE_TOKENS as usize);
    pages
        .map(|page| {
            parent = parent.child(page);
            parent
        })
        .collect()
}

#[cfg(all(test, not(kv_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_name_covers_everything_before_it() {
        let root = BlockId::root(&[1; 32]);
        let tokens: Vec<u32> = (0..600).collect();
        let names = blocks_of(root, &tokens);
        assert_eq!(names.len(), 2, "the open page has no name");
        let mut other = tokens.clone();
        other[0] += 1;
        let others = blocks_of(root, &other);
        assert!(names[0] != others[0] && names[1] != others[1]);
        assert_ne!(names, blocks_of(BlockId::root(&[2; 32]), &tokens));
        assert_eq!(names[..1], blocks_of(root, &tokens[..300]));
    }
}
