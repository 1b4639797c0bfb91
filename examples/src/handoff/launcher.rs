//! The program that people start: it starts the three roles, watches them, prints what the decode side
//! found, and leaves nothing behind.

use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use super::channel::{self, ChannelSender};
use super::child::{self, RoleProcess};
use super::cli::RoleName;
use super::console::{self, Console};
use super::control::{FromRole, Progress, RoleStart, ToRole};
use super::failure::{Failure, FailureKind};
use super::html::ReportFile;
use super::options::{HostOptions, OutputOptions, PromptOptions, Transport};
use super::report::{Pids, Report};
use super::role::{self, Hosting};
use super::timeline::Timeline;
use super::{resolve, signals};

const ROLES: [RoleName; 3] = [RoleName::Decode, RoleName::Prefill, RoleName::Reference];
/// How often the launcher looks after its roles when nothing happens.
const TICK: Duration = Duration::from_millis(50);
/// How long a role may take to end once it has been told to.
const END_LIMIT: Duration = Duration::from_secs(2);
/// How long the launcher waits, after one role has lost another one, for the reason of it.
const CAUSE_LIMIT: Duration = Duration::from_millis(300);

enum Event {
    FromRole(RoleName, Box<FromRole>),
    Closed(RoleName),
    Signal(Failure),
}

/// Runs everything on this host and returns the exit code.
#[must_use]
pub fn run(host: &HostOptions, prompt: &PromptOptions, output: &OutputOptions) -> u8 {
    let console = Console::new(output.json);
    let mut pids = None;
    match try_run(&console, host, prompt, output, &mut pids) {
        Ok(code) => code,
        Err(failure) => {
            console.failure(&failure, pids);
            failure.exit_code()
        }
    }
}

fn try_run(
    console: &Console,
    host: &HostOptions,
    prompt: &PromptOptions,
    output: &OutputOptions,
    pids: &mut Option<Pids>,
) -> Result<u8, Failure> {
    let mut report_file = output
        .report
        .as_deref()
        .map(ReportFile::create)
        .transpose()?;
    launch(console, host, prompt, output, pids, |report, timeline| {
        let written = report_file
            .take()
            .map_or(Ok(()), |file| file.write(&report, &timeline));
        match written {
            Ok(()) => {
                console.report(&report);
                report.exit_code()
            }
            Err(failure) => {
                console.failure(&failure, Some(report.pids));
                failure.exit_code()
            }
        }
    })
}

/// Starts the roles, and hands over what the decode side found; only then the roles are ended.
pub fn launch<T>(
    console: &Console,
    host: &HostOptions,
    prompt: &PromptOptions,
    output: &OutputOptions,
    pids: &mut Option<Pids>,
    conclude: impl FnOnce(Report, Timeline) -> T,
) -> Result<T, Failure> {
    let (events, inbox) = mpsc::channel();
    let on_signal = events.clone();
    signals::watch(move |failure| drop(on_signal.send(Event::Signal(failure))))
        .map_err(|error| Failure::internal(format!("signals: {error}")))?;
    resolve::check(host, prompt, output)?;
    let mut run = Run::start(host, &events)
        .map_err(|error| Failure::internal(format!("cannot start a role: {error}")))?;
    drop(events);
    *pids = Some(run.pids);
    let Pids {
        launcher,
        prefill,
        decode,
        reference,
    } = run.pids;
    console::note(&format!(
        "pids launcher={launcher} prefill={prefill} decode={decode} reference={reference}"
    ));
    let start = RoleStart {
        launcher_pid: launcher,
        host: host.clone(),
        prompt: prompt.clone(),
        output: output.clone(),
    };
    run.tell_all(&ToRole::Start(Box::new(start)));
    let (mut report, timeline) = run.watch(console, &inbox)?;
    report.pids = run.pids;
    let concluded = conclude(report, timeline);
    run.end();
    Ok(concluded)
}

/// The roles of a run, as processes, or as threads of this one.
struct Run {
    pids: Pids,
    deadline: Duration,
    roles: Vec<Role>,
    processes: Vec<RoleProcess>,
    progress: Progress,
}

struct Role {
    name: RoleName,
    control: ChannelSender,
    last_seen: Instant,
}

