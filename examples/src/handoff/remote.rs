//! The two sides on hosts of their own: `pd-handoff decode --listen` and `pd-handoff prefill --connect`.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use super::channel::{self, ChannelReceiver, ChannelSender};
use super::child::{self, RoleProcess};
use super::cli::RoleName;
use super::console::{self, Console};
use super::control::{RoleStart, ToRole};
use super::failure::Failure;
use super::html::ReportFile;
use super::observer::Alone;
use super::options::{HostOptions, OutputOptions, PromptOptions};
use super::report::{Pids, Report};
use super::timeline::Timeline;
use super::{decode, endpoint, out, prefill, resolve, signals};

/// Runs the decode side and returns the exit code.
#[must_use]
pub fn decode(listen: &str, host: &HostOptions, output: &OutputOptions) -> u8 {
    let console = Arc::new(Console::new(output.json));
    match try_decode(&console, listen, host, output) {
        Ok(code) => code,
        Err(failure) => {
            console.failure(&failure, None);
            failure.exit_code()
        }
    }
}

fn try_decode(
    console: &Arc<Console>,
    listen: &str,
    host: &HostOptions,
    output: &OutputOptions,
) -> Result<u8, Failure> {
    end_on_signals(console)?;
    resolve::check_host(host)?;
    if let Some(path) = &output.out {
        out::check(path)?;
    }
    let listening = endpoint::listen(listen, host.transport, host.auth_token_file.is_some())?;
    let report_file = output
        .report
        .as_deref()
        .map(ReportFile::create)
        .transpose()?;
    let reference = Reference::start(host)?;
    let observer = Arc::new(Alone::new(Arc::clone(console)));
    let mut report_file = report_file;
    let mut code = 0;
    let mut conclude = |mut report: Report, timeline: Timeline| {
        let pid = std::process::id();
        let prefill = report.pids.prefill;
        report.pids = Pids {
            launcher: pid,
            decode: pid,
            reference: reference.process.pid(),
            prefill,
        };
        let (said, text) = match report_file
            .take()
            .map_or(Ok(()), |file| file.write(&report, &timeline))
        {
            Ok(()) => {
                console.report(&report);
                (report.exit_code(), report.verdict_line())
            }
            Err(failure) => {
                console.failure(&failure, Some(report.pids));
                (failure.exit_code(), format!("verdict: INVALID ({failure})"))
            }
        };
        code = said;
        (said, text)
    };
    let listen = decode::Listen::At(listening);
    let link = reference
        .link
        .try_clone()
        .map_err(|error| Failure::internal(format!("job socket: {error}")))?;
    decode::run(host, output, listen, link, observer, &mut conclude)?;
    Ok(code)
}

/// The run to compare with. It is killed when the value is dropped, and by the kernel when this process
/// ends in any other way.
struct Reference {
    process: RoleProcess,
    link: UnixStream,
    /// The reference ends when this socket does.
    _control: (ChannelSender, ChannelReceiver),
}

impl Reference {
    fn start(host: &HostOptions) -> Result<Self, Failure> {
        Self::try_start(host)
            .map_err(|error| Failure::internal(format!("cannot start the reference: {error}")))
    }

    fn try_start(host: &HostOptions) -> std::io::Result<Self> {
        let (link, reference_link) = UnixStream::pair()?;
        let (ours, theirs) = UnixStream::pair()?;
        let process = child::spawn(RoleName::Reference, theirs, Some(reference_link))?;
        let (pid, reference) = (std::process::id(), process.pid());
        console::note(&format!(
            "pids launcher={pid} decode={pid} reference={reference}"
        ));
        let control = channel::split(ours, Duration::from_millis(host.deadline_ms))?;
        control
            .0
            .send(&ToRole::Start(Box::new(RoleStart::of_reference(host))))?;
        Ok(Self {
            process,
            link,
            _control: control,
        })
    }
}

/// Runs the prefill side and returns the exit code that the decode side reports.
#[must_use]
pub fn prefill(connect: &str, host: &HostOptions, prompt: &PromptOptions, is_json: bool) -> u8 {
    let console = Arc::new(Console::new(is_json));
    match try_prefill(&console, connect, host, prompt) {
        Ok(finish) => {
            console.peer_verdict(finish.code, &finish.text);
            finish.code
        }
        Err(failure) => {
            console.failure(&failure, None);
            failure.exit_code()
        }
    }
}

fn try_prefill(
    console: &Arc<Console>,
    connect: &str,
    host: &HostOptions,
    prompt: &PromptOptions,
) -> Result<prefill::Finish, Failure> {
    end_on_signals(console)?;
    resolve::check(host, prompt, &OutputOptions::default())?;
    let target = endpoint::connect(connect, host.transport, host.auth_token_file.is_some())?;
    prefill::run(
        host,
        prompt,
        &target,
        Arc::new(Alone::new(Arc::clone(console))),
    )
}

/// A signal ends this process at once: sockets, mappings and the reference end with it.
fn end_on_signals(console: &Arc<Console>) -> Result<(), Failure> {
    let console = Arc::clone(console);
    let deliver = move |failure: Failure| {
        console.failure(&failure, None);
        std::process::exit(i32::from(failure.exit_code()));
    };
    signals::watch(deliver).map_err(|error| Failure::internal(format!("signals: {error}")))
}
