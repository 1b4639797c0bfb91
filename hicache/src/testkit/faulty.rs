//! A tier that fails on purpose.

use kvgate_kvcache::identity::NamespaceDigest;
use kvgate_transfer::Deadline;
use kvgate_transfer::sync::{AtomicU64, Ordering::Relaxed};

use crate::error::{Error, ErrorKind};
use crate::miss::Miss;
use crate::record::{Record, RecordId, Verified, Wanted};
use crate::tier::{Presence, Stored, Tier, TierStats};

/// Wraps a tier: every n-th call fails, and every call takes a time that is compared with its deadline
/// and not waited for.
#[derive(Debug)]
pub struct Faulty<T> {
    tier: T,
    fail_every: AtomicU64,
    latency_ms: AtomicU64,
    calls: AtomicU64,
}

impl<T: Tier> Faulty<T> {
    /// Every `fail_every`-th call fails (0: none); each takes `latency_ms`.
    pub fn new(tier: T, fail_every: u64, latency_ms: u64) -> Faulty<T> {
        Faulty {
            tier,
            fail_every: AtomicU64::new(fail_every),
            latency_ms: AtomicU64::new(latency_ms),
            calls: AtomicU64::new(0),
        }
    }

    /// The same from now on: every `fail_every`-th call fails (0: none); each takes `latency_ms`.
    pub fn set(&self, fail_every: u64, latency_ms: u64) {
        self.fail_every.store(fail_every, Relaxed);
        self.latency_ms.store(latency_ms, Relaxed);
    }

    /// Takes the tier out.
    pub fn into_inner(self) -> T {
        self.tier
    }

    /// The tier inside.
    pub fn inner(&self) -> &T {
        &self.tier
    }

    fn fault(&self, deadline: Deadline) -> Option<Miss> {
        let call = self.calls.fetch_add(1, Relaxed) + 1;
        let deadline_ms = deadline.allowed_ms();
        if self.latency_ms.load(Relaxed) > deadline_ms {
            return Some(Miss::Late { deadline_ms });
        }
        let fail_every = self.fail_every.load(Relaxed);
        let fails = fail_every > 0 && call.is_multiple_of(fail_every);
        fails.then(|| Miss::Unavailable {
            reason: format!("call {call} fails"),
        })
    }

    fn error(&self, deadline: Deadline) -> Option<Error> {
        self.fault(deadline).map(|miss| match miss {
            Miss::Late { deadline_ms } => Error::new(ErrorKind::Late { deadline_ms }),
            other => Error::new(ErrorKind::Unavailable {
                store: self.tier.name().to_owned(),
                reason: other.to_string(),
            }),
        })
    }
}

impl<T: Tier> Tier for Faulty<T> {
    fn name(&self) -> &str {
        self.tier.name()
    }

    fn probe(&self, ids: &[RecordId], deadline: Deadline) -> Vec<Presence> {
        match self.fault(deadline) {
            Some(_) => vec![Presence::Unknown; ids.len()],
            None => self.tier.probe(ids, deadline),
        }
    }

    fn read<'b>(
        &self,
        wanted: Wanted<'_>,
        into: &'b mut [u8],
        deadline: Deadline,
    ) -> Result<Verified<'b>, Miss> {
        match self.fault(deadline) {
            Some(miss) => Err(miss),
            None => self.tier.read(wanted, into, deadline),
        }
    }

    fn write(&self, record: &Record<'_>, deadline: Deadline) -> Result<Stored, Error> {
        match self.error(deadline) {
            Some(error) => Err(error),
            None => self.tier.write(record, deadline),
        }
    }

    fn remove(
        &self,
        namespace: NamespaceDigest,
        id: RecordId,
        deadline: Deadline,
    ) -> Result<bool, Error> {
        match self.error(deadline) {
            Some(error) => Err(error),
            None => self.tier.remove(namespace, id, deadline),
        }
    }

    fn record_limit_bytes(&self) -> u64 {
        self.tier.record_limit_bytes()
    }

    fn drain_evicted(&self) -> Vec<RecordId> {
        self.tier.drain_evicted()
    }

    fn stats(&self) -> TierStats {
        self.tier.stats()
    }
}