impl Run {
    fn start(host: &HostOptions, events: &Sender<Event>) -> std::io::Result<Self> {
        let deadline = Duration::from_millis(host.deadline_ms);
        let launcher = std::process::id();
        let mut run = Self {
            pids: Pids {
                launcher,
                prefill: launcher,
                decode: launcher,
                reference: launcher,
            },
            deadline,
            roles: Vec::new(),
            processes: Vec::new(),
            progress: Progress::default(),
        };
        let (decode_link, reference_link) = UnixStream::pair()?;
        let (mut decode_link, mut reference_link) = (Some(decode_link), Some(reference_link));
        for name in ROLES {
            let (ours, theirs) = UnixStream::pair()?;
            let link = match name {
                RoleName::Decode => decode_link.take(),
                RoleName::Reference => reference_link.take(),
                RoleName::Prefill => None,
            };
            run.start_role(name, host.transport, theirs, link)?;
            let (control, mut receiver) = channel::split(ours, deadline)?;
            run.roles.push(Role {
                name,
                control,
                last_seen: Instant::now(),
            });
            let events = events.clone();
            thread::Builder::new()
                .name(format!("from-{}", name.id()))
                .spawn(move || {
                    while let Ok(Some((message, _))) = receiver.receive::<FromRole>() {
                        if events
                            .send(Event::FromRole(name, Box::new(message)))
                            .is_err()
                        {
                            return;
                        }
                    }
                    drop(events.send(Event::Closed(name)));
                })?;
        }
        Ok(run)
    }

    fn start_role(
        &mut self,
        name: RoleName,
        transport: Transport,
        control: UnixStream,
        link: Option<UnixStream>,
    ) -> std::io::Result<()> {
        if transport == Transport::Local {
            let body = move || {
                // The launcher hears of the end by the control socket.
                let _ = role::run(name, control, link, Hosting::Thread);
            };
            thread::Builder::new()
                .name(name.id().to_owned())
                .spawn(body)?;
            return Ok(());
        }
        let process = child::spawn(name, control, link)?;
        match name {
            RoleName::Prefill => self.pids.prefill = process.pid(),
            RoleName::Decode => self.pids.decode = process.pid(),
            RoleName::Reference => self.pids.reference = process.pid(),
        }
        self.processes.push(process);
        Ok(())
    }

    fn tell(&self, name: RoleName, message: &ToRole) {
        for role in self.roles.iter().filter(|role| role.name == name) {
            // A role that is gone is found by the end of its socket.
            let _ = role.control.send(message);
        }
    }

    fn tell_all(&self, message: &ToRole) {
        for name in ROLES {
            self.tell(name, message);
        }
    }

    /// Passes messages on until the decode side has a result or something fails.
    fn watch(
        &mut self,
        console: &Console,
        inbox: &Receiver<Event>,
    ) -> Result<(Report, Timeline), Failure> {
        loop {
            match inbox.recv_timeout(TICK) {
                Ok(Event::Signal(failure)) => return Err(failure),
                Ok(Event::Closed(name)) => return Err(self.lost(name, inbox)),
                Ok(Event::FromRole(name, message)) => {
                    self.seen(name);
                    match *message {
                        FromRole::Alive => {}
                        FromRole::Listening { address } => {
                            self.tell(RoleName::Prefill, &ToRole::Connect { address });
                        }
                        FromRole::Progress(progress) => self.show(console, name, progress),
                        FromRole::Report { report, timeline } => return Ok((*report, *timeline)),
                        FromRole::Failed(failure) => {
                            return Err(self.root_cause(name, failure, inbox));
                        }
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::internal("every role has ended"));
                }
            }
            self.check_life(inbox)?;
        }
    }

    fn seen(&mut self, name: RoleName) {
        for role in self.roles.iter_mut().filter(|role| role.name == name) {
            role.last_seen = Instant::now();
        }
    }

    fn show(&mut self, console: &Console, name: RoleName, progress: Progress) {
        match name {
            RoleName::Prefill => {
                self.progress.prefill_tokens = progress.prefill_tokens;
                self.progress.prefill_tokens_total = progress.prefill_tokens_total;
            }
            RoleName::Decode | RoleName::Reference => {
                self.progress.decoded_tokens = progress.decoded_tokens;
                self.progress.decoded_tokens_total = progress.decoded_tokens_total;
            }
        }
        console.progress(self.progress);
    }

