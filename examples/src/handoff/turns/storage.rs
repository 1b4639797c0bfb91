//! Where the prefixes of a run are kept beyond it: a directory on this host, and a store behind a network.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvgate_hicache::log::{LogConfig, SegmentLog};
use kvgate_hicache::storage::{
    CostConfig, Limit, Place, StorageConfig, StorageEnd, StorageTier, TierLimits,
};
use kvgate_hicache::tier::Tier;
use kvgate_hicache::{Error, ErrorKind, Hicache};
use kvgate_kvcache::identity::Namespace;
use kvgate_transfer::Deadline;
use serde::{Deserialize, Serialize};

use crate::handoff::console;
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::report::{StorageTierWork, StorageWork};

/// What all names in a remote store begin with.
#[cfg(feature = "redis")]
const REMOTE_PREFIX: &str = "kvgate";

/// Whether a prefix that a storage tier has is loaded or computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Restore {
    /// What comes sooner, by measured rates; loaded as long as they are not known.
    #[default]
    Measured,
    /// Always loaded.
    Always,
}

/// Where prefixes are kept beyond the process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StorageOptions {
    /// A directory for a segment log.
    pub hicache: Option<PathBuf>,
    /// The address of a store behind a network.
    pub remote: Option<String>,
    /// Whose prefixes they are: another salt finds none of them.
    pub salt: String,
    /// Whether they are loaded or computed.
    pub restore: Restore,
    /// Bytes per second out of each storage tier.
    pub read_limit: Option<u64>,
    /// Bytes per second into each.
    pub write_limit: Option<u64>,
    /// Bytes into each in 24 hours.
    pub wear_limit: Option<u64>,
}

impl StorageOptions {
    fn limits(&self) -> TierLimits {
        // A second's worth may pass at once.
        let limit = |bytes_per_s| Limit {
            bytes_per_s,
            burst_bytes: bytes_per_s,
        };
        TierLimits {
            read: self.read_limit.map(limit),
            write: self.write_limit.map(limit),
            wear_bytes_per_day: self.wear_limit,
        }
    }
}

/// The storage tiers of a run.
pub(crate) struct Stores {
    log: Option<Arc<SegmentLog>>,
    tiers: Vec<StorageTier>,
    cost: Option<CostConfig>,
    limits: TierLimits,
}

impl Stores {
    /// Opens what is asked for.
    ///
    /// # Errors
    /// `Locked` for a directory that another process has, `BadInput` for one that cannot be used and for an address
    /// that is none, `Unavailable` for a store that this build cannot reach.
    pub(crate) fn open(options: &StorageOptions) -> Result<Stores, Failure> {
        let mut stores = Stores {
            log: None,
            tiers: Vec::new(),
            cost: (options.restore == Restore::Measured).then(CostConfig::default),
            limits: options.limits(),
        };
        if let Some(path) = &options.hicache {
            let log = SegmentLog::open_directory(path, LogConfig::default());
            let log = Arc::new(log.map_err(|error| of_directory(path, &error))?);
            let tier: Arc<dyn Tier> = Arc::clone(&log) as _;
            let place = Place::Local;
            stores.tiers.push(StorageTier { tier, place });
            stores.log = Some(log);
        }
        if let Some(url) = &options.remote {
            let (tier, place) = (remote(url)?, Place::Remote);
            stores.tiers.push(StorageTier { tier, place });
        }
        Ok(stores)
    }

