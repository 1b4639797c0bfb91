//! The prompt in one process, the steps in another, and a third one that computes the same alone.

use kvgate_model::safetensors::SafetensorsFile;

use super::{Answer, Args, Job};
use crate::handoff::console::Console;
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::launcher;
use crate::handoff::options::{
    GivenIds, HostOptions, OutputOptions, PoolPages, PromptOptions, Verify,
};
use crate::handoff::report::Verdict;
use crate::tool::model_failure;

/// Bound of every wait for a process that shows no progress.
const DEADLINE_MS: u64 = 10_000;

/// Hands the prompt over as `pd-handoff` does; what the decode process writes is the answer.
pub(super) fn run(args: &Args, job: &Job) -> Result<Answer, Failure> {
    if job.steps.is_empty() {
        return Err(Failure::input("steps", 0, "at least 1 in mode handoff"));
    }
    let host = HostOptions {
        transport: args.transport,
        index_k: args.index_k,
        latent: args.latent,
        model: Some(args.model.clone()),
        seed: 1,
        pool_pages: PoolPages::Auto,
        verify: Verify::Canary,
        deadline_ms: DEADLINE_MS,
        auth_token_file: None,
        fault: None,
        phase_markers: false,
        status_dir: None,
        verbosity: 0,
    };
    let prompt = PromptOptions {
        prompt_file: None,
        tokens: Some(job.prompt.len() as u32),
        chunk: job.chunk,
        steps: job.steps.len() as u32,
        requests: 1,
        concurrency: 1,
        cancel_share: 0.0,
        hold: None,
        given: Some(GivenIds {
            prompt: job.prompt.clone(),
            steps: job.steps.clone(),
        }),
        turns: None,
    };
    let output = OutputOptions {
        out: Some(args.out.clone()),
        report: None,
        json: true,
    };
    let console = Console::new(true);
    let report = launcher::launch(&console, &host, &prompt, &output, &mut None, |report, _| {
        report
    })?;
    if report.verdict != Verdict::BitIdentical {
        return Err(Failure::new(
            FailureKind::Mismatch,
            format!("hand-off: {}", report.verdict_line()),
        ));
    }
    let mut file = SafetensorsFile::open(&args.out).map_err(|error| model_failure(&error))?;
    let mut read = |name: &str| {
        let tensor = file.read(name).map_err(|error| model_failure(&error))?;
        tensor
            .to_f32()
            .ok_or_else(|| Failure::internal(format!("{name} is not f32")))
    };
    Ok(Answer {
        prefill_last: read("prefill_last_logits")?,
        decode: read("decode_logits")?,
    })
}
