//! Where a fault acts: a live row of some page of some component of some layer of some request.
//!
//! Both sides derive the same place from the same options, so neither has to tell the other.

use kvgate_kvcache::{CacheSchema, Component, ComponentRow, LayerId, LivePage};

use super::spec::{FaultKind, FaultSpec};
use crate::handoff::cancel;
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::options::PromptOptions;
use crate::handoff::plan::RunPlan;
use crate::handoff::prompt::mix;

/// A place, in terms of the schema.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The component.
    pub component: Component,
    /// The layer.
    pub layer: LayerId,
    /// The page, in the numbering of the schema.
    pub page: LivePage,
    /// The request whose rows are damaged.
    pub request: u32,
}

/// What decides which places there are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scope {
    /// Tokens of every prompt.
    pub prompt_tokens: u32,
    /// Requests in all.
    pub requests: u32,
    /// Requests in flight.
    pub concurrency: u32,
    /// Tokens to decode.
    pub steps: u32,
    /// Share of the requests that is aborted.
    pub cancel_share: f64,
    /// Seed of the aborts.
    pub seed: u64,
}

impl Scope {
    /// The scope of a run.
    #[must_use]
    pub fn of(plan: &RunPlan) -> Self {
        Self {
            prompt_tokens: plan.prompt_tokens,
            requests: plan.requests,
            concurrency: plan.concurrency,
            steps: plan.steps,
            cancel_share: plan.cancel_share,
            seed: plan.seed,
        }
    }
}

/// Refuses a fault that has no place, before anything is started.
pub fn check(
    fault: &FaultSpec,
    schema: &CacheSchema,
    tokens: u32,
    seed: u64,
    prompt: &PromptOptions,
) -> Result<(), Failure> {
    let scope = Scope {
        prompt_tokens: tokens,
        requests: prompt.requests,
        concurrency: prompt.concurrency,
        steps: prompt.steps,
        cancel_share: prompt.cancel_share,
        seed,
    };
    draw(fault, schema, scope).map(drop)
}

/// Draws what the options leave out.
pub fn draw(fault: &FaultSpec, schema: &CacheSchema, scope: Scope) -> Result<Place, Failure> {
    let component = component(fault)?;
    if let Some(layer) = fault.layer.filter(|layer| *layer >= schema.layer_count()) {
        return Err(refuse(
            fault,
            "layer",
            layer,
            &format!("a layer below {}", schema.layer_count()),
        ));
    }
    let pages: Vec<(&ComponentRow, LivePage)> = schema
        .rows()
        .iter()
        .filter(|row| component.is_none_or(|component| row.component == component))
        .filter(|row| fault.layer.is_none_or(|layer| row.layer.0 == layer))
        .flat_map(|row| pages_of(fault, schema, row, scope.prompt_tokens))
        .collect();
    let requests = requests(fault, scope)?;
    let index = mix(fault.seed, fault.kind as u64, 1) % (pages.len().max(1) as u64);
    let request = mix(fault.seed, fault.kind as u64, 2) % (requests.len().max(1) as u64);
    match (pages.get(index as usize), requests.get(request as usize)) {
        (Some((row, page)), Some(request)) => Ok(Place {
            component: row.component,
            layer: row.layer,
            page: page.clone(),
            request: *request,
        }),
        _ => Err(nowhere(fault, scope.prompt_tokens)),
    }
}

fn component(fault: &FaultSpec) -> Result<Option<Component>, Failure> {
    let asked = match &fault.component {
        None => None,
        Some(id) => match Component::from_id(id) {
            Some(component) => Some(component),
            None => {
                return Err(refuse(
                    fault,
                    "component",
                    id,
                    "a component id such as index_k",
                ));
            }
        },
    };
    match (fault.kind, asked) {
        (FaultKind::UngatedIndexK, None | Some(Component::IndexK)) => Ok(Some(Component::IndexK)),
        (FaultKind::UngatedIndexK, Some(other)) => {
            Err(refuse(fault, "component", other.id(), "index_k"))
        }
        (_, asked) => Ok(asked),
    }
}

/// The pages of one component of one layer on which this kind changes a live row.
fn pages_of<'a>(
    fault: &FaultSpec,
    schema: &CacheSchema,
    row: &'a ComponentRow,
    prompt_tokens: u32,
) -> Vec<(&'a ComponentRow, LivePage)> {
    let pages = schema.live_pages(row, prompt_tokens);
    let is_alone = pages.len() < 2;
    let chosen = pages
        .into_iter()
        .enumerate()
        .filter(|(index, _)| fault.page.is_none_or(|page| page as usize == *index));
    match fault.kind {
        // Two pages of one pool are exchanged.
        FaultKind::SwapPages if is_alone => Vec::new(),
        _ => chosen.map(|(_, page)| (row, page)).collect(),
    }
}

