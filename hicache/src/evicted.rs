//! What has left a tier by itself, until somebody asks.

use std::collections::VecDeque;

use crate::record::RecordId;

/// As many as are kept for whoever asks, in ids.
pub(crate) const KEPT: usize = 65_536;

/// The newest [`KEPT`] records that have left: nobody has to ask, and nothing grows while nobody does.
#[derive(Debug, Default)]
pub(crate) struct Evicted(VecDeque<RecordId>);

impl Evicted {
    pub(crate) fn push(&mut self, id: RecordId) {
        if self.0.len() == KEPT {
            self.0.pop_front();
        }
        self.0.push_back(id);
    }

    /// All of them, in the order in which they left.
    pub(crate) fn take(&mut self) -> Vec<RecordId> {
        std::mem::take(&mut self.0).into()
    }
}

impl Extend<RecordId> for Evicted {
    fn extend<T: IntoIterator<Item = RecordId>>(&mut self, ids: T) {
        ids.into_iter().for_each(|id| self.push(id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::RecordKind;
    use kvgate_kvcache::identity::BlockKey;

    #[test]
    fn the_newest_are_kept_in_order() {
        let id = |n: usize| {
            let mut bytes = [0; 32];
            bytes[..8].copy_from_slice(&(n as u64).to_le_bytes());
            RecordId {
                kind: RecordKind::Block,
                key: BlockKey(bytes),
            }
        };
        let mut evicted = Evicted::default();
        evicted.extend((0..KEPT + 3).map(id));
        let ids = evicted.take();
        assert_eq!(
            (ids.len(), ids[0], ids[KEPT - 1]),
            (KEPT, id(3), id(KEPT + 2))
        );
        assert!(evicted.take().is_empty());
    }
}
