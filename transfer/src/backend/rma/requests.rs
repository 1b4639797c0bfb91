//! From the runs of an operation to single requests: one stretch of local memory, one of the peer's.

use std::collections::BTreeMap;

use super::card::Card;
use crate::agent::metadata::AgentMetadata;
use crate::backend::{PoolPair, RunCursor, RunPairs};
use crate::error::{Error, ErrorKind};
use crate::ids::{PoolId, RegionId};
use crate::mem::PoolGeometry;
use crate::mem::span::SlotRun;

/// One stretch to move, in one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    /// The peer's memory is the source.
    pub(crate) is_read: bool,
    /// Region of this side that `local` lies in.
    pub(crate) region: RegionId,
    pub(crate) local: *mut u8,
    pub(crate) bytes: usize,
    /// Remote address, as the peer's key wants it.
    pub(crate) remote: u64,
    /// Place of the key in the peer's card.
    pub(crate) key: usize,
}

/// A pool of the peer.
#[derive(Debug, Clone, Copy)]
struct Target {
    geometry: PoolGeometry,
    generation: u32,
    /// Remote address of the region's first byte.
    base: u64,
    key: usize,
}

/// The pools of a peer, as remote addresses.
#[derive(Debug)]
pub(crate) struct Targets {
    pools: BTreeMap<PoolId, Target>,
}

impl Targets {
    /// Every pool of the metadata must have its key.
    ///
    /// # Errors
    /// A sentence for the refusal.
    pub(crate) fn new(metadata: &AgentMetadata, card: &Card) -> Result<Self, String> {
        let keys: BTreeMap<_, _> = card
            .keys
            .iter()
            .enumerate()
            .map(|(at, key)| ((key.region, key.generation), (at, key.base)))
            .collect();
        let mut pools = BTreeMap::new();
        for pool in &metadata.pools {
            let region = metadata.region(pool.region);
            let region = region.ok_or_else(|| format!("{:?} has no region", pool.id))?;
            let (key, base) = *keys.get(&(region.id, region.generation)).ok_or_else(|| {
                format!(
                    "{:?} generation {} has no key",
                    region.id, region.generation
                )
            })?;
            if base.checked_add(region.len_bytes).is_none() {
                return Err(format!("{:?} ends beyond 64 bits", region.id));
            }
            let target = Target {
                geometry: pool.geometry,
                generation: region.generation,
                base,
                key,
            };
            pools.insert(pool.id, target);
        }
        Ok(Self { pools })
    }

    /// Checks every pair of pools against the peer's geometry, before anything is moved.
    ///
    /// # Errors
    /// The pools that do not fit.
    pub(crate) fn check(&self, runs: &RunPairs) -> Result<(), Error> {
        for group in &runs.groups {
            for pair in &group.pools {
                self.check_pools(pair, group.remote_last)?;
            }
        }
        Ok(())
    }

    /// `last` is the highest slot of the peer.
    fn check_pools(&self, pair: &PoolPair, last: u32) -> Result<(), Error> {
        let (pool, geometry) = (pair.remote, &self.find(pair)?.geometry);
        if last >= geometry.slot_count {
            return Err(ErrorKind::SlotOutOfRange {
                pool,
                slot: last,
                slot_count: geometry.slot_count,
            }
            .into());
        }
        if pair.local.slot_bytes as u64 != geometry.slot_bytes {
            return Err(ErrorKind::LengthMismatch {
                local_count: pair.local.slot_bytes as u64,
                remote_count: geometry.slot_bytes,
            }
            .into());
        }
        Ok(())
    }

    fn find(&self, pair: &PoolPair) -> Result<&Target, Error> {
        let pool = pair.remote;
        match self.pools.get(&pool) {
            None => Err(ErrorKind::UnknownPool { pool }.into()),
            Some(target) if target.generation != pair.generation => {
                Err(ErrorKind::PoolRevoked { pool }.into())
            }
            Some(target) => Ok(target),
        }
    }
}

impl Target {
    /// Remote address of a slot that was checked; it lies in the region, whose end fits 64 bits.
    fn slot(&self, slot: u32) -> u64 {
        let geometry = &self.geometry;
        self.base + geometry.offset_bytes + u64::from(slot) * geometry.stride_bytes
    }
}

/// Walks the requests of an operation. The runs were checked by [`Targets::check`].
#[derive(Debug)]
pub(crate) struct Cursor {
    is_read: bool,
    largest_bytes: usize,
    /// The pair that is next.
    pair: RunCursor,
    /// The pool of the peer that the last pair was in.
    target: Option<(PoolId, Target)>,
    /// What is left of the pair before it.
    current: Option<Stretches>,
    /// Given back by [`Cursor::put_back`].
    spare: Option<Request>,
    is_at_end: bool,
}

