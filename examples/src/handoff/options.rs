//! What a run is asked to do, as values that also travel between its processes.

use std::path::PathBuf;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::fault::FaultSpec;
use super::turns::{DECODED_TOKENS, TurnOptions};

/// How the bytes travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Transport {
    /// Two processes that map the same sealed memory.
    #[default]
    Shm,
    /// A TCP connection.
    Tcp,
    /// Two processes between whose memories the kernel copies.
    Cma,
    /// UCX, in a build with the feature of this name.
    Ucx,
    /// libfabric, in a build with the feature of this name.
    Libfabric,
    /// The nearest of shm, cma and tcp that works.
    Auto,
    /// Threads of one process.
    Local,
}

/// Storage of the indexer keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IndexK {
    /// 16,384-byte pages, Hadamard-rotated.
    #[default]
    Bf16,
    /// 8,448-byte pages with one scale per row, Hadamard-rotated.
    Fp8,
    /// Plain rows of four bytes a channel, not rotated.
    F32,
}

/// Storage of the latents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Latent {
    /// 584-byte rows of e4m3, bf16 and ue8m0.
    #[default]
    PackedFp8,
    /// Plain rows of four bytes a channel.
    F32,
}

/// The detector that runs beside the comparison.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verify {
    /// Provenance and checksum of every page, before every read.
    #[default]
    Canary,
    /// Checksums once, when everything has landed.
    Checksum,
    /// None; the bits of the logits and rows still decide the verdict.
    Off,
}

impl Transport {
    /// The word of the command line and of the JSON.
    #[must_use]
    pub fn id(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Cma => "cma",
            Self::Ucx => "ucx",
            Self::Libfabric => "libfabric",
            Self::Auto => "auto",
            Self::Local => "local",
        }
    }
}

impl IndexK {
    /// The word of the command line and of the JSON.
    #[must_use]
    pub fn id(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::F32 => "f32",
        }
    }
}

impl Latent {
    /// The word of the command line and of the JSON.
    #[must_use]
    pub fn id(self) -> &'static str {
        match self {
            Self::PackedFp8 => "packed-fp8",
            Self::F32 => "f32",
        }
    }
}

impl Verify {
    /// The word of the command line and of the JSON.
    #[must_use]
    pub fn id(self) -> &'static str {
        match self {
            Self::Canary => "canary",
            Self::Checksum => "checksum",
            Self::Off => "off",
        }
    }
}

/// Capacity of the pools of one side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PoolPages {
    /// What the requests in flight need at most.
    #[default]
    Auto,
    /// So many usable logical pages; the null page is not counted.
    Pages(u32),
}

impl std::str::FromStr for PoolPages {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        match text.parse::<u32>() {
            Ok(pages) if pages > 0 => Ok(Self::Pages(pages)),
            _ => Err("expected auto or a number of pages from 1".to_owned()),
        }
    }
}

/// `--hold layer=L,ms=T`: layer L's last chunk is sent T ms later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    /// The layer, from 0.
    pub layer: u16,
    /// The delay.
    pub delay_ms: u64,
}

/// What both sides must know alike: model, formats, storage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostOptions {
    /// How the bytes travel.
    pub transport: Transport,
    /// Storage of the indexer keys.
    pub index_k: IndexK,
    /// Storage of the latents.
    pub latent: Latent,
    /// A checkpoint; `None` is the built-in tiny-v4.
    pub model: Option<PathBuf>,
    /// Weights of tiny-v4, prompts, moments of aborts.
    pub seed: u64,
    /// Capacity of the pools.
    pub pool_pages: PoolPages,
    /// The detector.
    pub verify: Verify,
    /// Bound of every wait for a peer that shows no progress.
    pub deadline_ms: u64,
    /// A shared secret; both sides prove that they know it.
    pub auth_token_file: Option<PathBuf>,
    /// The fault to plant, if the build can.
    pub fault: Option<FaultSpec>,
    /// Print `phase …` lines, for the kill test.
    pub phase_markers: bool,
    /// Where each side answers `kvgate-status`, at a socket of its name.
    pub status_dir: Option<PathBuf>,
    /// `-v` count.
    pub verbosity: u8,
}

/// What the prefill side asks for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PromptOptions {
    /// A text; `None` is the built-in chat.
    pub prompt_file: Option<PathBuf>,
    /// Tokens of every prompt; `None` is the whole text.
    pub tokens: Option<u32>,
    /// Tokens per forward pass of the prefill.
    pub chunk: u32,
    /// Tokens to decode.
    pub steps: u32,
    /// Requests in all.
    pub requests: u32,
    /// Requests in flight.
    pub concurrency: u32,
    /// Share of the requests that is aborted.
    pub cancel_share: f64,
    /// Delay of one layer.
    pub hold: Option<Hold>,
    /// Ids to use instead of a text and of what the model would say next.
    pub given: Option<GivenIds>,
    /// The requests are turns of conversations.
    pub turns: Option<TurnOptions>,
}

impl PromptOptions {
    /// Makes the requests the turns of conversations.
    pub fn converse(&mut self, turns: TurnOptions) {
        self.requests = turns.sessions.saturating_mul(turns.turns);
        self.steps = DECODED_TOKENS;
        self.turns = Some(turns);
    }
}

/// The ids of one request, from the first to the last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GivenIds {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Fed one by one after it.
    pub steps: Vec<u32>,
}

/// Where the decode side puts what it found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputOptions {
    /// Logits and ids as safetensors.
    pub out: Option<PathBuf>,
    /// The timeline.
    pub report: Option<PathBuf>,
    /// One JSON object on stdout.
    pub json: bool,
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The defaults of the command line.
    pub(crate) fn host() -> HostOptions {
        HostOptions {
            transport: Transport::Shm,
            index_k: IndexK::Bf16,
            latent: Latent::PackedFp8,
            model: None,
            seed: 1,
            pool_pages: PoolPages::Auto,
            verify: Verify::Canary,
            deadline_ms: 10_000,
            auth_token_file: None,
            fault: None,
            phase_markers: false,
            status_dir: None,
            verbosity: 0,
        }
    }

    /// One request.
    pub(crate) fn prompt() -> PromptOptions {
        PromptOptions {
            prompt_file: None,
            tokens: None,
            chunk: 256,
            steps: 8,
            requests: 1,
            concurrency: 1,
            cancel_share: 0.0,
            hold: None,
            given: None,
            turns: None,
        }
    }

    #[test]
    fn pool_pages_are_auto_or_a_number_from_1() {
        assert_eq!("auto".parse(), Ok(PoolPages::Auto));
        assert_eq!("40".parse(), Ok(PoolPages::Pages(40)));
        for text in ["0", "-1", "many", ""] {
            assert!(text.parse::<PoolPages>().is_err(), "{text}");
        }
    }
}
