//! Where the program begins.

use super::cli::{self, Command, Refusal};
use super::console;
use super::failure::Failure;
use super::report::failure_json;
use super::{launcher, model, remote, role};

/// Runs `pd-handoff` with the arguments after its name and returns the exit code.
#[must_use]
pub fn run(args: &[String]) -> u8 {
    match cli::parse(args) {
        Ok(command) => perform(command),
        Err(Refusal::Text(text)) => {
            console::print(text.trim_end());
            0
        }
        Err(Refusal::Conflict { failure, json }) => refuse(&failure, json),
        Err(Refusal::Usage { text, failure }) => {
            console::note(text.trim_end());
            // The command line could not be parsed, so the option is looked for by itself.
            if args.iter().any(|arg| arg == "--json") {
                console::print(&failure_json(&failure, None).to_string());
            }
            failure.exit_code()
        }
    }
}

fn perform(command: Command) -> u8 {
    match command {
        Command::Role(role) => role::run_process(role),
        Command::Launch {
            host,
            prompt,
            output,
        } => {
            console::start_logging(host.verbosity);
            launcher::run(&host, &prompt, &output)
        }
        Command::Decode {
            listen,
            host,
            output,
        } => {
            console::start_logging(host.verbosity);
            remote::decode(&listen, &host, &output)
        }
        Command::Prefill {
            connect,
            host,
            prompt,
            json,
        } => {
            console::start_logging(host.verbosity);
            remote::prefill(&connect, &host, &prompt, json)
        }
        Command::DumpModel { dir, seed, json } => match model::dump_built_in(&dir, seed) {
            Ok(()) => 0,
            Err(failure) => refuse(&failure, json),
        },
    }
}

fn refuse(failure: &Failure, is_json: bool) -> u8 {
    console::Console::new(is_json).failure(failure, None);
    failure.exit_code()
}
