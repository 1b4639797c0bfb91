//! The life of a registration: live → revoking → closed, and closed only when no operation holds it (I-21).
//!
//! One atomic word holds the phase and the number of holds, so "take a hold unless revoked" is one
//! compare-exchange and no operation can slip in behind a revocation.
//! **Memory order.** A hold is released with Release and the closer reads the word with Acquire, so the
//! last access of every operation is before the memory goes away.
//! **Lock order.** `Waiters` is a leaf; it is notified after the word has changed.

use std::collections::BTreeSet;

use smallvec::SmallVec;

use crate::{
    barrier::waiters::Waiters,
    deadline::Deadline,
    error::{Error, ErrorKind},
    ids::{PeerId, PoolId, RegionId},
    mem::{
        Memory,
        span::{PoolGeometry, PoolSpan, SlotRun},
    },
    sync::{Arc, AtomicBool, AtomicU64, Mutex, Ordering},
};

/// Set when the region is being closed: no new hold.
const REVOKED: u64 = 1 << 63;

/// A registration, as the engine keeps it.
#[derive(Debug)]
pub(crate) struct RegionCore {
    pub(crate) id: RegionId,
    pub(crate) generation: u32,
    /// Given back at the end, whoever still knows this registration.
    memory: Mutex<Option<Arc<Memory>>>,
    pub(crate) pools: Vec<(PoolId, PoolSpan)>,
    /// Phase bit and number of holds.
    word: AtomicU64,
    /// Peers that may still write by themselves and have not let go.
    unheard: Waiters<BTreeSet<PeerId>>,
    /// Nobody will close it: the engine does, once it is quiet.
    is_orphan: AtomicBool,
    #[cfg(all(feature = "one-sided", not(kv_loom)))]
    registrars: Registrars,
}

/// Whoever has registered the memory with a library, and must take that back before it goes.
#[cfg(all(feature = "one-sided", not(kv_loom)))]
pub(crate) trait Registrar: Send + Sync {
    /// The library must not touch the region's memory from now on. Blocks until that is so; `false` when
    /// it may go on to.
    #[must_use]
    fn forget(&self, region: RegionId) -> bool;
    /// Has forgotten everything.
    fn is_over(&self) -> bool;
}

#[cfg(all(feature = "one-sided", not(kv_loom)))]
#[derive(Default)]
struct Registrars {
    all: Mutex<Vec<Arc<dyn Registrar>>>,
    /// Somebody has taken them, to ask each: until that is done, nobody else knows what came of it.
    are_asked: AtomicBool,
}

#[cfg(all(feature = "one-sided", not(kv_loom)))]
impl Registrars {
    /// Asks all of them, without a lock. How many keep the region; those are asked again the next time.
    fn forget(&self, region: RegionId) -> u64 {
        if self.are_asked.swap(true, Ordering::AcqRel) {
            return 1;
        }
        let mut asked = std::mem::take(&mut *self.all.lock());
        asked.retain(|registrar| !registrar.forget(region));
        let kept = asked.len() as u64;
        self.all.lock().extend(asked);
        self.are_asked.store(false, Ordering::Release);
        kept
    }
}

#[cfg(all(feature = "one-sided", not(kv_loom)))]
impl std::fmt::Debug for Registrars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Registrars")
            .field(&self.all.lock().len())
            .finish()
    }
}

/// Keeps a region from being closed while an operation touches it.
#[derive(Debug)]
#[must_use]
pub(crate) struct RegionHold(Arc<RegionCore>);

/// Those of one operation, which touches one region as a rule.
pub(crate) type RegionHolds = SmallVec<[RegionHold; 1]>;

