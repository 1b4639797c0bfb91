//! The storage tiers behind the host tier.

use kvgate_kvcache::identity::Namespace;
use kvgate_transfer::Deadline;
use kvgate_transfer::sync::Arc;

use std::time::Duration;

use super::{Found, Hicache, first_bytes};
use crate::error::{Error, ErrorKind};
use crate::storage::{
    CostRates, Fetch, Storage, StorageConfig, StorageCounts, StorageEnd, StorageTier,
};

impl Hicache {
    /// Puts storage tiers behind the host tier. `namespace` is that of the two trees.
    ///
    /// # Errors
    /// `InvalidConfig` without a tier or a thread, or for another namespace; `ComponentRefused` for a tier that cannot
    /// hold every record of the schema; `Unavailable` when no thread can be had.
    pub fn with_storage(
        self,
        namespace: Namespace,
        config: StorageConfig,
    ) -> Result<Hicache, Error> {
        let (found, own) = (namespace.digest(), self.host.tree().namespace());
        if found != own {
            return Err(Error::new(ErrorKind::InvalidConfig {
                field: "namespace of the storage tiers, its first 8 bytes",
                value: first_bytes(found),
                expected: format!("{}, that of the host tier", first_bytes(own)),
            }));
        }
        let storage = Storage::start(&self.host, namespace, config)?;
        *self.storage.lock() = Some(Arc::new(storage));
        Ok(self)
    }

    pub(super) fn storage(&self) -> Option<Arc<Storage>> {
        self.storage.lock().clone()
    }

    /// As [`Hicache::lookup`], and asks the storage tiers too when they may have more than the device pool and the host
    /// tier: what they have comes into the host tier first. Blocks as the [`crate::storage::PrefetchPolicy`] says, at
    /// most until `deadline`; what has not come by then is a shorter hit, or a miss.
    pub fn lookup_within(&self, tokens: &[u32], deadline: Deadline) -> Option<Found> {
        self.settle();
        if let Some(storage) = self.storage() {
            let (_, known_tokens) = self.device.tree().probe(tokens);
            storage.bring(tokens, known_tokens, deadline);
        }
        self.lookup(tokens)
    }

    /// Begins to bring what the storage tiers have of `tokens` into the host tier, or joins whoever does. `None` when
    /// there is nothing to bring, or too many wait already. Never waits.
    pub fn prefetch(&self, tokens: &[u32]) -> Option<Arc<Fetch>> {
        self.settle();
        let (_, known_tokens) = self.device.tree().probe(tokens);
        self.storage()?.prefetch(tokens, known_tokens)
    }

    /// Counts of the storage tiers; `None` without any, and after the shutdown, which answers the last ones.
    pub fn storage_counts(&self) -> Option<StorageCounts> {
        Some(self.storage()?.counts())
    }

    /// `tokens` of a prompt were computed in `elapsed`, waits for a load not counted. By this rate and those of the tiers
    /// it is decided whether a prefix is loaded from them; without it, all are.
    pub fn note_prefill(&self, tokens: u32, elapsed: Duration) {
        if let Some(storage) = self.storage() {
            storage.note_prefill(tokens, elapsed);
        }
    }

    /// The measured rates by which loads from the storage tiers are weighed; `None` when they are not.
    pub fn cost_rates(&self) -> Option<CostRates> {
        self.storage()?.rates()
    }

    /// The storage tiers, nearest first.
    pub fn storage_tiers(&self) -> Vec<StorageTier> {
        let storage = self.storage();
        storage.map_or_else(Vec::new, |storage| storage.tiers().to_vec())
    }

    /// Ages of the oldest store and the oldest fetch that wait or run.
    pub fn oldest_storage(&self) -> (Option<Duration>, Option<Duration>) {
        self.storage()
            .map_or((None, None), |storage| storage.oldest())
    }

    /// Stores and fetches that wait or run.
    pub fn open_storage(&self) -> (usize, usize) {
        self.storage().map_or((0, 0), |storage| storage.open())
    }

    /// Waits for what is under way, stores what the write policy has put off, and lets go of the storage tiers. What is
    /// not done at the deadline is dropped. A worker that is inside a tier at that moment is left there, and keeps its
    /// pages until it returns: the end is then not drained.
    pub fn shutdown(&self, deadline: Deadline) -> StorageEnd {
        let is_still = self.wait(deadline);
        let storage = self.storage.lock().take();
        let Some(storage) = storage else {
            return StorageEnd {
                is_drained: is_still,
                ..StorageEnd::default()
            };
        };
        let end = storage.shutdown(deadline);
        // Whoever is just asking may be the last to let go of it: the end of the workers is nobody's wait.
        drop(storage);
        StorageEnd {
            is_drained: end.is_drained && is_still,
            ..end
        }
    }
}
