//! What can be refused before a process is started: the model's limits, formats, files.

use kvgate_kvcache::identity::SALT_LIMIT_BYTES;
use kvgate_kvcache::{CacheSchema, Space};

use super::failure::Failure;
use super::fault::place;
use super::options::{HostOptions, OutputOptions, PoolPages, PromptOptions};
use super::plan::check_length;
use super::prompt::PromptSource;
use super::turns::schedule::{self, Plan};
use super::turns::{TierPages, TurnOptions};
use super::{model, out, sizing, turns};

/// Checks model and formats.
pub fn check_host(host: &HostOptions) -> Result<(u32, u32, CacheSchema), Failure> {
    let config = model::config(host)?;
    let schema = model::schema(&config, host, [0; 32])?;
    Ok((config.vocab_size, config.max_position_embeddings, schema))
}

/// Tokens of every prompt of the run; of conversations, those of the longest one.
pub fn prompt_tokens(
    host: &HostOptions,
    prompt: &PromptOptions,
    vocab_size: u32,
) -> Result<u32, Failure> {
    let source = PromptSource::of(prompt, host.seed, vocab_size)?;
    if let Some(turns) = &prompt.turns {
        return Ok(Plan::of(host.seed, turns, &source).longest_prompt());
    }
    Ok(prompt.tokens.unwrap_or(source.token_count()))
}

/// The device pool holds at least one request.
fn check_tiers(turns: &TurnOptions, plan: &Plan, schema: &CacheSchema) -> Result<(), Failure> {
    let needed = schema.slots_for(plan.longest_tokens()).of(Space::Page);
    match turns.device_pages {
        TierPages::Pages(pages) if pages < needed => {
            let expected = format!("at least {needed}, the pages of the longest conversation");
            Err(Failure::input("device_pages", pages, &expected))
        }
        _ => Ok(()),
    }
}

/// What would leave a conversation without an answer cannot be asked for together with one.
fn check_turns(host: &HostOptions, prompt: &PromptOptions) -> Result<(), Failure> {
    if prompt.cancel_share > 0.0 {
        let expected = "0 in a run of conversations";
        return Err(Failure::input(
            "cancel_share",
            prompt.cancel_share,
            expected,
        ));
    }
    let salt_bytes = prompt
        .turns
        .as_ref()
        .map_or(0, |turns| turns.storage.salt.len());
    if salt_bytes > SALT_LIMIT_BYTES {
        let expected = format!("at most {SALT_LIMIT_BYTES} bytes");
        let value = format!("{salt_bytes} bytes long");
        return Err(Failure::input("salt", value, &expected));
    }
    if let Some(fault) = &host.fault {
        let expected = "none in a run of conversations";
        return Err(Failure::input("fault", fault.kind.id(), expected));
    }
    Ok(())
}

/// Checks a whole run.
pub fn check(
    host: &HostOptions,
    prompt: &PromptOptions,
    output: &OutputOptions,
) -> Result<(), Failure> {
    let (vocab_size, context_tokens, schema) = check_host(host)?;
    if let Some(turns) = &prompt.turns {
        check_turns(host, prompt)?;
        turns::check_tokens(schedule::least_tokens(turns), context_tokens)?;
        let source = PromptSource::of(prompt, host.seed, vocab_size)?;
        let plan = Plan::of(host.seed, turns, &source);
        turns::check_length(&plan, context_tokens)?;
        check_tiers(turns, &plan, &schema)?;
    }
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
            let expected = "a run of one request (--requests 1, or one conversation of one turn)";
            return Err(Failure::input("out", path.display(), expected));
        }
        out::check(path)?;
    }
    Ok(())
}