impl RegionCore {
    /// Checks the pools against the memory. `first_pool` is the id of the first one.
    pub(crate) fn new(
        id: RegionId,
        generation: u32,
        memory: Arc<Memory>,
        first_pool: u32,
        pools: &[PoolGeometry],
    ) -> Result<Self, Error> {
        let mut spans = Vec::with_capacity(pools.len());
        for (index, geometry) in pools.iter().enumerate() {
            let span = PoolSpan::new(memory.base_ptr(), memory.len_bytes(), *geometry).ok_or(
                ErrorKind::InvalidGeometry {
                    pool_index: index,
                    end_bytes: geometry.end_bytes(),
                    len_bytes: memory.len_bytes(),
                },
            )?;
            spans.push((PoolId(first_pool + index as u32), span));
        }
        Ok(Self {
            id,
            generation,
            memory: Mutex::new(Some(memory)),
            is_orphan: AtomicBool::new(false),
            #[cfg(all(feature = "one-sided", not(kv_loom)))]
            registrars: Registrars::default(),
            pools: spans,
            word: AtomicU64::new(0),
            unheard: Waiters::new(BTreeSet::new()),
        })
    }

    /// A hold, unless the region is being closed. `this` because loom's `Arc` is no receiver.
    pub(crate) fn hold(this: &Arc<Self>) -> Option<RegionHold> {
        let mut word = this.word.load(Ordering::Relaxed);
        loop {
            if word & REVOKED != 0 {
                return None;
            }
            match this.word.compare_exchange_weak(
                word,
                word + 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some(RegionHold(this.clone())),
                Err(now) => word = now,
            }
        }
    }

    /// Refuses new holds from now on. `true` for the first caller, who then tells the peers.
    pub(crate) fn revoke(&self) -> bool {
        self.word.fetch_or(REVOKED, Ordering::AcqRel) & REVOKED == 0
    }

    pub(crate) fn is_revoked(&self) -> bool {
        self.word.load(Ordering::Acquire) & REVOKED != 0
    }

    pub(crate) fn outstanding(&self) -> u64 {
        self.word.load(Ordering::Acquire) & !REVOKED
    }

    /// A peer that writes by itself must answer before the region is closed.
    pub(crate) fn await_peer(&self, peer: PeerId) {
        self.unheard.with(|peers| peers.insert(peer));
    }

    /// The peer has let go, or is proven dead.
    pub(crate) fn peer_let_go(&self, peer: PeerId) {
        self.unheard.update(|peers| peers.remove(&peer));
    }

    pub(crate) fn unheard(&self) -> Vec<PeerId> {
        self.unheard.with(|peers| peers.iter().copied().collect())
    }

    pub(crate) fn unheard_peers(&self) -> u64 {
        self.unheard.with(|peers| peers.len() as u64)
    }

    /// Whether nothing can touch the memory any more. Only after [`RegionCore::revoke`].
    pub(crate) fn is_quiet(&self) -> bool {
        self.is_revoked() && self.outstanding() == 0 && self.unheard_peers() == 0
    }

    /// The memory; `None` once the region is closed.
    pub(crate) fn memory(&self) -> Option<Arc<Memory>> {
        self.memory.lock().clone()
    }

    /// Tells `registrar` before the memory goes. The caller holds the region, or something that does.
    #[cfg(all(feature = "one-sided", not(kv_loom)))]
    pub(crate) fn announce_end_to(&self, registrar: Arc<dyn Registrar>) {
        let mut registrars = self.registrars.all.lock();
        registrars.retain(|known| !known.is_over());
        registrars.push(registrar);
    }

    /// Lets go of the memory. Only when the region is quiet.
    ///
    /// # Errors
    /// So many connections keep it: their library may touch it. Nothing has changed then.
    pub(crate) fn release(&self) -> Result<(), u64> {
        debug_assert!(self.is_quiet(), "I-21");
        #[cfg(all(feature = "one-sided", not(kv_loom)))]
        match self.registrars.forget(self.id) {
            0 => {}
            kept => return Err(kept),
        }
        let memory = self.memory.lock().take();
        drop(memory);
        Ok(())
    }

    pub(crate) fn orphan(&self) {
        self.is_orphan.store(true, Ordering::Release);
    }

    pub(crate) fn is_orphan(&self) -> bool {
        self.is_orphan.load(Ordering::Acquire)
    }

