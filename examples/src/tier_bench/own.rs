//! kvgate's tiers, and plain files, behind the two questions that a comparison asks.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Instant;

use kvgate_hicache::log::{Durability, LogConfig, SegmentLog};
use kvgate_hicache::tier::{MemoryTier, Tier};

use super::blocks::Blocks;
use super::measure::{failed, soon};
use crate::handoff::failure::Failure;

/// A store in this process.
pub(super) enum Own {
    /// Records, verified when they are read.
    Tier {
        /// Where the log is; in memory without it.
        folder: Option<PathBuf>,
        is_durable: bool,
        held: Option<(Box<dyn Tier>, Blocks)>,
    },
    /// A file a block; nothing but the length is looked at.
    Files {
        folder: PathBuf,
        is_durable: bool,
        held: Option<Blocks>,
    },
}

/// What was done.
pub(super) struct Done {
    pub(super) gbps: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) bad: u64,
}

impl Own {
    pub(super) fn memory() -> Own {
        Own::Tier {
            folder: None,
            is_durable: false,
            held: None,
        }
    }

    pub(super) fn log(folder: PathBuf, is_durable: bool) -> Own {
        Own::Tier {
            folder: Some(folder),
            is_durable,
            held: None,
        }
    }

    pub(super) fn files(folder: PathBuf, is_durable: bool) -> Own {
        Own::Files {
            folder,
            is_durable,
            held: None,
        }
    }

    /// Whether it looks at nothing but lengths.
    pub(super) fn is_bare(&self) -> bool {
        matches!(self, Own::Files { .. })
    }

    /// Stores so many blocks into an empty store.
    pub(super) fn put(&mut self, block_bytes: u64, count: u64) -> Result<Done, Failure> {
        let blocks = Blocks::new(block_bytes, count)?;
        let bytes = blocks.shape.payload_bytes();
        match self {
            Own::Tier {
                folder,
                is_durable,
                held,
            } => {
                // The memory of a tier that is full is used again; so is it here.
                let tier = match (folder, held.take()) {
                    (Some(folder), former) => {
                        drop(former);
                        open_log(folder, *is_durable, &blocks)?
                    }
                    (None, Some((tier, former))) if former.count() == count => {
                        emptied(tier, &former)?
                    }
                    (None, _) => Box::new(MemoryTier::new(count * blocks.shape.record_bytes())),
                };
                let done = timed(bytes, 0..count, |k| {
                    tier.write(&blocks.record(k), soon())
                        .map(|_| true)
                        .map_err(|error| failed("put", &error))
                });
                *held = Some((tier, blocks));
                done
            }
            Own::Files {
                folder,
                is_durable,
                held,
            } => {
                make_empty(folder)?;
                let done = timed(bytes, 0..count, |k| {
                    write_file(folder, k, blocks.payload(k), *is_durable)
                        .map(|()| true)
                        .map_err(|error| failed("put of files", &error))
                });
                *held = Some(blocks);
                done
            }
        }
    }

    /// Reads all of them in no order that a cache could guess, and looks at every byte afterwards.
    pub(super) fn get(&mut self, block_bytes: u64, count: u64) -> Result<Done, Failure> {
        let nothing = || failed("get", &"nothing was stored");
        let mut into = Vec::new();
        match self {
            Own::Tier { held, .. } => {
                let (tier, blocks) = held.as_ref().ok_or_else(nothing)?;
                let bytes = blocks.shape.payload_bytes();
                into.resize(bytes as usize, 0);
                let mut read = |k: u64| -> Result<bool, Failure> {
                    let found = tier.read(blocks.wanted(k), &mut into, soon());
                    let verified = found.map_err(|miss| failed("get", &miss))?;
                    Ok(verified.payload_bytes() == bytes)
                };
                let done = timed(
                    bytes,
                    (0..count).map(|step| blocks.shuffled(step)),
                    &mut read,
                )?;
                let bad = super::measure::count_bad(&**tier, blocks, 0..count);
                Ok(Done { bad, ..done })
            }
            Own::Files { folder, held, .. } => {
                let blocks = held.as_ref().ok_or_else(nothing)?;
                into.resize(block_bytes.max(blocks.shape.payload_bytes()) as usize, 0);
                let into = &mut into[..blocks.shape.payload_bytes() as usize];
                let read = |k: u64, into: &mut [u8]| -> std::io::Result<()> {
                    use std::io::Read;
                    File::open(folder.join(format!("block-{k}")))?.read_exact(into)
                };
                let order = (0..count).map(|step| blocks.shuffled(step));
                let done = timed(into.len() as u64, order, |k| {
                    read(k, into)
                        .map(|()| true)
                        .map_err(|error| failed("get of files", &error))
                })?;
                let is_bad = |k: &u64| read(*k, into).is_err() || into != blocks.payload(*k);
                let bad = (0..count).filter(is_bad).count() as u64;
                Ok(Done { bad, ..done })
            }
        }
    }
}

/// Removes every block; the tier keeps some of their memory for the next ones.
fn emptied(tier: Box<dyn Tier>, blocks: &Blocks) -> Result<Box<dyn Tier>, Failure> {
    for k in 0..blocks.count() {
        tier.remove(blocks.wanted(k).namespace, blocks.id(k), soon())
            .map_err(|error| failed("remove", &error))?;
    }
    Ok(tier)
}

fn open_log(folder: &Path, is_durable: bool, blocks: &Blocks) -> Result<Box<dyn Tier>, Failure> {
    make_empty(folder)?;
    let config = LogConfig {
        capacity_bytes: (blocks.count() * blocks.shape.record_bytes() * 2).max(512 << 20),
        durability: match is_durable {
            true => Durability::Batch,
            false => Durability::None,
        },
        ..LogConfig::default()
    };
    let log = SegmentLog::open_directory(folder, config);
    Ok(Box::new(log.map_err(|error| failed("open", &error))?))
}

fn make_empty(folder: &Path) -> Result<(), Failure> {
    let made = match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => std::fs::create_dir_all(folder),
    };
    made.map_err(|error| failed("an empty folder", &error))
}

fn write_file(folder: &Path, k: u64, bytes: &[u8], is_durable: bool) -> std::io::Result<()> {
    use std::io::Write;
    let draft = folder.join("draft");
    let mut file = File::create(&draft)?;
    file.write_all(bytes)?;
    if is_durable {
        file.sync_data()?;
    }
    std::fs::rename(&draft, folder.join(format!("block-{k}")))?;
    match is_durable {
        true => File::open(folder)?.sync_all(),
        false => Ok(()),
    }
}

fn timed(
    bytes: u64,
    order: impl Iterator<Item = u64>,
    mut one: impl FnMut(u64) -> Result<bool, Failure>,
) -> Result<Done, Failure> {
    let mut times = Vec::new();
    let mut bad = 0;
    let begun = Instant::now();
    for k in order {
        let at = Instant::now();
        bad += u64::from(!one(k)?);
        times.push(at.elapsed().as_secs_f64() * 1e6);
    }
    let seconds = begun.elapsed().as_secs_f64();
    let gbps = (bytes * times.len() as u64) as f64 / seconds / 1e9;
    times.sort_unstable_by(f64::total_cmp);
    let share = |percent: usize| {
        let index = (times.len() * percent / 100).min(times.len().saturating_sub(1));
        times.get(index).copied().unwrap_or(0.0)
    };
    Ok(Done {
        gbps,
        p50_us: share(50),
        p99_us: share(99),
        bad,
    })
}