#[derive(Debug)]
struct Stretches {
    region: RegionId,
    local: *mut u8,
    remote: u64,
    key: usize,
    stretch_bytes: usize,
    local_stride: usize,
    remote_stride: u64,
    left: usize,
    /// Inside the first stretch.
    done_bytes: usize,
}

impl Cursor {
    /// Requests of at most `largest_bytes` each.
    pub(crate) fn new(is_read: bool, largest_bytes: usize) -> Self {
        Self {
            is_read,
            largest_bytes: largest_bytes.max(1),
            pair: RunCursor::default(),
            target: None,
            current: None,
            spare: None,
            is_at_end: false,
        }
    }

    /// Whether [`Cursor::next`] has said that nothing is left.
    pub(crate) fn is_at_end(&self) -> bool {
        self.is_at_end
    }

    /// The next request; `None` at the end.
    pub(crate) fn next(
        &mut self,
        runs: &RunPairs,
        targets: &Targets,
    ) -> Result<Option<Request>, Error> {
        if let Some(request) = self.spare.take() {
            return Ok(Some(request));
        }
        while self.current.is_none() {
            let Some((pair, first, count)) = runs.next_slots(&mut self.pair) else {
                self.is_at_end = true;
                return Ok(None);
            };
            let target = match self.target {
                Some((pool, target)) if pool == pair.remote => target,
                _ => *targets.find(pair)?,
            };
            self.target = Some((pair.remote, target));
            let local = pair.local.section(first.local, count);
            let remote = target.slot(first.remote);
            self.current = Some(Stretches::new(pair.region, &local, &target, remote));
        }
        Ok(self.cut())
    }

    fn cut(&mut self) -> Option<Request> {
        let at = self.current.as_mut()?;
        let bytes = (at.stretch_bytes - at.done_bytes).min(self.largest_bytes);
        let request = Request {
            is_read: self.is_read,
            region: at.region,
            local: at.local.wrapping_add(at.done_bytes),
            bytes,
            remote: at.remote + at.done_bytes as u64,
            key: at.key,
        };
        at.done_bytes += bytes;
        if at.done_bytes == at.stretch_bytes {
            at.done_bytes = 0;
            at.left -= 1;
            at.local = at.local.wrapping_add(at.local_stride);
            // Beyond the last stretch it is not used.
            at.remote = at.remote.wrapping_add(at.remote_stride);
            if at.left == 0 {
                self.current = None;
            }
        }
        Some(request)
    }

    /// The request was not taken; it comes next.
    pub(crate) fn put_back(&mut self, request: Request) {
        self.spare = Some(request);
    }
}

