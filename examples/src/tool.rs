//! What the small tools share: usage errors, the JSON object of a failure, exit codes.

use std::process::ExitCode;

use clap::Parser;
use clap::error::{ContextKind, ContextValue};
use kvgate_model::{ErrorKind, ModelError};
use serde_json::{Value, json};

use crate::handoff::console;
use crate::handoff::failure::{Failure, FailureKind};

/// A tool that ran: its JSON object, its lines for people, and its exit code.
#[derive(Debug)]
pub struct Finished {
    /// Printed with `--json`; gets `schema` and `verdict` from the tool itself.
    pub json: Value,
    /// Printed otherwise.
    pub lines: Vec<String>,
    /// 0 good, 1 mismatch.
    pub exit_code: u8,
}

/// Parses the arguments of `name`, runs the tool, prints the result and returns the exit code.
pub fn main<A: Parser>(
    name: &str,
    schema: &str,
    is_json: impl Fn(&A) -> bool,
    run: impl Fn(A) -> Result<Finished, Failure>,
) -> ExitCode {
    let args = match A::try_parse() {
        Ok(args) => args,
        Err(error) if error.exit_code() == 0 => {
            console::print(error.to_string().trim_end());
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            let asked_json = std::env::args().any(|a| a == "--json");
            if asked_json {
                console::print(&failure_json(schema, &usage_failure(&error)).to_string());
            }
            console::note(error.to_string().trim_end());
            return ExitCode::from(FailureKind::Usage.exit_code());
        }
    };
    let wants_json = is_json(&args);
    match run(args) {
        Ok(finished) => {
            if wants_json {
                console::print(&finished.json.to_string());
            } else {
                finished.lines.iter().for_each(|line| console::print(line));
            }
            ExitCode::from(finished.exit_code)
        }
        Err(failure) => {
            if wants_json {
                console::print(&failure_json(schema, &failure).to_string());
            }
            console::note(&format!("{name}: {failure}"));
            ExitCode::from(failure.exit_code())
        }
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
    failure.field = context(ContextKind::InvalidArg);
    failure.value = context(ContextKind::InvalidValue);
    failure
}

/// The JSON object of a run that ended without a result.
#[must_use]
pub fn failure_json(schema: &str, failure: &Failure) -> Value {
    json!({
        "schema": schema,
        "verdict": "invalid",
        "error": {
            "kind": failure.kind,
            "message": failure.message,
            "field": failure.field,
            "value": failure.value,
        },
    })
}

/// An error of the model as the failure of a run: which field, tensor or file, and its value.
pub fn model_failure(error: &ModelError) -> Failure {
    let kind = match error.kind() {
        ErrorKind::Kernel | ErrorKind::Cache { .. } => FailureKind::Internal,
        _ => FailureKind::BadInput,
    };
    let mut failure = Failure::new(kind, error.to_string());
    failure.field = error.field().map(str::to_owned);
    failure.value = error.value();
    failure
}
