//! Hand-off of Flash-shaped pools between two processes over shared memory, beside a plain copy.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, ExitCode, Stdio};

use kvgate_examples::bench::{Heap, receiver, sender};
use kvgate_examples::handoff::console;
use kvgate_examples::handoff::failure::Failure;
use peak_alloc::PeakAlloc;
use serde_json::{Map, Value};

#[global_allocator]
static COUNTED: PeakAlloc = PeakAlloc;

const HEAP: Heap = Heap(&COUNTED);

const USAGE: &str = "usage: handoff-bench [--json]";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let result = match words.as_slice() {
        ["receive"] => receive(),
        [] => measure(false),
        ["--json"] => measure(true),
        _ => {
            console::note(USAGE);
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            console::note(&format!("handoff-bench: {failure}"));
            ExitCode::from(failure.exit_code())
        }
    }
}

fn receive() -> Result<(), Failure> {
    let control = io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map_err(|error| Failure::internal(error.to_string()))?;
    receiver::run(UnixStream::from(control), HEAP)
}

fn measure(is_json: bool) -> Result<(), Failure> {
    let mut object = Map::new();
    for tokens in [9_800, 32_768] {
        let measured = with_receiver(|control| sender::measure(tokens, control, HEAP))?;
        object.insert(format!("handoff_ratio_{tokens}"), measured.ratio);
        object.insert("extra_bytes".to_owned(), Value::from(measured.extra_bytes));
        object.insert("pool_bytes".to_owned(), Value::from(measured.pool_bytes));
    }
    if is_json {
        console::print(&Value::Object(object).to_string());
    } else {
        object
            .iter()
            .for_each(|(key, value)| console::print(&format!("{key}: {value}")));
    }
    Ok(())
}

/// Runs `body` with a fresh receiving process, which ends with its control socket.
fn with_receiver<T>(body: impl FnOnce(UnixStream) -> Result<T, Failure>) -> Result<T, Failure> {
    let system =
        |error: io::Error| Failure::internal(format!("cannot start the receiver: {error}"));
    let (ours, theirs) = UnixStream::pair().map_err(system)?;
    let mut child = Command::new(std::env::current_exe().map_err(system)?)
        .arg("receive")
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .spawn()
        .map_err(system)?;
    let result = body(ours);
    if result.is_err() {
        // It may wait for something that does not come.
        let _ = child.kill();
    }
    child.wait().map_err(system)?;
    result
}
