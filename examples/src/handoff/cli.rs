//! The command line of `pd-handoff`.

use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue};
use clap::{Args, Parser, Subcommand, ValueEnum};

use super::failure::{Failure, FailureKind};
use super::fault::FaultSpec;
use super::options::{
    Hold, HostOptions, IndexK, Latent, OutputOptions, PoolPages, PromptOptions, Transport, Verify,
};
use super::turns::{DECODED_TOKENS, Restore, StorageOptions, TierPages, TurnLengths, TurnOptions};
use super::version;

/// Tokens that a request decodes unless the user says otherwise.
const DEFAULT_STEPS: u32 = 64;

/// Hands the KV cache of a prompt from a prefill process to a decode process and compares every logit
/// with a run in one process.
#[derive(Parser, Debug)]
#[command(name = "pd-handoff", version = version::LINE, args_conflicts_with_subcommands = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Option<CliCommand>,
    #[command(flatten)]
    host: HostArgs,
    #[command(flatten)]
    prompt: PromptArgs,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    turns: TurnArgs,
    /// How the bytes travel
    #[arg(long, value_enum, default_value_t)]
    transport: Transport,
    /// Write the built-in model (config.json, model.safetensors) into DIR and end
    #[arg(long, value_name = "DIR")]
    dump_model: Option<PathBuf>,
}

#[derive(Subcommand, Debug)]
enum CliCommand {
    /// The decode side on its own host: waits for a prefill side, compares, prints the verdict
    Decode(DecodeArgs),
    /// The prefill side on its own host: takes the prompt options, ends with the code of the decode side
    Prefill(PrefillArgs),
    /// One process of a run, started by the launcher
    #[command(hide = true)]
    Role {
        /// Which one
        role: RoleName,
    },
}

/// A process of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum)]
pub enum RoleName {
    /// Computes the prompts and sends their cache.
    Prefill,
    /// Receives the caches, decodes, compares.
    Decode,
    /// Computes every request in one process.
    Reference,
}

impl RoleName {
    /// The word of the `pids` line.
    #[must_use]
    pub fn id(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Reference => "reference",
        }
    }
}

#[derive(Args, Debug)]
struct HostArgs {
    /// Storage of the indexer keys
    #[arg(long, value_enum, default_value_t)]
    index_k: IndexK,
    /// Storage of the latents
    #[arg(long, value_enum, default_value_t)]
    latent: Latent,
    /// A hub-named checkpoint [default: the built-in tiny-v4]
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Weights of tiny-v4, prompts, aborts
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Usable logical pages per side, or auto
    #[arg(long, value_name = "K|auto", default_value = "auto")]
    pool_pages: PoolPages,
    /// Run-time detector
    #[arg(long, value_enum, default_value_t)]
    verify: Verify,
    /// Bound of every wait for a peer that shows no progress
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=86_400_000))]
    deadline_ms: u64,
    #[cfg(feature = "fault-injection")]
    #[command(flatten)]
    fault: FaultArgs,
    /// Print `phase NAME` on stderr when a process enters a phase
    #[arg(long, hide = true)]
    phase_markers: bool,
    /// Each side answers kvgate-status at a socket in this directory: prefill.sock, decode.sock
    #[arg(long, value_name = "DIR")]
    status_dir: Option<PathBuf>,
    /// Log more (twice: debug); RUST_LOG wins
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,
}

#[cfg(feature = "fault-injection")]
#[derive(Args, Debug)]
struct FaultArgs {
    /// Plant a fault: KIND[,component=C][,layer=L][,page=P][,request=R], or none
    #[arg(long, value_name = "KIND", value_parser = parse_fault, default_value = "none")]
    fault: FaultChoice,
    /// Draws the parts of the place that --fault leaves out
    #[arg(long, default_value_t = 1)]
    fault_seed: u64,
    /// Send the last chunk of layer L later: layer=L,ms=T
    #[arg(long, value_name = "layer=L,ms=T", value_parser = parse_hold)]
    hold: Option<Hold>,
}

#[derive(Args, Debug)]
struct PromptArgs {
    /// A text, taken as plain bytes [default: a built-in chat with tool definitions]
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// The first N tokens of the prompt, repeated as often as needed [default: the whole prompt]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    tokens: Option<u32>,
    /// Tokens per forward pass of the prefill
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    chunk: u32,
    /// Tokens to decode [default: 64]
    #[arg(long)]
    steps: Option<u32>,
    /// Requests in all, with different prompts [default: 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    requests: Option<u32>,
    /// Requests in flight [default: 1]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1_024))]
    concurrency: Option<u32>,
    /// Share of the requests that is aborted, 0 to 1
    #[arg(long, default_value_t = 0.0, value_parser = parse_share)]
    cancel_share: f64,
}

