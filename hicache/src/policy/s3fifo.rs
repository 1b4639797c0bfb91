//! [`S3Fifo`]: three queues, so that what is asked for once passes through without pushing out what is
//! asked for again.

use std::collections::{HashMap, HashSet, VecDeque};

use kvgate_kvcache::identity::BlockKey;
use kvgate_kvcache::prefix::EvictionPolicy;

/// Uses that are counted at most.
const USES_MAX: u8 = 3;
/// The small queue gives up first while it holds more than one in so many of all pages.
const SMALL_SHARE: usize = 10;

/// S3-FIFO: a page enters a small queue; used again, it moves to the main one when its turn comes; given
/// up, its key is remembered for as long as that many pages pass, and a page that comes back meanwhile
/// enters the main queue at once. A scan of pages that nobody asks for twice stays in the small queue.
#[derive(Debug, Default)]
pub struct S3Fifo {
    small: VecDeque<BlockKey>,
    main: VecDeque<BlockKey>,
    pages: HashMap<BlockKey, Page>,
    /// Keys given up lately, the oldest first.
    ghosts: VecDeque<BlockKey>,
    is_ghost: HashSet<BlockKey>,
}

#[derive(Debug)]
struct Page {
    uses: u8,
    is_main: bool,
}

impl S3Fifo {
    /// The page to give up from one queue. Pages whose turn it is and that were used go to the end of the
    /// main queue; those that cannot go stay where they are.
    fn take_from(
        &mut self,
        is_main: bool,
        can_go: &mut dyn FnMut(&BlockKey) -> bool,
    ) -> Option<BlockKey> {
        // Each page is looked at so often at most: once for each use that is counted, and once more.
        let mut looks = self.queue(is_main).len() * (usize::from(USES_MAX) + 1);
        let mut at = 0;
        while looks > 0 && at < self.queue(is_main).len() {
            looks -= 1;
            let block = self.queue(is_main)[at];
            let Some(page) = self.pages.get_mut(&block) else {
                self.queue(is_main).remove(at);
                continue;
            };
            if !can_go(&block) {
                at += 1;
            } else if page.uses == 0 {
                return Some(block);
            } else {
                page.uses = if is_main { page.uses - 1 } else { 0 };
                page.is_main = true;
                self.queue(is_main).remove(at);
                self.main.push_back(block);
            }
        }
        None
    }

    fn queue(&mut self, is_main: bool) -> &mut VecDeque<BlockKey> {
        match is_main {
            true => &mut self.main,
            false => &mut self.small,
        }
    }

    fn remember(&mut self, block: BlockKey) {
        if self.is_ghost.insert(block) {
            self.ghosts.push_back(block);
        }
        while self.ghosts.len() > self.pages.len().max(1) {
            if let Some(oldest) = self.ghosts.pop_front() {
                self.is_ghost.remove(&oldest);
            }
        }
    }
}

impl EvictionPolicy for S3Fifo {
    fn inserted(&mut self, block: BlockKey) {
        let is_main = self.is_ghost.contains(&block);
        if self
            .pages
            .insert(block, Page { uses: 0, is_main })
            .is_none()
        {
            self.queue(is_main).push_back(block);
        }
    }

    fn used(&mut self, block: BlockKey) {
        if let Some(page) = self.pages.get_mut(&block) {
            page.uses = (page.uses + 1).min(USES_MAX);
        }
    }

    fn removed(&mut self, block: BlockKey) {
        let Some(page) = self.pages.remove(&block) else {
            return;
        };
        let queue = self.queue(page.is_main);
        if let Some(at) = queue.iter().position(|queued| *queued == block) {
            queue.remove(at);
        }
    }

    fn victim(&mut self, can_go: &mut dyn FnMut(&BlockKey) -> bool) -> Option<BlockKey> {
        let is_small_first = self.small.len() * SMALL_SHARE > self.pages.len();
        let first = self.take_from(!is_small_first, can_go);
        // What was used in the small queue has moved on: the main queue is looked at behind it.
        let victim = first
            .or_else(|| self.take_from(is_small_first, can_go))
            .or_else(|| self.take_from(true, can_go));
        let is_small = |block: &BlockKey| self.pages.get(block).is_some_and(|page| !page.is_main);
        if let Some(block) = victim.filter(is_small) {
            self.remember(block);
        }
        victim
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use kvgate_kvcache::prefix::Lru;

    fn key(number: u32) -> BlockKey {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&number.to_le_bytes());
        BlockKey(bytes)
    }

    /// Asks for pages in order through a cache of `capacity` pages. Answers how many were there.
    fn hits(policy: &mut dyn EvictionPolicy, capacity: usize, asked: &[u32]) -> usize {
        let mut held: HashSet<BlockKey> = HashSet::new();
        let mut count = 0;
        for number in asked {
            let block = key(*number);
            if held.contains(&block) {
                policy.used(block);
                count += 1;
                continue;
            }
            if held.len() == capacity {
                let victim = policy.victim(&mut |_| true).unwrap();
                assert!(held.remove(&victim), "a page that is not there");
                policy.removed(victim);
            }
            held.insert(block);
            policy.inserted(block);
        }
        count
    }

    /// A few pages that everybody shares, between pages that are asked for once.
    fn trace_with_scans() -> Vec<u32> {
        let mut asked = Vec::new();
        for round in 0..200 {
            asked.extend(0..20);
            asked.extend((0..60).map(|one_shot| 1_000 + round * 60 + one_shot));
        }
        asked
    }

    #[test]
    fn a_scan_does_not_push_out_what_is_asked_for_again() {
        let asked = trace_with_scans();
        let lru = hits(&mut Lru::default(), 50, &asked);
        let s3 = hits(&mut S3Fifo::default(), 50, &asked);
        assert_eq!(lru, 0, "more than the cache holds lies between two uses");
        assert!(s3 > 20 * 190, "{s3} hits of the shared pages");
    }

    #[test]
    fn what_cannot_go_is_left_and_the_rest_goes() {
        let mut policy = S3Fifo::default();
        for number in 0..40 {
            policy.inserted(key(number));
            policy.used(key(number));
        }
        let mut gone = HashSet::new();
        while let Some(block) = policy.victim(&mut |block| *block != key(0) && *block != key(17)) {
            policy.removed(block);
            assert!(gone.insert(block));
        }
        assert_eq!(gone.len(), 38);
        assert!(!gone.contains(&key(0)) && !gone.contains(&key(17)));
        assert_eq!(policy.victim(&mut |_| false), None);
        assert!(policy.victim(&mut |_| true).is_some());
    }
}
