//! What can be refused before a process is started: the model's limits, formats, files.

use kvgate_kvcache::CacheSchema;

use super::failure::Failure;
use super::fault::place;
use super::options::{HostOptions, OutputOptions, PoolPages, PromptOptions};
use super::plan::check_length;
use super::prompt::PromptSource;
use super::{model, out, sizing};

/// Checks model and formats.
pub fn check_host(host: &HostOptions) -> Result<(u32, u32, CacheSchema), Failure> {
    let config = model::config(host)?;
    let schema = model::schema(&config, host, [0; 32])?;
    Ok((config.vocab_size, config.max_position_embeddings, schema))
}

/// Tokens of every prompt of the run.
pub fn prompt_tokens(
    host: &HostOptions,
    prompt: &PromptOptions,
    vocab_size: u32,
) -> Result<u32, Failure> {
    let source = PromptSource::of(prompt, host.seed, vocab_size)?;
    Ok(prompt.tokens.unwrap_or(source.token_count()))
}

/// Checks a whole run.
pub fn check(
    host: &HostOptions,
    prompt: &PromptOptions,
    output: &OutputOptions,
) -> Result<(), Failure> {
    let (vocab_size, context_tokens, schema) = check_host(host)?;
    let tokens = prompt_tokens(host, prompt, vocab_size)?;
    check_length(tokens, prompt.steps, context_tokens)?;
    if let PoolPages::Pages(pages) = host.pool_pages {
        let needed = sizing::pages_per_request(&schema, tokens, prompt.steps);
        if pages < needed {
            return Err(Failure::input(
                "pool_pages",
                pages,
                &format!("at least {needed}, the pages of one request"),
            ));
        }
    }
    if let Some(hold) = prompt.hold
        && hold.layer >= schema.layer_count()
    {
        return Err(Failure::input(
            "hold",
            hold.layer,
            &format!("a layer below {}", schema.layer_count()),
        ));
    }
    if let Some(fault) = &host.fault {
        place::check(fault, &schema, tokens, host.seed, prompt)?;
    }
    if let Some(path) = &output.out {
        if prompt.requests != 1 {
            return Err(Failure::input(
                "out",
                path.display(),
                "a run of one request (--requests 1)",
            ));
        }
        out::check(path)?;
    }
    Ok(())
}