/// Conversations over the tiers of the cache.
#[derive(Args, Debug)]
struct TurnArgs {
    /// Conversations that begin alike, over a device pool and a host tier of the prefill side [default: 1]
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u32).range(1..=1_000))]
    sessions: Option<u32>,
    /// Turns of each conversation; every one adds about 300 tokens and decodes 16 [default: 1]
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..=1_000))]
    turns: Option<u32>,
    /// Tokens that the users say, conversation by conversation and turn by turn [default: 300 +- 40]
    #[arg(long, value_name = "A..B|A,B,…")]
    turn_tokens: Option<TurnLengths>,
    /// Logical pages of the device pool, or small: an eighth of what the run stores [default: everything fits]
    #[arg(long, value_name = "N|small")]
    device_pages: Option<TierPages>,
    /// Logical pages of the host tier, or small: a half of what the run stores [default: everything fits]
    #[arg(long, value_name = "N|small")]
    host_pages: Option<TierPages>,
    /// Keep prefixes in this directory beyond the run, and go on from those that are there; or off [default: off]
    #[arg(long, value_name = "DIR|off")]
    hicache: Option<PathBuf>,
    /// Keep prefixes in a store behind a network too: redis://HOST:PORT/DB, or in a build with the feature object
    /// s3://BUCKET/PREFIX, gs://, az:// or file:///FOLDER, whose credentials are in the usual variables
    #[arg(long, value_name = "URL")]
    remote: Option<String>,
    /// Whose prefixes they are: those of another salt are not found
    #[arg(long, value_name = "TEXT")]
    salt: Option<String>,
    /// Whether a prefix that the directory or the store has is loaded or computed: what comes sooner by measured rates, or
    /// always loaded
    #[arg(long, value_enum, value_name = "HOW", default_value = "measured")]
    restore: Restore,
    /// Bytes per second out of the directory, and out of the store; what comes too late is computed
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1..))]
    read_limit: Option<u64>,
    /// Bytes per second into the directory, and into the store; no request waits for it
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1..))]
    write_limit: Option<u64>,
    /// Bytes into the directory, and into the store, in a day; the rest is not stored
    #[arg(long, value_name = "BYTES")]
    wear_limit: Option<u64>,
    /// Compare every turn bit for bit with a run without a cache
    #[arg(long)]
    verify_cold: bool,
}