    /// Names of the tiers in every output, nearest first.
    pub(crate) fn names(&self) -> Vec<&'static str> {
        self.tiers.iter().map(|tier| name_of(tier.place)).collect()
    }

    /// Puts the tiers, if there are any, behind the host tier.
    ///
    /// # Errors
    /// That of a tier that cannot hold the records of this model.
    pub(crate) fn attach(&self, cache: Hicache, namespace: Namespace) -> Result<Hicache, Failure> {
        if self.tiers.is_empty() {
            return Ok(cache);
        }
        let config = StorageConfig {
            cost: self.cost,
            limits: vec![self.limits; self.tiers.len()],
            ..StorageConfig::new(self.tiers.clone())
        };
        let attached = cache.with_storage(namespace, config);
        attached.map_err(|error| Failure::new(FailureKind::BadInput, error.to_string()))
    }

    /// What the tiers did, after [`Hicache::shutdown`] has let go of them. A log that cannot be closed is opened as
    /// after a crash the next time, so that is a note.
    pub(crate) fn close(self, end: &StorageEnd, deadline: Deadline) -> StorageWork {
        let work = StorageWork {
            tiers: self.work_of(end),
            is_drained: end.is_drained,
            stores_dropped: end.counts.stores.dropped,
            stores_failed: end.counts.stores.failed,
            fetches_published: end.counts.fetches.published,
            fetches_shortened: end.counts.fetches.shortened,
            fetches_failed: end.counts.fetches.failed,
            fetches_late: end.counts.fetches.late,
            fetches_computed: end.counts.fetches.computed,
            fetches_trimmed: end.counts.fetches.trimmed,
            prefill_tokens_per_s: end.rates.as_ref().and_then(|r| r.prefill_tokens_per_s),
        };
        drop(self.tiers);
        let log = self.log.map(Arc::try_unwrap);
        match log {
            None => {}
            Some(Err(_)) => console::note("the directory of --hicache is still in use: not closed"),
            Some(Ok(log)) => {
                if let Err(error) = log.close(deadline) {
                    console::note(&format!("closing the directory of --hicache: {error}"));
                }
            }
        }
        work
    }

    fn work_of(&self, end: &StorageEnd) -> Vec<StorageTierWork> {
        let rate = |at: usize| *end.rates.as_ref()?.read_bytes_per_s.get(at)?;
        let of = |(at, tier): (usize, &StorageTier)| {
            let counts = end.counts.tiers.get(at).cloned().unwrap_or_default();
            let misses = counts.misses.iter();
            StorageTierWork {
                tier: name_of(tier.place).to_owned(),
                store: counts.name,
                stored: counts.stored,
                stored_bytes: counts.stored_bytes,
                present: counts.present,
                failed: counts.failed,
                limited: counts.limited,
                today_bytes: counts.today_bytes,
                read_bytes_per_s: rate(at),
                read_records: counts.read_records,
                read_bytes: counts.read_bytes,
                read_ms: counts.read_us as f64 / 1_000.0,
                misses: misses.map(|(cause, n)| ((*cause).to_owned(), *n)).collect(),
            }
        };
        self.tiers.iter().enumerate().map(of).collect()
    }
}

fn name_of(place: Place) -> &'static str {
    match place {
        Place::Local => "storage",
        Place::Remote => "remote",
    }
}

fn of_directory(path: &Path, error: &Error) -> Failure {
    let kind = match error.kind() {
        ErrorKind::Locked { .. } => FailureKind::Locked,
        _ => FailureKind::BadInput,
    };
    let text = format!("--hicache: {error}");
    Failure::new(kind, text).with_field("hicache", path.display())
}

/// The addresses that this build can reach.
fn known_stores() -> String {
    let redis = cfg!(feature = "redis").then_some("redis://HOST:PORT/DB");
    let object = [
        "s3://BUCKET/PREFIX",
        "gs://BUCKET/PREFIX",
        "az://CONTAINER/PREFIX",
        "file:///FOLDER",
    ];
    let object = object.into_iter().filter(|_| cfg!(feature = "object"));
    let known: Vec<&str> = redis.into_iter().chain(object).collect();
    match known.is_empty() {
        true => "no store: this build has none".to_owned(),
        false => known.join(", "),
    }
}

/// The tier at an address.
fn remote(url: &str) -> Result<Arc<dyn Tier>, Failure> {
    let refuse = |kind, text: String| Err(Failure::new(kind, text).with_field("remote", url));
    match url.split_once("://") {
        #[cfg(feature = "redis")]
        Some(("redis" | "rediss", _)) => {
            match kvgate_hicache::tier::RedisTier::new(url, REMOTE_PREFIX) {
                Ok(tier) => Ok(Arc::new(tier)),
                Err(error) => refuse(FailureKind::BadInput, format!("--remote {url}: {error}")),
            }
        }
        #[cfg(feature = "object")]
        Some((scheme @ ("s3" | "gs" | "az" | "file"), _)) => {
            match super::object::open(scheme, url) {
                Ok(tier) => Ok(Arc::new(tier)),
                Err(error) => refuse(FailureKind::BadInput, format!("--remote {url}: {error}")),
            }
        }
        _ => {
            let known = known_stores();
            let text = format!("--remote is {url}, expected {known}");
            refuse(FailureKind::Usage, text)
        }
    }
}
