//! What the launcher and its roles say to each other.

use serde::{Deserialize, Serialize};

use super::failure::Failure;
use super::options::{HostOptions, OutputOptions, PromptOptions};
use super::report::Report;
use super::timeline::Timeline;

/// From the launcher to a role.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum ToRole {
    /// The first message: everything the role must know.
    Start(Box<RoleStart>),
    /// To the prefill side: where the decode side listens.
    Connect {
        /// An address in the form of the parent module.
        address: String,
    },
    /// The verdict is printed; end.
    Finish,
}

/// The orders of a role.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RoleStart {
    /// The launcher; a role whose parent is another process ends.
    pub launcher_pid: u32,
    /// Model and formats.
    pub host: HostOptions,
    /// Prompts and steps.
    pub prompt: PromptOptions,
    /// Files and JSON.
    pub output: OutputOptions,
}

impl RoleStart {
    /// The orders of a reference that this very process starts; it hears prompts from decode only.
    #[must_use]
    pub fn of_reference(host: &HostOptions) -> Self {
        let prompt = PromptOptions {
            prompt_file: None,
            tokens: None,
            chunk: 256,
            steps: 0,
            requests: 1,
            concurrency: 1,
            cancel_share: 0.0,
            hold: None,
            given: None,
            turns: None,
        };
        let launcher_pid = std::process::id();
        Self {
            launcher_pid,
            host: host.clone(),
            prompt,
            output: OutputOptions::default(),
        }
    }
}

/// From a role to the launcher.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum FromRole {
    /// The decode side listens.
    Listening {
        /// An address in the form of the parent module.
        address: String,
    },
    /// The process runs; sent all the time.
    Alive,
    /// For the progress bar.
    Progress(Progress),
    /// The decode side's result.
    Report {
        /// The result.
        report: Box<Report>,
        /// What happened when.
        timeline: Box<Timeline>,
    },
    /// The role ends without a result.
    Failed(Failure),
}

/// How far a side has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Prompt tokens computed by the prefill side.
    pub prefill_tokens: u64,
    /// Prompt tokens in all.
    pub prefill_tokens_total: u64,
    /// Tokens decoded.
    pub decoded_tokens: u64,
    /// Tokens to decode in all.
    pub decoded_tokens_total: u64,
}
