//! The storage tiers behind the host tier.

use kvgate_kvcache::identity::Namespace;
use kvgate_transfer::Deadline;
use kvgate_transfer::sync::Arc;

use super::{Found, Hicache, first_bytes};
use crate::error::{Error, ErrorKind};
use crate::storage::{Fetch, Storage, StorageConfig, StorageCounts, StorageEnd, StorageTier};

impl Hicache {
    /// Puts storage tiers behind the host tier. `namespace` is that of the two trees.
    ///
    /// # Errors
    /// `InvalidConfig` without a tier or a thread, or for another namespace; `ComponentRefused` for a tier that cannot
    /// hold every record of the schema; `Unavailable` when no thread can be had.
    pub fn with_storage(
        mut self,
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
        self.storage = Some(Storage::start(&self.host, namespace, config)?);
        Ok(self)
    }

    /// As [`Hicache::lookup`], and asks the storage tiers too when they may have more than the device pool and the host
    /// tier: what they have comes into the host tier first. Blocks as the [`crate::storage::PrefetchPolicy`] says, at
    /// most until `deadline`; what has not come by then is a shorter hit, or a miss.
    pub fn lookup_within(&self, tokens: &[u32], deadline: Deadline) -> Option<Found> {
        self.settle();
        if let Some(storage) = &self.storage {
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
        self.storage.as_ref()?.prefetch(tokens, known_tokens)
    }

    /// Counts of the storage tiers; `None` without any.
    pub fn storage_counts(&self) -> Option<StorageCounts> {
        Some(self.storage.as_ref()?.counts())
    }

    /// The storage tiers, nearest first.
    pub fn storage_tiers(&self) -> &[StorageTier] {
        self.storage.as_ref().map_or(&[], Storage::tiers)
    }

    /// Stores and fetches that wait or run.
    pub fn open_storage(&self) -> (usize, usize) {
        self.storage.as_ref().map_or((0, 0), Storage::open)
    }

    /// Waits for what is under way, stores what the write policy has put off, and begins nothing with the storage
    /// tiers any more. What is not done at the deadline is dropped or goes on until it is dropped with the cache.
    pub fn shutdown(&self, deadline: Deadline) -> StorageEnd {
        let is_still = self.wait(deadline);
        let end = self
            .storage
            .as_ref()
            .map(|storage| storage.shutdown(deadline));
        let end = end.unwrap_or(StorageEnd {
            is_drained: true,
            dropped: 0,
        });
        StorageEnd {
            is_drained: end.is_drained && is_still,
            ..end
        }
    }
}
