//! One hand-off with one blow.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::exec::{self, Failure};

use super::setting::Setting;
use super::watch;
use super::{Blow, Phase};

/// Everything must have ended so long after the blow.
const GRACE: Duration = Duration::from_secs(5);

/// What the processes of a run wait for each other at most.
const DEADLINE_MS: u64 = 3_000;

/// The name of the server among the victims.
const SERVER: &str = "redis";

const TAG: &str = "KVGATE_KILL_TRIAL";

/// Where and how to strike.
#[derive(Debug, Clone, Copy)]
pub(super) struct Aim {
    pub(super) phase: Phase,
    /// How long after the beginning of the phase.
    pub(super) delay: Duration,
    /// A number that chooses among the processes that live at that moment.
    pub(super) victim: u64,
    pub(super) blow: Blow,
}

pub(super) enum Ended {
    /// The run was over before the blow.
    Missed,
    Hit(Hit),
}

/// What was seen after a blow.
pub(super) struct Hit {
    pub(super) phase: Phase,
    pub(super) victim: &'static str,
    /// The launcher's exit code, negative for a signal.
    pub(super) launcher_code: Option<i32>,
    pub(super) orphan_codes: Vec<(&'static str, i32)>,
    pub(super) leftover_processes: usize,
    pub(super) leftover_files: Vec<String>,
    pub(super) ended_after: Duration,
    /// Everything that should not have happened.
    pub(super) surprises: Vec<String>,
}

/// How long each phase lasts when nobody interferes.
pub(super) struct Lengths([Duration; 5]);

impl Lengths {
    pub(super) fn of(&self, phase: Phase) -> Duration {
        self.0[phase as usize]
    }
}

/// Runs once without a blow; that run has to end well.
pub(super) fn measure(program: &Path, setting: &Setting) -> Result<Lengths, Failure> {
    let mut run = Run::start(program, setting)?;
    let deadline = Instant::now() + run.patience;
    while run.pump_until(deadline) {}
    let code = run.end_code(deadline)?;
    if code != Some(0) || !run.stdout().contains("verdict: bit-identical") {
        return Err(Failure::new(format!(
            "the undisturbed run ended with {code:?}"
        )));
    }
    let begins: Vec<Instant> = Phase::ALL
        .iter()
        .map(|phase| {
            let seen = run.phases.iter().find(|(_, seen)| seen == phase);
            seen.map(|(at, _)| *at).ok_or_else(|| {
                Failure::new(format!("the run never announced phase {}", phase.name()))
            })
        })
        .collect::<Result<_, _>>()?;
    let mut lengths = [Duration::ZERO; 5];
    for (at, begin) in begins.iter().enumerate() {
        let end = begins
            .get(at + 1)
            .copied()
            .unwrap_or_else(|| run.last_line.max(*begin));
        lengths[at] = end.saturating_duration_since(*begin);
    }
    Ok(Lengths(lengths))
}

/// Runs with a blow and looks at what is left.
pub(super) fn run(program: &Path, setting: &Setting, aim: Aim) -> Result<Ended, Failure> {
    let shm_before = watch::names_in(Path::new("/dev/shm"));
    let mut run = Run::start(program, setting)?;
    if !run.reach(aim.phase)? {
        run.finish();
        return Ok(Ended::Missed);
    }
    let moment = Instant::now() + aim.delay;
    while run.pump_until(moment) {}
    let server = setting.server_pid().map(|pid| (SERVER, pid));
    let alive: Vec<_> = run
        .pids
        .iter()
        .copied()
        .chain(server)
        .filter(|(_, pid)| watch::is_alive(*pid))
        .collect();
    let launcher_alive = alive.iter().any(|(name, _)| *name == "launcher");
    if alive.is_empty() || !launcher_alive {
        run.finish();
        return Ok(Ended::Missed);
    }
    let (victim, victim_pid) = alive[(aim.victim % alive.len() as u64) as usize];
    let phase = run.phases.last().map_or(aim.phase, |(_, phase)| *phase);
    strike(victim_pid, aim.blow);
    let struck = Instant::now();
    Ok(Ended::Hit(run.look(
        victim,
        victim_pid,
        phase,
        aim.blow,
        struck,
        &shm_before,
    )))
}

fn strike(pid: u32, blow: Blow) {
    let signal = match blow {
        Blow::Kill => Signal::KILL,
        Blow::Stop => Signal::STOP,
        Blow::Int => Signal::INT,
    };
    exec::signal(pid, signal);
}

/// A started hand-off and what it has said so far.
struct Run {
    launcher: Child,
    lines: Receiver<(Instant, String)>,
    stdout: Option<std::thread::JoinHandle<String>>,
    stdout_text: String,
    tag: String,
    /// Working and temporary folder of the run; nothing may be left in it.
    folder: tempfile::TempDir,
    pids: Vec<(&'static str, u32)>,
    phases: Vec<(Instant, Phase)>,
    stderr: Vec<String>,
    last_line: Instant,
    patience: Duration,
}

impl Run {
    fn start(program: &Path, setting: &Setting) -> Result<Self, Failure> {
        let folder = tempfile::tempdir()
            .map_err(|error| Failure::new(format!("no temporary folder: {error}")))?;
        let tag = format!("{TAG}={}", folder.path().display());
        let mut launcher = Command::new(program)
            .args(setting.args())
            .args(["--deadline-ms", &DEADLINE_MS.to_string(), "--phase-markers"])
            .current_dir(folder.path())
            .env("TMPDIR", folder.path())
            .env("XDG_RUNTIME_DIR", folder.path())
            .env(TAG, folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| Failure::io(program, &error))?;
        let (sender, lines) = mpsc::channel();
        if let Some(pipe) = launcher.stderr.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                    if sender.send((Instant::now(), line)).is_err() {
                        return;
                    }
                }
            });
        }
        let stdout = launcher.stdout.take().map(|mut pipe| {
            std::thread::spawn(move || {
                let mut bytes = Vec::new();
                let _ = pipe.read_to_end(&mut bytes);
                String::from_utf8_lossy(&bytes).into_owned()
            })
        });
        Ok(Self {
            launcher,
            lines,
            stdout,
            stdout_text: String::new(),
            tag,
            folder,
            pids: Vec::new(),
            phases: Vec::new(),
            stderr: Vec::new(),
            last_line: Instant::now(),
            patience: setting.patience(),
        })
    }

    /// Takes the next line, if one comes before `deadline`. False at the deadline or at the end.
    fn pump_until(&mut self, deadline: Instant) -> bool {
        let left = deadline.saturating_duration_since(Instant::now());
        let Ok((at, line)) = self.lines.recv_timeout(left) else {
            return false;
        };
        if self.pids.is_empty() {
            self.pids = parse_pids(&line);
        }
        if let Some(phase) = Phase::from_line(&line) {
            self.phases.push((at, phase));
        }
        self.last_line = at;
        self.stderr.push(line);
        true
    }

    /// Waits for a phase to begin; false when the run ends before.
    fn reach(&mut self, phase: Phase) -> Result<bool, Failure> {
        let patience = self.patience;
        let deadline = Instant::now() + patience;
        while !self.phases.iter().any(|(_, seen)| *seen >= phase) {
            if !self.pump_until(deadline) {
                if Instant::now() < deadline {
                    return Ok(false);
                }
                exec::kill_tree(self.launcher.id());
                let text = format!("no phase {} within {patience:?}", phase.name());
                return Err(Failure::new(text));
            }
        }
        Ok(!self.pids.is_empty())
    }

    /// The launcher's exit code, negative for a signal; `None` when it had to be ended.
    fn end_code(&mut self, deadline: Instant) -> Result<Option<i32>, Failure> {
        use std::os::unix::process::ExitStatusExt;
        let status = exec::wait_until(&mut self.launcher, deadline)
            .map_err(|error| Failure::new(format!("launcher: {error}")))?;
        Ok(status.and_then(|status| status.code().or_else(|| status.signal().map(|s| -s))))
    }

    /// Everything that the launcher printed; it must have ended.
    fn stdout(&mut self) -> &str {
        if let Some(reader) = self.stdout.take() {
            self.stdout_text = reader.join().unwrap_or_default();
        }
        &self.stdout_text
    }

    /// Lets a run go to its end.
    fn finish(mut self) {
        let deadline = Instant::now() + self.patience;
        while self.pump_until(deadline) {}
        let _ = self.end_code(deadline);
    }

    fn look(
        mut self,
        victim: &'static str,
        victim_pid: u32,
        phase: Phase,
        blow: Blow,
        struck: Instant,
        shm_before: &std::collections::BTreeSet<String>,
    ) -> Hit {
        let patience = match blow {
            // A tier that is gone is a miss: the run goes on to its end.
            _ if victim == SERVER => self.patience,
            Blow::Stop => GRACE + Duration::from_millis(DEADLINE_MS),
            Blow::Kill | Blow::Int => GRACE,
        };
        let deadline = struck + patience;
        let mut surprises = Vec::new();
        let others: Vec<u32> = self
            .pids
            .iter()
            .map(|(_, pid)| *pid)
            .filter(|pid| blow != Blow::Stop || *pid != victim_pid)
            .collect();
        let late = watch::still_alive_at(&others, deadline);
        let ended_after = struck.elapsed();
        for pid in &late {
            surprises.push(format!("{} still runs", self.name_of(*pid)));
        }
        if blow == Blow::Stop {
            exec::signal(victim_pid, Signal::KILL);
            watch::still_alive_at(&[victim_pid], Instant::now() + GRACE);
        }
        let left = watch::carriers(&self.tag);
        let leftover_processes = left.iter().filter(|pid| **pid != victim_pid).count();
        for pid in left {
            exec::kill_tree(pid);
        }
        let launcher_code = self.end_code(Instant::now() + GRACE).unwrap_or(None);
        while self.pump_until(Instant::now() + Duration::from_millis(50)) {}
        let orphan_codes = self.orphan_codes(victim);
        let has_verdict = self.stdout().contains("verdict: bit-identical");
        let says = |word: &str, lines: &[String]| lines.iter().any(|line| line.contains(word));
        if says("panicked at", &self.stderr) {
            surprises.push("a panic on stderr".to_owned());
        }
        if self.stdout().contains("MISMATCH") {
            surprises.push("a mismatch verdict".to_owned());
        }
        if let Some(text) = judge_launcher(victim, blow, launcher_code, has_verdict) {
            let last_line = self.stderr.last().map_or("", String::as_str);
            eprintln!("kill: the last line of the launcher: {last_line}");
            surprises.push(text);
        }
        for (name, code) in &orphan_codes {
            if ![0, 3, -9].contains(code) {
                surprises.push(format!("{name} ended with {code}"));
            }
        }
        if leftover_processes > 0 {
            surprises.push(format!("{leftover_processes} processes left"));
        }
        let leftover_files = self.leftover_files(shm_before);
        surprises.extend(
            leftover_files
                .iter()
                .map(|file| format!("left behind: {file}")),
        );
        Hit {
            phase,
            victim,
            launcher_code,
            orphan_codes,
            leftover_processes,
            leftover_files,
            ended_after,
            surprises,
        }
    }

    fn name_of(&self, pid: u32) -> &'static str {
        self.pids
            .iter()
            .find(|(_, known)| *known == pid)
            .map_or("a process", |(name, _)| name)
    }

    /// Exit codes of the roles that outlived their launcher.
    fn orphan_codes(&self, victim: &str) -> Vec<(&'static str, i32)> {
        self.pids
            .iter()
            .filter(|(name, _)| *name != "launcher" && *name != victim)
            .filter_map(|(name, pid)| Some((*name, watch::adopted_code(*pid)?)))
            .collect()
    }

    fn leftover_files(&self, shm_before: &std::collections::BTreeSet<String>) -> Vec<String> {
        let shm = watch::names_in(Path::new("/dev/shm"));
        let mut left: Vec<String> = shm
            .difference(shm_before)
            .map(|name| format!("/dev/shm/{name}"))
            .collect();
        left.extend(watch::names_in(self.folder.path()));
        left
    }
}