    /// Every role says all the time that it is alive; a stopped one does not.
    fn check_life(&mut self, inbox: &Receiver<Event>) -> Result<(), Failure> {
        for index in 0..self.processes.len() {
            let ended = self
                .processes
                .get_mut(index)
                .and_then(|process| process.poll_status().map(|_| process.role));
            if let Some(name) = ended {
                return Err(self.lost(name, inbox));
            }
        }
        match self
            .roles
            .iter()
            .find(|role| role.last_seen.elapsed() > self.deadline)
        {
            None => Ok(()),
            Some(role) => Err(Failure::new(
                FailureKind::DeadlineExceeded,
                format!(
                    "{} (pid {}) showed no sign of life for {} ms",
                    role.name.id(),
                    self.pid(role.name),
                    self.deadline.as_millis(),
                ),
            )
            .with_field("deadline_ms", self.deadline.as_millis())),
        }
    }

    fn pid(&self, name: RoleName) -> u32 {
        match name {
            RoleName::Prefill => self.pids.prefill,
            RoleName::Decode => self.pids.decode,
            RoleName::Reference => self.pids.reference,
        }
    }

    /// A role has ended: what a role said about it counts, else how it ended. Of several that have ended,
    /// the one that was killed is the cause. A signal to the whole process group reaches the roles too,
    /// so a signal of our own counts more than anything.
    fn lost(&mut self, name: RoleName, inbox: &Receiver<Event>) -> Failure {
        let mut cause = (name, "ended".to_owned());
        for process in &mut self.processes {
            let is_named = process.role == name;
            let status = if is_named {
                process.end_within(CAUSE_LIMIT)
            } else {
                process.poll_status()
            };
            if let Some(status) = status.filter(|status| is_named || status.signal().is_some()) {
                cause = (process.role, child::describe(status));
                if status.signal().is_some() {
                    break;
                }
            }
        }
        let (name, how) = cause;
        let pid = self.pid(name);
        let plain = Failure::new(
            FailureKind::PeerLost,
            format!("{} (pid {pid}) {how}", name.id()),
        )
        .with_field(name.id(), pid);
        drain(inbox, Duration::from_millis(100)).unwrap_or(plain)
    }

    /// One role reports that it has lost another one: name the one that died.
    fn root_cause(&mut self, name: RoleName, failure: Failure, inbox: &Receiver<Event>) -> Failure {
        if failure.kind != FailureKind::PeerLost {
            return failure;
        }
        let until = Instant::now() + CAUSE_LIMIT;
        while Instant::now() < until {
            let dead = self.processes.iter_mut().find_map(|process| {
                let is_other = process.role != name;
                process
                    .poll_status()
                    .filter(|_| is_other)
                    .map(|_| process.role)
            });
            if let Some(dead) = dead {
                return self.lost(dead, inbox);
            }
            thread::sleep(Duration::from_millis(10));
        }
        failure
    }

    /// The verdict is printed: tell the roles, and wait for them.
    fn end(mut self) {
        self.tell_all(&ToRole::Finish);
        let until = Instant::now() + END_LIMIT;
        for process in &mut self.processes {
            process.end_within(until.saturating_duration_since(Instant::now()));
        }
    }
}

impl Drop for Run {
    /// Ends the control sockets first: a role that still runs ends by itself. Then the processes are
    /// killed and reaped, one after the other.
    fn drop(&mut self) {
        for role in &self.roles {
            role.control.close();
        }
        let until = Instant::now() + Duration::from_millis(500);
        for process in &mut self.processes {
            process.end_within(until.saturating_duration_since(Instant::now()));
        }
    }
}

/// A failure that waits in the inbox and says more than the end of a socket: a signal, or a role's own
/// failure that is not the loss of another role.
fn drain(inbox: &Receiver<Event>, limit: Duration) -> Option<Failure> {
    let until = Instant::now() + limit;
    let mut said = None;
    while let Ok(event) = inbox.recv_timeout(until.saturating_duration_since(Instant::now())) {
        match event {
            Event::Signal(failure) => return Some(failure),
            Event::FromRole(_, message) => match *message {
                FromRole::Failed(failure) if failure.kind != FailureKind::PeerLost => {
                    said.get_or_insert(failure);
                }
                _ => {}
            },
            Event::Closed(_) => {}
        }
    }
    said
}