#[derive(Args, Debug)]
struct OutputArgs {
    /// Write the timeline as one static HTML file
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// One JSON object on stdout
    #[arg(long)]
    json: bool,
    /// Write prompt_ids, output_ids and decode_logits (one request)
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

#[derive(Args, Debug)]
struct DecodeArgs {
    /// HOST:PORT to listen on; port 0 takes a free one
    #[arg(long, value_name = "ADDR")]
    listen: String,
    #[command(flatten)]
    host: HostArgs,
    #[command(flatten)]
    output: OutputArgs,
    #[command(flatten)]
    remote: RemoteArgs,
}

#[derive(Args, Debug)]
struct PrefillArgs {
    /// HOST:PORT of the decode side
    #[arg(long, value_name = "ADDR")]
    connect: String,
    #[command(flatten)]
    host: HostArgs,
    #[command(flatten)]
    prompt: PromptArgs,
    /// One JSON object on stdout
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    remote: RemoteArgs,
}

#[derive(Args, Debug)]
struct RemoteArgs {
    /// How the bytes travel; shm and cma reach only a peer on this host
    #[arg(long, value_enum, default_value_t = Transport::Tcp)]
    transport: Transport,
    /// A shared secret; needed for any address that is not loopback
    #[arg(long, value_name = "FILE")]
    auth_token_file: Option<PathBuf>,
}

/// What the command line asks for.
#[derive(Debug)]
pub enum Command {
    /// Start everything on this host.
    Launch {
        /// Model and formats.
        host: HostOptions,
        /// Prompts and steps.
        prompt: PromptOptions,
        /// Files and JSON.
        output: OutputOptions,
    },
    /// Write the built-in model.
    DumpModel {
        /// The folder.
        dir: PathBuf,
        /// Seed of the weights.
        seed: u64,
        /// One JSON object on stdout.
        json: bool,
    },
    /// The decode side alone.
    Decode {
        /// HOST:PORT.
        listen: String,
        /// Model and formats.
        host: HostOptions,
        /// Files and JSON.
        output: OutputOptions,
    },
    /// The prefill side alone.
    Prefill {
        /// HOST:PORT.
        connect: String,
        /// Model and formats.
        host: HostOptions,
        /// Prompts and steps.
        prompt: PromptOptions,
        /// One JSON object on stdout.
        json: bool,
    },
    /// A child of the launcher.
    Role(RoleName),
}

/// A command line that is not run: text for the terminal, or a usage error.
#[derive(Debug)]
pub enum Refusal {
    /// `--help` or `--version`.
    Text(String),
    /// Wrong usage.
    Usage {
        /// For stderr.
        text: String,
        /// For the JSON object.
        failure: Failure,
    },
    /// Options that exclude each other.
    Conflict {
        /// The option that is not carried out.
        failure: Failure,
        /// One JSON object on stdout.
        json: bool,
    },
}

/// Parses the arguments after the program's name.
pub fn parse(args: &[String]) -> Result<Command, Refusal> {
    let name = std::iter::once("pd-handoff".to_owned());
    match Cli::try_parse_from(name.chain(args.iter().cloned())) {
        Ok(cli) => cli.into_command(),
        Err(error) if error.exit_code() == 0 => Err(Refusal::Text(error.to_string())),
        Err(error) => Err(Refusal::Usage {
            text: error.to_string(),
            failure: usage_failure(&error),
        }),
    }
}

fn usage_failure(error: &clap::Error) -> Failure {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        Some(ContextValue::Strings(texts)) => Some(texts.join(", ")),
        _ => None,
    };
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    let mut failure = Failure::new(FailureKind::Usage, line.trim_start_matches("error: "));
    failure.field =
        context(ContextKind::InvalidArg).or_else(|| context(ContextKind::InvalidSubcommand));
    failure.value = context(ContextKind::InvalidValue);
    failure
}

impl Cli {
    fn into_command(self) -> Result<Command, Refusal> {
        Ok(match self.command {
            None => match self.dump_model {
                Some(dir) => Command::DumpModel {
                    dir,
                    seed: self.host.seed,
                    json: self.output.json,
                },
                None => {
                    let json = self.output.json;
                    let turns = self.turns.into_options();
                    if turns.is_some() {
                        self.prompt
                            .refuse_in_conversations(&self.host)
                            .map_err(|failure| Refusal::Conflict { failure, json })?;
                    }
                    let mut prompt = self.prompt.into_options(&self.host);
                    if let Some(turns) = turns {
                        prompt.converse(turns);
                    }
                    Command::Launch {
                        host: self.host.into_options(self.transport, None),
                        prompt,
                        output: self.output.into_options(),
                    }
                }
            },
            Some(CliCommand::Decode(args)) => Command::Decode {
                listen: args.listen,
                host: args
                    .host
                    .into_options(args.remote.transport, args.remote.auth_token_file),
                output: args.output.into_options(),
            },
            Some(CliCommand::Prefill(args)) => Command::Prefill {
                connect: args.connect,
                prompt: args.prompt.into_options(&args.host),
                host: args
                    .host
                    .into_options(args.remote.transport, args.remote.auth_token_file),
                json: args.json,
            },
            Some(CliCommand::Role { role }) => Command::Role(role),
        })
    }
}

impl HostArgs {
    fn into_options(self, transport: Transport, auth_token_file: Option<PathBuf>) -> HostOptions {
        let fault = self.fault();
        HostOptions {
            transport,
            index_k: self.index_k,
            latent: self.latent,
            model: self.model,
            seed: self.seed,
            pool_pages: self.pool_pages,
            verify: self.verify,
            deadline_ms: self.deadline_ms,
            auth_token_file,
            fault,
            phase_markers: self.phase_markers,
            status_dir: self.status_dir,
            verbosity: self.verbose,
        }
    }

    fn fault(&self) -> Option<FaultSpec> {
        #[cfg(feature = "fault-injection")]
        return self.fault.fault.0.clone().map(|spec| FaultSpec {
            seed: self.fault.fault_seed,
            ..spec
        });
        #[cfg(not(feature = "fault-injection"))]
        None
    }

    fn hold(&self) -> Option<Hold> {
        #[cfg(feature = "fault-injection")]
        return self.fault.hold;
        #[cfg(not(feature = "fault-injection"))]
        None
    }
}

