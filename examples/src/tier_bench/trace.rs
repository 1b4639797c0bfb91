//! Replay of a trace of prefixes: how many of the blocks that are asked for a cache of a size still has, by the policy
//! that decides what goes.
//!
//! A trace is text. A line is one request: the blocks of its prefix from the first one on, numbers or ranges such as
//! `7-19`, with spaces between them; what stands behind `#` is not read. A prefix is as long as the blocks that are
//! there without a gap from its start; everything that was asked for is in the cache afterwards.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use kvgate_hicache::identity::BlockKey;
use kvgate_hicache::policy::{EvictionPolicy, Lru, S3Fifo};
use serde::Serialize;

use crate::handoff::failure::{Failure, FailureKind};

/// Most blocks of a request.
const BLOCK_LIMIT: u64 = 1 << 20;

/// What one policy made of a trace.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Replay {
    pub(super) policy: &'static str,
    pub(super) capacity_blocks: u64,
    pub(super) requests: u64,
    /// Blocks that were asked for.
    pub(super) asked: u64,
    /// Blocks that were there.
    pub(super) hits: u64,
    pub(super) hit_ratio: f64,
    /// Blocks that are asked for once only.
    pub(super) scanned: u64,
    /// Hits of the same trace without these: what the cache would have if nobody scanned.
    pub(super) hits_without_scans: u64,
    /// Hits as a share of those: 1 is a cache that scans do not reach.
    pub(super) scan_resistance: f64,
}

impl Replay {
    pub(super) fn line(&self) -> String {
        format!(
            "trace   {:<8} {} blocks: {} of {} hit ({:.3}), {} asked for once, scan resistance {:.3}",
            self.policy,
            self.capacity_blocks,
            self.hits,
            self.asked,
            self.hit_ratio,
            self.scanned,
            self.scan_resistance
        )
    }
}

/// Replays the trace of a file through a cache of so many blocks, under every policy.
pub(super) fn replay(path: &Path, capacity_blocks: u64) -> Result<Vec<Replay>, Failure> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        let text = format!("--trace {}: {error}", path.display());
        Failure::new(FailureKind::BadInput, text).with_field("trace", path.display())
    })?;
    let requests = parse(&text).map_err(|(line, word)| {
        let text = format!(
            "--trace {}: line {line}: {word:?}, expected a number of a block or a range",
            path.display()
        );
        Failure::new(FailureKind::BadInput, text).with_field("trace", word)
    })?;
    Ok(vec![
        judge("lru", &|| Box::<Lru>::default(), &requests, capacity_blocks),
        judge(
            "s3-fifo",
            &|| Box::<S3Fifo>::default(),
            &requests,
            capacity_blocks,
        ),
    ])
}

/// The requests of a trace. The error is the line, from 1, and the word.
fn parse(text: &str) -> Result<Vec<Vec<u64>>, (usize, String)> {
    let mut requests = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default();
        let mut blocks = Vec::new();
        for word in line.split_whitespace() {
            let wrong = || (index + 1, word.to_owned());
            let (first, last) = word.split_once('-').unwrap_or((word, word));
            let first: u64 = first.parse().map_err(|_| wrong())?;
            let last: u64 = last.parse().map_err(|_| wrong())?;
            if last < first || last - first >= BLOCK_LIMIT {
                return Err(wrong());
            }
            blocks.extend(first..=last);
        }
        if !blocks.is_empty() {
            requests.push(blocks);
        }
    }
    Ok(requests)
}

type NewPolicy<'a> = &'a dyn Fn() -> Box<dyn EvictionPolicy>;

fn judge(name: &'static str, new: NewPolicy<'_>, requests: &[Vec<u64>], capacity: u64) -> Replay {
    let mut times: HashMap<u64, u64> = HashMap::new();
    for block in requests.iter().flatten() {
        *times.entry(*block).or_default() += 1;
    }
    let again = |blocks: &Vec<u64>| -> Vec<u64> {
        let blocks = blocks.iter().copied();
        blocks.filter(|block| times[block] > 1).collect()
    };
    let without: Vec<Vec<u64>> = requests.iter().map(again).collect();
    let hits = count_hits(&mut *new(), requests, capacity);
    let hits_without_scans = count_hits(&mut *new(), &without, capacity);
    let asked = requests.iter().map(|blocks| blocks.len() as u64).sum();
    let share = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
    Replay {
        policy: name,
        capacity_blocks: capacity,
        requests: requests.len() as u64,
        asked,
        hits,
        hit_ratio: share(hits, asked),
        scanned: times.values().filter(|count| **count == 1).count() as u64,
        hits_without_scans,
        scan_resistance: share(hits, hits_without_scans),
    }
}

fn count_hits(policy: &mut dyn EvictionPolicy, requests: &[Vec<u64>], capacity: u64) -> u64 {
    let mut held: HashSet<BlockKey> = HashSet::new();
    let mut hits = 0;
    for blocks in requests {
        let mut is_prefix = true;
        for block in blocks {
            let key = key(*block);
            is_prefix &= held.contains(&key);
            hits += u64::from(is_prefix);
            if held.contains(&key) {
                policy.used(key);
                continue;
            }
            while held.len() as u64 >= capacity.max(1) {
                let Some(victim) = policy.victim(&mut |_| true) else {
                    break;
                };
                policy.removed(victim);
                held.remove(&victim);
            }
            held.insert(key);
            policy.inserted(key);
        }
    }
    hits
}

fn key(number: u64) -> BlockKey {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    BlockKey(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_lines_of_numbers_and_ranges() {
        let requests = parse("0-2 9 # first\n\n# nothing\n5\n").unwrap();
        assert_eq!(requests, [vec![0, 1, 2, 9], vec![5]]);
        assert_eq!(parse("1\n2 x"), Err((2, "x".to_owned())));
        assert_eq!(parse("9-2"), Err((1, "9-2".to_owned())));
        assert!(parse("0-99999999999").is_err());
    }

    #[test]
    fn a_gap_ends_the_prefix() {
        let mut policy = Lru::default();
        let requests = [vec![1, 2, 3], vec![1, 4, 3], vec![1, 2, 3]];
        assert_eq!(count_hits(&mut policy, &requests, 100), 1 + 3);
    }

    #[test]
    fn scans_reach_an_lru_and_not_an_s3_fifo() {
        let mut text = String::new();
        for round in 0..100 {
            text += "0-9\n";
            text += &format!("{}-{}\n", 1000 + round * 60, 1059 + round * 60);
        }
        let requests = parse(&text).unwrap();
        let lru = judge("lru", &|| Box::<Lru>::default(), &requests, 50);
        let s3 = judge("s3-fifo", &|| Box::<S3Fifo>::default(), &requests, 50);
        assert_eq!((lru.hits, lru.scanned), (0, 6_000));
        assert_eq!(lru.hits_without_scans, 990);
        assert!(s3.scan_resistance > 0.9, "{s3:?}");
    }
}