/// The requests whose rows can be damaged: those that run to their end, and for a late write those that
/// get the pages of an aborted one.
fn requests(fault: &FaultSpec, scope: Scope) -> Result<Vec<u32>, Failure> {
    if let Some(request) = fault.request.filter(|request| *request >= scope.requests) {
        return Err(refuse(
            fault,
            "request",
            request,
            &format!("a request below {}", scope.requests),
        ));
    }
    if fault.kind.is_late_write() {
        let victims = scope.concurrency..scope.requests;
        let wanted = fault.request.map(|request| {
            if request < scope.concurrency {
                request + scope.concurrency
            } else {
                request
            }
        });
        return Ok(victims
            .filter(|victim| wanted.is_none_or(|wanted| wanted == *victim))
            .collect());
    }
    let moments = cancel::draw(scope.seed, scope.requests, scope.cancel_share, scope.steps);
    let finishing = (0..scope.requests)
        .zip(moments)
        .filter(|(_, moment)| moment.is_none())
        .map(|(request, _)| request);
    Ok(finishing
        .filter(|request| fault.request.is_none_or(|wanted| wanted == *request))
        .collect())
}

fn refuse(fault: &FaultSpec, key: &str, value: impl std::fmt::Display, expected: &str) -> Failure {
    Failure::new(
        FailureKind::ProvesNothing,
        format!(
            "--fault {},{key}={value}: no such place, expected {expected}",
            fault.kind.id()
        ),
    )
    .with_field(&format!("fault.{key}"), value)
}

fn nowhere(fault: &FaultSpec, prompt_tokens: u32) -> Failure {
    Failure::new(
        FailureKind::ProvesNothing,
        format!(
            "--fault {}: no live row to act on at that place with {prompt_tokens} tokens",
            fault.kind.id()
        ),
    )
    .with_field("fault", fault.kind.id())
}

#[cfg(test)]
mod tests {
    use kvgate_kvcache::{Formats, V4Geometry};

    use super::*;

    const SCOPE: Scope = Scope {
        prompt_tokens: 300,
        requests: 1,
        concurrency: 1,
        steps: 8,
        cancel_share: 0.0,
        seed: 1,
    };

    fn schema() -> CacheSchema {
        let geometry = V4Geometry {
            layer_ratios: vec![0, 4, 128, 4, 128, 4],
            ..V4Geometry::flash()
        };
        CacheSchema::deepseek_v4(&geometry, &Formats::default()).unwrap()
    }

    fn place(text: &str, scope: Scope) -> Result<Place, Failure> {
        draw(&text.parse().unwrap(), &schema(), scope)
    }

    #[test]
    fn chosen_places_are_taken_and_absent_ones_refused() {
        let chosen = place("drop-page,component=index_k,layer=3,page=1", SCOPE).unwrap();
        assert_eq!(
            (chosen.component, chosen.layer.0, chosen.page.page_ordinal),
            (Component::IndexK, 3, 1)
        );
        for absent in [
            "drop-page,component=index_k,layer=0",
            "drop-page,component=nothing",
            "drop-page,layer=6",
            "drop-page,component=index_k,page=2",
            "drop-page,request=1",
            "ungated-index-k,component=c4_latent",
            "swap-pages,component=c128_state",
            "late-write",
        ] {
            assert_eq!(place(absent, SCOPE).unwrap_err().exit_code(), 2, "{absent}");
        }
        assert!(
            place(
                "ungated-index-k",
                Scope {
                    prompt_tokens: 3,
                    ..SCOPE
                }
            )
            .is_err()
        );
    }

    #[test]
    fn seeds_reach_every_component() {
        let draws = (0..200).map(|seed| {
            let fault = FaultSpec {
                seed,
                ..("drop-page".parse().unwrap())
            };
            draw(&fault, &schema(), SCOPE).unwrap().component
        });
        let seen: std::collections::BTreeSet<_> = draws.collect();
        assert_eq!(seen.len(), 7);
    }

    #[test]
    fn the_victim_of_a_late_write_comes_after_the_first_batch() {
        let scope = Scope {
            requests: 8,
            concurrency: 4,
            ..SCOPE
        };
        assert!((4..8).contains(&place("late-write", scope).unwrap().request));
        assert_eq!(place("late-write,request=2", scope).unwrap().request, 6);
        assert_eq!(place("late-write,request=5", scope).unwrap().request, 5);
    }
}