    /// Blocks until the region is quiet; `false` at the deadline.
    pub(crate) fn wait_quiet(&self, deadline: Deadline) -> bool {
        let quiet = |peers: &mut BTreeSet<PeerId>| {
            (self.is_revoked() && self.outstanding() == 0 && peers.is_empty()).then_some(())
        };
        self.unheard.wait(deadline, quiet).is_some()
    }

    /// The checked slots of one of its pools.
    pub(crate) fn run(&self, pool: PoolId, slot: u32, slot_count: u32) -> Result<SlotRun, Error> {
        let span = self.span(pool).ok_or(ErrorKind::UnknownPool { pool })?;
        span.run(slot, slot_count).ok_or_else(|| {
            let slot = slot.saturating_add(slot_count.saturating_sub(1));
            ErrorKind::SlotOutOfRange {
                pool,
                slot,
                slot_count: span.geometry().slot_count,
            }
            .into()
        })
    }

    pub(crate) fn span(&self, pool: PoolId) -> Option<&PoolSpan> {
        self.pools
            .iter()
            .find(|(id, _)| *id == pool)
            .map(|(_, span)| span)
    }
}

impl Drop for RegionHold {
    fn drop(&mut self) {
        let before = self.0.word.fetch_sub(1, Ordering::Release);
        debug_assert!(before & !REVOKED > 0, "a hold is released once");
        if before == REVOKED | 1 {
            self.0.unheard.notify();
        }
    }
}

#[cfg(all(test, not(kv_loom)))]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn region() -> Arc<RegionCore> {
        let memory = Arc::new(Memory::host(4096).unwrap());
        let pool = PoolGeometry {
            offset_bytes: 0,
            stride_bytes: 64,
            slot_bytes: 64,
            slot_count: 4,
        };
        Arc::new(RegionCore::new(RegionId(1), 1, memory, 7, &[pool]).unwrap())
    }

    #[test]
    fn a_hold_keeps_a_revoked_region_from_being_quiet() {
        let region = region();
        let hold = RegionCore::hold(&region).unwrap();
        assert!(region.revoke());
        assert!(!region.revoke(), "only the first caller tells the peers");
        assert!(RegionCore::hold(&region).is_none());
        assert!(!region.is_quiet());
        assert!(!region.wait_quiet(Deadline::after_ms(1)));
        drop(hold);
        assert!(region.is_quiet());
    }

    #[test]
    fn a_peer_that_writes_by_itself_must_let_go_first() {
        let region = region();
        region.await_peer(PeerId(3));
        assert!(region.revoke());
        assert!(!region.is_quiet());
        region.peer_let_go(PeerId(3));
        assert!(region.wait_quiet(Deadline::now()));
    }

    #[cfg(feature = "one-sided")]
    #[test]
    fn memory_that_a_library_keeps_is_not_let_go() {
        struct Keeper(AtomicBool);

        impl Registrar for Keeper {
            fn forget(&self, _region: RegionId) -> bool {
                !self.0.load(Ordering::Acquire)
            }

            fn is_over(&self) -> bool {
                false
            }
        }

        let region = region();
        let keeper = Arc::new(Keeper(AtomicBool::new(true)));
        region.announce_end_to(keeper.clone());
        region.announce_end_to(Arc::new(Keeper(AtomicBool::new(false))));
        assert!(region.revoke());
        assert_eq!(region.release(), Err(1));
        assert_eq!(region.release(), Err(1), "asked again");
        assert!(region.memory().is_some());
        keeper.0.store(false, Ordering::Release);
        assert_eq!(region.release(), Ok(()));
        assert!(region.memory().is_none());
    }

    #[test]
    fn slots_outside_are_refused_with_the_slot() {
        let region = region();
        let error = region.run(PoolId(7), 3, 2).unwrap_err();
        let expected = ErrorKind::SlotOutOfRange {
            pool: PoolId(7),
            slot: 4,
            slot_count: 4,
        };
        assert_eq!(*error.kind(), expected);
        let error = region.run(PoolId(8), 0, 1).unwrap_err();
        assert_eq!(*error.kind(), ErrorKind::UnknownPool { pool: PoolId(8) });
    }
}
