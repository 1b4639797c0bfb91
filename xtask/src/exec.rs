//! Running other programs: where the workspace is, one job with a log and a time limit.

use std::ffi::OsStr;
use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// A task that could not do its work: exit code 2.
#[derive(Debug)]
pub(crate) struct Failure(String);

impl Failure {
    pub(crate) fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }

    /// A failed file operation, with the file's name.
    pub(crate) fn io(path: &Path, error: &std::io::Error) -> Self {
        Self(format!("{}: {error}", path.display()))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

/// The workspace that xtask was started in.
pub(crate) struct Workspace {
    /// Folder of the top-level `Cargo.toml`.
    pub(crate) root: PathBuf,
    /// Cargo's target folder.
    pub(crate) target: PathBuf,
}

impl Workspace {
    pub(crate) fn find() -> Result<Self, Failure> {
        let root = match std::env::var_os("CARGO_MANIFEST_DIR") {
            Some(folder) => PathBuf::from(folder).parent().map(Path::to_path_buf),
            None => std::env::current_dir().ok(),
        }
        .filter(|root| root.join("xtask/Cargo.toml").is_file())
        .ok_or_else(|| Failure::new("start it as `cargo xtask …` inside the workspace"))?;
        let target = match std::env::var_os("CARGO_TARGET_DIR") {
            Some(folder) => root.join(folder),
            None => root.join("target"),
        };
        Ok(Self { root, target })
    }

    /// A cargo job in this workspace.
    pub(crate) fn cargo<S: AsRef<OsStr>>(
        &self,
        name: &str,
        args: impl IntoIterator<Item = S>,
    ) -> Job {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        Job::new(name, cargo, &self.root, &self.target)
            .target(&self.target)
            .args(args)
    }

    /// A job that runs any program in this workspace.
    pub(crate) fn program(&self, name: &str, program: impl AsRef<OsStr>) -> Job {
        Job::new(name, program, &self.root, &self.target)
    }

    /// Reads a file of the workspace.
    pub(crate) fn read(&self, path: impl AsRef<Path>) -> Result<String, Failure> {
        let path = self.root.join(path);
        fs::read_to_string(&path).map_err(|error| Failure::io(&path, &error))
    }

    /// Whether the workspace has this file or folder.
    pub(crate) fn has(&self, path: impl AsRef<Path>) -> bool {
        self.root.join(path).exists()
    }
}

/// A program to run to its end, with its output in a log file and a time limit.
#[must_use = "a job does nothing before `run`"]
pub(crate) struct Job {
    name: String,
    command: Command,
    log: PathBuf,
    limit: Duration,
}

/// What came of a [`Job`].
pub(crate) struct Finished {
    /// Exit code; `None` when a signal or the time limit ended it.
    pub(crate) code: Option<i32>,
    pub(crate) timed_out: bool,
    pub(crate) elapsed: Duration,
    /// Standard output and standard error together.
    pub(crate) output: String,
    name: String,
    log: PathBuf,
}

impl Job {
    fn new(name: &str, program: impl AsRef<OsStr>, folder: &Path, target: &Path) -> Self {
        let mut command = Command::new(program);
        command.current_dir(folder).stdin(Stdio::null());
        let log = target.join("xtask-logs").join(format!("{name}.log"));
        Self {
            name: name.to_owned(),
            command,
            log,
            limit: Duration::from_secs(1800),
        }
    }

    pub(crate) fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.command.args(args);
        self
    }

    pub(crate) fn env(mut self, key: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(key, value);
        self
    }

    /// Uses another target folder, so that other flags do not rebuild everything else.
    pub(crate) fn target(self, folder: &Path) -> Self {
        self.env("CARGO_TARGET_DIR", folder)
    }

    pub(crate) fn folder(mut self, folder: &Path) -> Self {
        self.command.current_dir(folder);
        self
    }

    pub(crate) fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Runs to the end or to the time limit, which ends the whole process tree.
    pub(crate) fn run(mut self) -> Result<Finished, Failure> {
        let file = create_log(&self.log)?;
        let also = file
            .try_clone()
            .map_err(|error| Failure::io(&self.log, &error))?;
        let started = Instant::now();
        let mut child = self
            .command
            .stdout(file)
            .stderr(also)
            .spawn()
            .map_err(|error| Failure::new(format!("{}: cannot start: {error}", self.name)))?;
        let status = wait_until(&mut child, started + self.limit)
            .map_err(|error| Failure::new(format!("{}: {error}", self.name)))?;
        let bytes = fs::read(&self.log).map_err(|error| Failure::io(&self.log, &error))?;
        Ok(Finished {
            code: status.and_then(|status| status.code()),
            timed_out: status.is_none(),
            elapsed: started.elapsed(),
            output: String::from_utf8_lossy(&bytes).into_owned(),
            name: self.name,
            log: self.log,
        })
    }

    /// Runs and hands back standard output alone; standard error is inherited.
    pub(crate) fn stdout(mut self) -> Result<(Option<i32>, String), Failure> {
        let output = self
            .command
            .stderr(Stdio::inherit())
            .output()
            .map_err(|error| Failure::new(format!("{}: cannot start: {error}", self.name)))?;
        Ok((
            output.status.code(),
            String::from_utf8_lossy(&output.stdout).into_owned(),
        ))
    }
}

