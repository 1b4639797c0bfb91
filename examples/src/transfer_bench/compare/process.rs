//! One engine as a process: lines to its standard input, lines from its standard output.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::handoff::failure::{Failure, FailureKind};

/// Longest wait for an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(60);
/// Time to end after `Q`.
const END_LIMIT: Duration = Duration::from_secs(5);

/// What an engine answered.
#[derive(Clone, Debug)]
pub(crate) struct Answered {
    object: Value,
}

impl Answered {
    /// A number of the answer.
    #[must_use]
    pub(crate) fn figure(&self, name: &str) -> f64 {
        self.object[name].as_f64().unwrap_or_default()
    }

    /// Pages that differed in its checks.
    #[must_use]
    pub(crate) fn bad_pages(&self) -> u64 {
        let of = |name: &str| self.object[name].as_u64().unwrap_or_default();
        of("bad_first") + of("bad_last")
    }
}

/// An engine that runs. It ends with this value.
pub(crate) struct Process {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Process {
    /// Starts it and waits until it is ready.
    pub(crate) fn start(mut command: Command) -> Result<Self, Failure> {
        let failed = |error: std::io::Error| lost(format!("it does not start: {error}"));
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(failed)?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let (told, lines) = channel();
        let body = move || {
            let lines = stdout.map(BufReader::new).into_iter();
            for line in lines.flat_map(BufRead::lines).map_while(Result::ok) {
                if told.send(line).is_err() {
                    break;
                }
            }
        };
        thread::Builder::new()
            .name("engine-lines".to_owned())
            .spawn(body)
            .map_err(failed)?;
        let mut process = Self {
            child,
            stdin,
            lines,
        };
        match process.line()? {
            line if line.starts_with("READY") => Ok(process),
            line => Err(lost(format!("it said {line:?} instead of READY"))),
        }
    }

    /// One configuration; `None` when the engine leaves it out.
    pub(crate) fn ask(&mut self, asked: &str) -> Result<Option<Answered>, Failure> {
        let stdin = self.stdin.as_mut().ok_or_else(|| lost("it has ended"))?;
        writeln!(stdin, "{asked}").map_err(|error| lost(format!("it takes no line: {error}")))?;
        let line = self.line()?;
        let object: Value = serde_json::from_str(&line)
            .map_err(|error| lost(format!("it said {line:?}: {error}")))?;
        if object.get("skip").is_some() {
            return Ok(None);
        }
        match object.get("err") {
            Some(error) => Err(Failure::new(FailureKind::Internal, error.to_string())),
            None => Ok(Some(Answered { object })),
        }
    }

    fn line(&mut self) -> Result<String, Failure> {
        self.lines.recv_timeout(ANSWER_LIMIT).map_err(|error| {
            self.stdin = None;
            match error {
                RecvTimeoutError::Disconnected => lost("it has ended"),
                RecvTimeoutError::Timeout => lost("no answer within 60 s"),
            }
        })
    }

    /// Whether nothing more can be asked.
    #[must_use]
    pub(crate) fn is_over(&self) -> bool {
        self.stdin.is_none()
    }

    /// Tells it to end, and waits for that.
    pub(crate) fn end(mut self) {
        if let Some(mut stdin) = self.stdin.take() {
            // One that does not take it is killed below.
            let _ = writeln!(stdin, "Q");
        }
        let until = Instant::now() + END_LIMIT;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < until {
            thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Fails only for one that has ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn lost(message: impl Into<String>) -> Failure {
    Failure::new(FailureKind::PeerLost, message)
}