/// The launcher ends with 3 when it lost somebody, and with 0 only after its verdict.
fn judge_launcher(
    victim: &str,
    blow: Blow,
    code: Option<i32>,
    has_verdict: bool,
) -> Option<String> {
    let good = match (victim, blow, code) {
        (SERVER, _, code) => code == Some(0) && has_verdict,
        ("launcher", Blow::Kill | Blow::Stop, Some(-9)) => true,
        ("launcher", Blow::Int, Some(130)) => true,
        (_, _, Some(0)) => has_verdict,
        ("launcher", _, _) => false,
        (_, Blow::Int, Some(130)) => true,
        (_, _, Some(3)) => true,
        _ => false,
    };
    let text = code.map_or("without an exit code".to_owned(), |code| {
        format!("with {code}")
    });
    (!good).then(|| format!("the launcher ended {text}"))
}

/// Reads `pids launcher=1 prefill=2 decode=3 reference=4`.
fn parse_pids(line: &str) -> Vec<(&'static str, u32)> {
    let Some(rest) = line.trim().strip_prefix("pids ") else {
        return Vec::new();
    };
    const NAMES: [&str; 4] = ["launcher", "prefill", "decode", "reference"];
    rest.split_whitespace()
        .filter_map(|word| {
            let (name, pid) = word.split_once('=')?;
            let name = NAMES.into_iter().find(|known| *known == name)?;
            Some((name, pid.parse().ok()?))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pids_are_read_by_name() {
        let pids = parse_pids("pids launcher=10 prefill=11 decode=12 reference=13");
        assert_eq!(
            pids,
            [
                ("launcher", 10),
                ("prefill", 11),
                ("decode", 12),
                ("reference", 13)
            ]
        );
        assert!(parse_pids("phase decode").is_empty());
    }

    #[test]
    fn a_clean_exit_without_a_verdict_is_a_surprise() {
        let judge = judge_launcher;
        assert_eq!(judge("decode", Blow::Kill, Some(3), false), None);
        assert_eq!(judge("decode", Blow::Kill, Some(0), true), None);
        assert!(judge("decode", Blow::Kill, Some(0), false).is_some());
        assert!(judge("decode", Blow::Kill, Some(1), true).is_some());
        assert!(judge("prefill", Blow::Kill, Some(101), false).is_some());
        assert!(judge("prefill", Blow::Kill, None, false).is_some());
        assert_eq!(judge("launcher", Blow::Kill, Some(-9), false), None);
        assert_eq!(judge(SERVER, Blow::Kill, Some(0), true), None);
        assert!(judge(SERVER, Blow::Kill, Some(3), false).is_some());
        assert!(judge("launcher", Blow::Int, Some(3), false).is_some());
        assert_eq!(judge("launcher", Blow::Int, Some(130), false), None);
    }
}

#[cfg(test)]
#[path = "trial_tests.rs"]
mod stand_ins;