impl PromptArgs {
    /// What the conversations themselves decide cannot be asked for beside them.
    fn refuse_in_conversations(&self, host: &HostArgs) -> Result<(), Failure> {
        let refuse = |field: &str, value: String, instead: &str| {
            let option = field.replace('_', "-");
            let text = format!("--{option} {value} is not for conversations: {instead}");
            Err(Failure::new(FailureKind::Usage, text).with_field(field, value))
        };
        if let Some(tokens) = self.tokens {
            let instead = "--turn-tokens gives what each turn adds";
            return refuse("tokens", tokens.to_string(), instead);
        }
        if let Some(steps) = self.steps {
            let instead = format!("each turn decodes {DECODED_TOKENS} tokens");
            return refuse("steps", steps.to_string(), &instead);
        }
        if let Some(requests) = self.requests {
            let instead = "--sessions and --turns say how many there are";
            return refuse("requests", requests.to_string(), instead);
        }
        if let PoolPages::Pages(pages) = host.pool_pages {
            let instead = "--device-pages gives the pages of both sides";
            return refuse("pool_pages", pages.to_string(), instead);
        }
        Ok(())
    }

    fn into_options(self, host: &HostArgs) -> PromptOptions {
        // A late write needs an aborted request and another one that gets its pages.
        let is_late_write = host.fault().is_some_and(|fault| fault.kind.is_late_write());
        let (requests, concurrency) = if is_late_write && self.requests.is_none() {
            (8, 4)
        } else {
            (1, 1)
        };
        PromptOptions {
            prompt_file: self.prompt_file,
            tokens: self.tokens,
            chunk: self.chunk,
            steps: self.steps.unwrap_or(DEFAULT_STEPS),
            requests: self.requests.unwrap_or(requests),
            concurrency: self.concurrency.unwrap_or(concurrency),
            cancel_share: if is_late_write {
                0.0
            } else {
                self.cancel_share
            },
            hold: host.hold(),
            given: None,
            turns: None,
        }
    }
}

impl TurnArgs {
    /// `None` when none of the options was given.
    fn into_options(self) -> Option<TurnOptions> {
        let storage = StorageOptions {
            hicache: self.hicache.filter(|path| path.as_os_str() != "off"),
            remote: self.remote,
            salt: self.salt.unwrap_or_default(),
            restore: self.restore,
            read_limit: self.read_limit,
            write_limit: self.write_limit,
            wear_limit: self.wear_limit,
        };
        let is_asked = self.sessions.is_some()
            || self.turns.is_some()
            || self.turn_tokens.is_some()
            || self.device_pages.is_some()
            || self.host_pages.is_some()
            || storage.hicache.is_some()
            || storage.remote.is_some()
            || !storage.salt.is_empty()
            || self.verify_cold;
        is_asked.then(|| TurnOptions {
            sessions: self.sessions.unwrap_or(1),
            turns: self.turns.unwrap_or(1),
            lengths: self.turn_tokens.unwrap_or_default(),
            device_pages: self.device_pages.unwrap_or_default(),
            host_pages: self.host_pages.unwrap_or_default(),
            storage,
            is_verified: self.verify_cold,
        })
    }
}

impl OutputArgs {
    fn into_options(self) -> OutputOptions {
        OutputOptions {
            out: self.out,
            report: self.report,
            json: self.json,
        }
    }
}

fn parse_share(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("expected a number from 0 to 1".to_owned()),
    }
}

/// `--fault none` is a value of its own: the option is there, nothing is planted.
#[cfg(feature = "fault-injection")]
#[derive(Clone, Debug)]
struct FaultChoice(Option<FaultSpec>);

#[cfg(feature = "fault-injection")]
fn parse_fault(text: &str) -> Result<FaultChoice, String> {
    if text == "none" {
        return Ok(FaultChoice(None));
    }
    text.parse().map(|spec| FaultChoice(Some(spec)))
}

#[cfg(feature = "fault-injection")]
fn parse_hold(text: &str) -> Result<Hold, String> {
    let mut layer = None;
    let mut delay_ms = None;
    for part in text.split(',') {
        match part.split_once('=') {
            Some(("layer", value)) => layer = value.parse().ok(),
            Some(("ms", value)) => delay_ms = value.parse().ok(),
            _ => return Err(format!("{part:?} is neither layer=L nor ms=T")),
        }
    }
    match (layer, delay_ms) {
        (Some(layer), Some(delay_ms)) => Ok(Hold { layer, delay_ms }),
        _ => Err("expected layer=L,ms=T".to_owned()),
    }
}
