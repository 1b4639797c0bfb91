//! `kvgate-status`: reads the socket that `Agent::serve_status` made.

use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use kvgate_transfer::AgentStatus;
use serde_json::json;

use crate::handoff::failure::{Failure, FailureKind};
use crate::tool::Finished;

/// Name of the JSON object.
pub const SCHEMA: &str = "kvgate.status/1";
/// How long an agent may take to say the next bytes.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Prints what an agent of another process has in flight: transfers, peers, flights, regions
#[derive(Parser, Debug)]
#[command(name = "kvgate-status", version)]
pub struct Args {
    /// The socket of the agent, such as DIR/decode.sock of `pd-handoff --status-dir DIR`
    socket: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Asks and prints.
pub fn run(args: &Args) -> Result<Finished, Failure> {
    let text = ask(&args.socket).map_err(|error| {
        let kind = match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => FailureKind::DeadlineExceeded,
            _ => FailureKind::BadInput,
        };
        let mut failure = Failure::new(kind, format!("{}: {error}", args.socket.display()));
        failure.field = Some("socket".into());
        failure.value = Some(args.socket.display().to_string());
        failure
    })?;
    let status: AgentStatus = serde_json::from_str(&text).map_err(|error| {
        let message = format!("{} is no agent: {error}", args.socket.display());
        Failure::new(FailureKind::BadInput, message)
    })?;
    Ok(Finished {
        json: json!({ "schema": SCHEMA, "status": status }),
        lines: status.to_string().lines().map(str::to_owned).collect(),
        exit_code: 0,
    })
}

fn ask(socket: &Path) -> std::io::Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(ANSWER_LIMIT))?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}