impl Finished {
    pub(crate) fn succeeded(&self) -> bool {
        self.code == Some(0)
    }

    /// Says in a few words how the job ended.
    pub(crate) fn ending(&self) -> String {
        match (self.timed_out, self.code) {
            (true, _) => format!("time limit after {:.0} s", self.elapsed.as_secs_f64()),
            (false, Some(code)) => format!("exit code {code}"),
            (false, None) => "ended by a signal".to_owned(),
        }
    }

    /// Prints the end of the log to stderr, for the reader of a failed run.
    pub(crate) fn show_tail(&self, lines: usize) {
        let all: Vec<&str> = self.output.lines().collect();
        let from = all.len().saturating_sub(lines);
        eprintln!(
            "---- {} ({}), log {}",
            self.name,
            self.ending(),
            self.log.display()
        );
        for line in &all[from..] {
            eprintln!("     {line}");
        }
        eprintln!("----");
    }
}

fn create_log(path: &Path) -> Result<File, Failure> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).map_err(|error| Failure::io(folder, &error))?;
    }
    File::create(path).map_err(|error| Failure::io(path, &error))
}

/// Waits for the child; at the deadline ends it with all its descendants and answers `None`.
pub(crate) fn wait_until(
    child: &mut Child,
    deadline: Instant,
) -> std::io::Result<Option<std::process::ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= deadline {
            kill_tree(child.id());
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Sends SIGKILL to a process and to everything that descends from it.
pub(crate) fn kill_tree(root: u32) {
    let mut found = vec![root];
    let mut next = 0;
    while next < found.len() {
        found.extend(children_of(found[next]));
        next += 1;
    }
    for pid in found {
        signal(pid, Signal::KILL);
    }
}

/// Sends a signal; a process that is gone already is not an error.
pub(crate) fn signal(pid: u32, signal: Signal) {
    let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
    if let Some(pid) = raw {
        let _ = kill_process(pid, signal);
    }
}

/// The processes whose parent is `parent`.
pub(crate) fn children_of(parent: u32) -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| stat_of(*pid).is_some_and(|stat| stat.parent == parent))
        .collect()
}

/// The two fields of `/proc/PID/stat` that are needed here.
pub(crate) struct Stat {
    /// R, S, D, Z, T, …
    pub(crate) state: char,
    pub(crate) parent: u32,
}

pub(crate) fn stat_of(pid: u32) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command name may hold spaces and parentheses; what follows the last one does not.
    let (_, rest) = text.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    let state = fields.next()?.chars().next()?;
    Some(Stat {
        state,
        parent: fields.next()?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workspace(target: &Path) -> Workspace {
        Workspace {
            root: target.to_path_buf(),
            target: target.to_path_buf(),
        }
    }

    #[test]
    fn a_job_reports_code_and_output_of_both_streams() {
        let folder = tempfile::tempdir().unwrap();
        let job = workspace(folder.path()).program("both", "sh");
        let done = job
            .args(["-c", "echo out; echo err >&2; exit 3"])
            .run()
            .unwrap();
        assert_eq!(done.code, Some(3));
        assert!(!done.timed_out && !done.succeeded());
        assert!(done.output.contains("out") && done.output.contains("err"));
    }

    #[test]
    fn the_time_limit_ends_the_whole_tree() {
        let folder = tempfile::tempdir().unwrap();
        let job = workspace(folder.path())
            .program("tree", "sh")
            .limit(Duration::from_millis(300));
        let done = job.args(["-c", "sleep 61 & echo $!; wait"]).run().unwrap();
        assert!(done.timed_out);
        assert_eq!(done.code, None);
        let grandchild: u32 = done.output.trim().parse().unwrap();
        let deadline = Instant::now() + Duration::from_secs(5);
        while stat_of(grandchild).is_some_and(|stat| stat.state != 'Z') {
            assert!(
                Instant::now() < deadline,
                "process {grandchild} outlived its time limit"
            );
            std::thread::yield_now();
        }
    }
}
