//! What is measured, as values that also travel to the other process.

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::handoff::options::IndexK;

/// The path that the bytes take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Backend {
    /// The best one for two processes of this host.
    #[default]
    Auto,
    /// Two agents of one process.
    Local,
    /// Two processes that map each other's pools.
    Shm,
    /// Copies from process to process by the kernel.
    Cma,
    /// A stream socket.
    Tcp,
    /// The UCX library.
    Ucx,
    /// The libfabric library.
    Libfabric,
}

/// Who moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// From the peer to here.
    Read,
    /// From here to the peer.
    #[default]
    Write,
}

/// How the pages of a request lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// In different random order on the two sides.
    #[default]
    Random,
    /// One after the other, so that they join.
    Sequential,
}

/// Which pages are compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Check {
    /// Every page of every request; the content changes before each.
    Full,
    /// Every page of requests at both ends and between the slices; the content changes before each.
    #[default]
    Sample,
    /// None.
    Off,
}

/// A model whose cache is moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ModelName {
    /// DeepSeek-V4-Flash.
    Flash,
    /// DeepSeek-V4-Pro.
    Pro,
}

/// The rows of a run: one for each length of a page and number of pages.
#[derive(Clone, Debug, Args)]
pub struct Loads {
    /// The path that the bytes take
    #[arg(long, value_enum, default_value_t)]
    pub backend: Backend,
    /// Who moves
    #[arg(long, value_enum, default_value_t)]
    op: Direction,
    /// Bytes of a page; a comma list makes several rows
    #[arg(long, value_name = "B", default_value = "8448", value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=1 << 30))]
    page_bytes: Vec<u64>,
    /// Pages of a request; a comma list makes several rows
    #[arg(long, value_name = "N", default_value = "1024", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1 << 24))]
    pages: Vec<u32>,
    /// How the pages of a request lie
    #[arg(long, value_enum, default_value_t)]
    order: Order,
    /// Requests in flight
    #[arg(long, value_name = "C", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    concurrency: u32,
    /// Which pages are compared
    #[arg(long, value_enum, default_value_t)]
    check: Check,
    /// Seconds of slices
    #[arg(long, value_name = "SECONDS", default_value_t = 3.0, value_parser = seconds)]
    duration: f64,
    /// Move the cache of a prompt of this model instead of equal pages
    #[arg(long, value_enum, requires = "tokens", conflicts_with_all = ["page_bytes", "pages"])]
    model: Option<ModelName>,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", requires = "model", value_parser = clap::value_parser!(u32).range(1..=1 << 21))]
    tokens: Option<u32>,
    /// Storage of the indexer keys
    #[arg(
        long,
        value_enum,
        requires = "model",
        value_name = "F",
        default_value_t
    )]
    index_k: IndexK,
    /// Least size of a pool: a request touches few of its pages
    #[arg(long, value_name = "MIB", default_value_t = 256, value_parser = clap::value_parser!(u64).range(1..=1 << 16))]
    pool_mib: u64,
    /// Only slices of the engine, for a profiler: no plain copies, no bare loop, no ratios
    #[arg(long)]
    engine_only: bool,
    /// Change a page of the target behind the back of every request that is compared
    #[cfg(feature = "fault-injection")]
    #[arg(long, conflicts_with = "peer")]
    damage_page: bool,
}

/// What one row of figures is about.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Load {
    /// Who moves.
    pub op: Direction,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Pages of a request.
    pub pages: u32,
    /// How the pages of a request lie.
    pub order: Order,
    /// Requests in flight.
    pub concurrency: u32,
    /// Which pages are compared.
    pub check: Check,
    /// Seconds of slices.
    pub duration: f64,
    /// The model whose cache is moved instead of equal pages.
    pub model: Option<ModelName>,
    /// Tokens of the prompt.
    pub tokens: Option<u32>,
    /// Storage of the indexer keys.
    pub index_k: IndexK,
    /// Least size of a pool.
    pub pool_mib: u64,
    /// Only slices of the engine.
    pub engine_only: bool,
    /// Change a page of the target behind the back of every request that is compared.
    #[cfg(feature = "fault-injection")]
    pub damage_page: bool,
}

impl Loads {
    /// One load after the other.
    pub fn each(&self) -> impl Iterator<Item = Load> {
        let sizes = match self.model {
            Some(_) => vec![(0, 0)],
            None => {
                let pages = |bytes| self.pages.iter().map(move |pages| (bytes, *pages));
                self.page_bytes
                    .iter()
                    .flat_map(|bytes| pages(*bytes))
                    .collect()
            }
        };
        sizes.into_iter().map(|(page_bytes, pages)| Load {
            op: self.op,
            page_bytes,
            pages,
            order: self.order,
            concurrency: self.concurrency,
            check: self.check,
            duration: self.duration,
            model: self.model,
            tokens: self.tokens,
            index_k: self.index_k,
            pool_mib: self.pool_mib,
            engine_only: self.engine_only,
            #[cfg(feature = "fault-injection")]
            damage_page: self.damage_page,
        })
    }
}

/// Parses a length of time.
pub fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= 3600.0 => Ok(seconds),
        _ => Err("expected seconds, more than 0 and at most 3600".to_owned()),
    }
}

impl Backend {
    /// The word of the command line and of the JSON.
    #[must_use]
    pub fn id(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Local => "local",
            Self::Shm => "shm",
            Self::Cma => "cma",
            Self::Tcp => "tcp",
            Self::Ucx => "ucx",
            Self::Libfabric => "libfabric",
        }
    }
}

impl Direction {
    /// The word of the command line and of the JSON.
    #[must_use]
    pub fn id(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
        }
    }
}

impl Order {
    /// The word of the command line and of the JSON.
    #[must_use]
    pub fn id(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::Sequential => "sequential",
        }
    }
}

impl Check {
    /// The word of the command line and of the JSON.
    #[must_use]
    pub fn id(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Sample => "sample",
            Self::Off => "off",
        }
    }
}

impl ModelName {
    /// The word of the command line and of the JSON.
    #[must_use]
    pub fn id(self) -> &'static str {
        match self {
            Self::Flash => "flash",
            Self::Pro => "pro",
        }
    }
}