impl Stretches {
    fn new(region: RegionId, local: &SlotRun, target: &Target, remote: u64) -> Self {
        let geometry = &target.geometry;
        let has_gaps = geometry.stride_bytes != geometry.slot_bytes && local.slot_count > 1;
        let (stretch_bytes, left) = match local.is_contiguous() && !has_gaps {
            true => (local.slot_bytes * local.slot_count, 1),
            false => (local.slot_bytes, local.slot_count),
        };
        Self {
            region,
            local: local.base,
            remote,
            key: target.key,
            stretch_bytes,
            local_stride: local.stride_bytes,
            remote_stride: geometry.stride_bytes,
            left,
            done_bytes: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::metadata::{PoolInfo, RegionInfo};
    use crate::backend::RemoteRun;
    use crate::ids::Incarnation;
    use crate::mem::MemoryKind;
    use crate::mem::span::PoolSpan;
    use bytes::Bytes;

    const POOL: PoolId = PoolId(3);

    fn geometry(stride_bytes: u64) -> PoolGeometry {
        PoolGeometry {
            offset_bytes: 8,
            stride_bytes,
            slot_bytes: 16,
            slot_count: 4,
        }
    }

    fn metadata(stride_bytes: u64) -> AgentMetadata {
        let region = RegionInfo {
            id: RegionId(1),
            generation: 5,
            len_bytes: 4096,
            kind: MemoryKind::Host,
        };
        let pool = PoolInfo {
            id: POOL,
            region: region.id,
            geometry: geometry(stride_bytes),
        };
        AgentMetadata {
            incarnation: Incarnation(1),
            name: "peer".into(),
            regions: vec![region],
            pools: vec![pool],
            app: Bytes::new(),
        }
    }

    fn card(base: u64) -> Card {
        let key = super::super::card::Key {
            region: RegionId(1),
            generation: 5,
            base,
            key: Bytes::new(),
        };
        Card {
            address: Bytes::new(),
            keys: vec![key],
        }
    }

    fn remote(generation: u32, slot: u32, slot_count: u32) -> RemoteRun {
        RemoteRun {
            pool: POOL,
            generation,
            slot,
            slot_count,
        }
    }

    /// Remote and local offsets, and lengths, of all requests.
    fn all(
        local_stride: u64,
        remote_stride: u64,
        largest_bytes: usize,
    ) -> Vec<(usize, u64, usize)> {
        let mut memory = vec![0u8; 4096];
        let base = memory.as_mut_ptr();
        let span = PoolSpan::new(base, 4096, geometry(local_stride)).unwrap();
        let runs = RunPairs::of([
            (span.run(0, 1).unwrap(), remote(5, 3, 1)),
            (span.run(2, 2).unwrap(), remote(5, 0, 2)),
        ]);
        let targets = Targets::new(&metadata(remote_stride), &card(1 << 20)).unwrap();
        targets.check(&runs).unwrap();
        let mut cursor = Cursor::new(false, largest_bytes);
        let mut found = Vec::new();
        while let Some(request) = cursor.next(&runs, &targets).unwrap() {
            cursor.put_back(request);
            assert_eq!(cursor.next(&runs, &targets).unwrap(), Some(request));
            let offset = request.local as usize - base as usize;
            found.push((offset, request.remote - (1 << 20), request.bytes));
        }
        found
    }

    #[test]
    fn neighbours_without_gaps_are_one_request() {
        let expected = [(8, 8 + 48, 16), (8 + 32, 8, 32)];
        assert_eq!(all(16, 16, usize::MAX), expected);
    }

    #[test]
    fn a_gap_on_either_side_separates_slots() {
        let expected = [(8, 8 + 60, 16), (8 + 32, 8, 16), (8 + 48, 8 + 20, 16)];
        assert_eq!(all(16, 20, usize::MAX), expected);
        let expected = [(8, 8 + 48, 16), (8 + 48, 8, 16), (8 + 72, 8 + 16, 16)];
        assert_eq!(all(24, 16, usize::MAX), expected);
    }

    #[test]
    fn long_stretches_are_cut_and_lose_nothing() {
        let found = all(16, 16, 10);
        let lengths: Vec<_> = found.iter().map(|(_, _, bytes)| *bytes).collect();
        assert_eq!(lengths, [10, 6, 10, 10, 10, 2]);
        assert_eq!(found[5], (8 + 32 + 30, 8 + 30, 2));
    }

    #[test]
    fn pairs_that_do_not_fit_are_refused_with_their_numbers() {
        let mut memory = vec![0u8; 4096];
        let span = PoolSpan::new(memory.as_mut_ptr(), 4096, geometry(16)).unwrap();
        let wide = PoolGeometry {
            slot_bytes: 32,
            ..geometry(32)
        };
        let wide = PoolSpan::new(memory.as_mut_ptr(), 4096, wide).unwrap();
        let targets = Targets::new(&metadata(16), &card(0)).unwrap();
        let check_from = |span: &PoolSpan, remote: RemoteRun| {
            let runs = RunPairs::of([(span.run(0, 1).unwrap(), remote)]);
            targets.check(&runs).unwrap_err().kind().clone()
        };
        let check = |remote: RemoteRun| check_from(&span, remote);
        assert_eq!(
            check(remote(6, 0, 1)),
            ErrorKind::PoolRevoked { pool: POOL }
        );
        let outside = ErrorKind::SlotOutOfRange {
            pool: POOL,
            slot: 4,
            slot_count: 4,
        };
        assert_eq!(check(remote(5, 4, 1)), outside);
        let longer = ErrorKind::LengthMismatch {
            local_count: 32,
            remote_count: 16,
        };
        assert_eq!(check_from(&wide, remote(5, 0, 1)), longer);
        let other = RemoteRun {
            pool: PoolId(9),
            ..remote(5, 0, 1)
        };
        assert_eq!(check(other), ErrorKind::UnknownPool { pool: PoolId(9) });
    }

    #[test]
    fn a_card_must_fit_the_metadata() {
        let none = Card {
            keys: Vec::new(),
            ..card(0)
        };
        assert!(
            Targets::new(&metadata(16), &none)
                .unwrap_err()
                .contains("no key")
        );
        let high = Targets::new(&metadata(16), &card(u64::MAX - 7));
        assert!(high.unwrap_err().contains("64 bits"));
    }
}
