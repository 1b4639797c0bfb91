//! Runs the built programs as a user would, with a limit of time that no test reaches unless it hangs.
#![allow(
    dead_code,
    unreachable_pub,
    reason = "every test program uses a part of it"
)]
#![allow(clippy::unwrap_used, reason = "a test ends here")]

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

/// A hang is found, a slow machine is not punished.
const LIMIT: Duration = Duration::from_secs(240);

/// What a program left behind.
#[derive(Debug)]
pub struct Finished {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Finished {
    /// The one JSON object on stdout.
    pub fn json(&self) -> Value {
        let value: Value = serde_json::from_str(&self.stdout).unwrap_or_else(|error| {
            panic!(
                "{error} in stdout {:?}, stderr {}",
                self.stdout, self.stderr
            )
        });
        assert!(value.is_object(), "{value}");
        value
    }

    pub fn last_line(&self) -> &str {
        self.stdout.lines().last().unwrap_or_default()
    }
}

/// A program that still runs; killed when it is dropped.
pub struct Running {
    pub child: Child,
    stdout: mpsc::Receiver<String>,
    stderr: mpsc::Receiver<String>,
    seen_stdout: String,
    seen_stderr: String,
}

/// Runs `pd-handoff` to its end.
pub fn pd_handoff(args: &[&str]) -> Finished {
    Running::start(env!("CARGO_BIN_EXE_pd-handoff"), args).finish()
}

impl Running {
    pub fn start(program: &str, args: &[&str]) -> Self {
        Self::start_with(program, args, &[])
    }

    /// With these variables in its environment.
    pub fn start_with(program: &str, args: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut command = Command::new(program);
        command
            .args(args)
            .envs(variables.iter().copied())
            .env_remove("RUST_LOG")
            .stdin(Stdio::null());
        let mut child = command
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = lines_of(child.stdout.take().unwrap());
        let stderr = lines_of(child.stderr.take().unwrap());
        Self {
            child,
            stdout,
            stderr,
            seen_stdout: String::new(),
            seen_stderr: String::new(),
        }
    }

    /// Waits for a line on stderr that begins like this.
    pub fn wait_for_stderr(&mut self, begin: &str) -> String {
        wait_for(&self.stderr, &mut self.seen_stderr, begin)
    }

    /// Waits for a line on stdout that begins like this.
    pub fn wait_for_stdout(&mut self, begin: &str) -> String {
        wait_for(&self.stdout, &mut self.seen_stdout, begin)
    }

    /// Waits for the end of the program and of its output. The output ends when the last process that
    /// inherited it does, so this waits for orphans too.
    pub fn finish(mut self) -> Finished {
        let until = Instant::now() + LIMIT;
        for (lines, seen) in [
            (&self.stdout, &mut self.seen_stdout),
            (&self.stderr, &mut self.seen_stderr),
        ] {
            loop {
                match lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                    Ok(line) => {
                        seen.push_str(&line);
                        seen.push('\n');
                    }
                    Err(mpsc::RecvTimeoutError::Disconnected) => break,
                    Err(mpsc::RecvTimeoutError::Timeout) => panic!("still running, so far: {seen}"),
                }
            }
        }
        let code = self.child.wait().unwrap().code();
        Finished {
            code,
            stdout: std::mem::take(&mut self.seen_stdout),
            stderr: std::mem::take(&mut self.seen_stderr),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn wait_for(lines: &mpsc::Receiver<String>, seen: &mut String, begin: &str) -> String {
    let until = Instant::now() + LIMIT;
    loop {
        let Ok(line) = lines.recv_timeout(until.saturating_duration_since(Instant::now())) else {
            panic!("no line {begin:?} in {seen}");
        };
        seen.push_str(&line);
        seen.push('\n');
        if line.starts_with(begin) {
            return line;
        }
    }
}

fn lines_of(mut pipe: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        let mut rest = Vec::new();
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = pipe.read(&mut buffer) {
            rest.extend_from_slice(&buffer[..count]);
            while let Some(end) = rest.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = rest.drain(..=end).collect();
                let line = String::from_utf8_lossy(&line[..end]).into_owned();
                if sender.send(line).is_err() {
                    return;
                }
            }
        }
        if !rest.is_empty() {
            let _ = sender.send(String::from_utf8_lossy(&rest).into_owned());
        }
    });
    lines
}

/// `key=` of a `pids …` line.
pub fn pid_of(line: &str, role: &str) -> u32 {
    let field = format!("{role}=");
    let word = line
        .split_whitespace()
        .find_map(|word| word.strip_prefix(field.as_str()));
    word.unwrap_or_else(|| panic!("no {role} in {line:?}"))
        .parse()
        .unwrap()
}

/// A process with this id that is no zombie.
pub fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat
        .rsplit(") ")
        .next()
        .and_then(|rest| rest.chars().next());
    state.is_some_and(|state| state != 'Z')
}

/// Polls for the end of a process; the limit is that of the rule under test.
pub fn wait_until_gone(pid: u32, limit: Duration) {
    let until = Instant::now() + limit;
    while is_alive(pid) {
        assert!(
            Instant::now() < until,
            "process {pid} is still there after {limit:?}"
        );
        thread::sleep(Duration::from_millis(5));
    }
}
