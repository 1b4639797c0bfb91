//! The judgement: everything compared, everything counted, one report.

use std::sync::PoisonError;

use kvgate_kvcache::PoolStats;

use super::session::{Fate, Peer, Session};
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::fault::decode::Watched;
use crate::handoff::model;
use crate::handoff::observer::Phase;
use crate::handoff::plan::PrefillSummary;
use crate::handoff::report::{
    Canary, Conversations, Counters, DecodeWork, ErrorObject, Hits, Pids, PrefillWork, PrefixReuse,
    Report, Requests, SCHEMA, Verdict, tier_without_hit as first_without_hit,
};
use crate::handoff::timeline::{Timeline, process_cpu_ms};
use crate::handoff::{out, tally};

/// Writes `--out`, compares, and puts the report together.
pub(super) fn judge(session: &Session) -> Result<(Report, Timeline), Failure> {
    let side = &session.side;
    let Some(peer) = &session.peer else {
        return Err(Failure::internal("a verdict without a run"));
    };
    let vocab_size = side.host.vocab_size();
    if let (Some(path), Some(prompt), Some(outcome)) = (
        &session.output.out,
        &session.first_prompt,
        session.comparison.first_outcome(),
    ) {
        let last = session
            .summary
            .as_ref()
            .and_then(|summary| summary.last_logits.as_deref());
        out::write(path, prompt, outcome, last, vocab_size)?;
    }
    side.markers.enter(Phase::Comparison);
    let findings = session.comparison.findings(vocab_size);
    let empty = PrefillSummary::default();
    let summary = session.summary.as_ref().unwrap_or(&empty);
    let notes = std::mem::take(&mut *side.notes.lock().unwrap_or_else(PoisonError::into_inner));
    let totals = tally::totals(&side.host.schema, &notes, summary, session.clock_shift_us);
    let found = std::mem::take(&mut *side.found.lock().unwrap_or_else(PoisonError::into_inner));
    let reuse = side.prefixes.finish();
    let stats = side.pools.stats();
    let fate_count = |wanted| {
        session
            .fates
            .values()
            .filter(|fate| **fate == wanted)
            .count() as u32
    };
    let requests = Requests {
        asked: peer.plan.requests,
        finished: fate_count(Fate::Finished),
        cancelled: fate_count(Fate::Cancelled),
        failed: 0,
    };
    let last_position = u64::from(peer.plan.prompt_tokens) + u64::from(peer.plan.steps);
    let has_indexer = side.host.model.config().has_indexer();
    let mut report = Report {
        schema: SCHEMA.to_owned(),
        verdict: Verdict::BitIdentical,
        prompt_tokens: match &peer.plan.conversations {
            Some(_) => summary.prompt_tokens,
            None => u64::from(peer.plan.prompt_tokens),
        },
        steps: peer.plan.steps,
        chunk: peer.plan.chunk,
        transport: path(side, peer),
        index_k: side.options.index_k.id().to_owned(),
        latent: side.options.latent.id().to_owned(),
        model: model::label(&side.options),
        seed: side.options.seed,
        isa: side.host.model.isa().name().to_owned(),
        pids: Pids {
            prefill: peer.plan.prefill_pid,
            ..Pids::default()
        },
        requests,
        logits: findings.logits.clone(),
        cache: findings.cache.clone(),
        index_k_consulted: has_indexer && last_position / 4 > u64::from(side.host.index_topk()),
        decode: DecodeWork {
            prefill_tokens: 0,
            cpu_ms: process_cpu_ms(),
        },
        prefill: PrefillWork {
            cpu_ms: summary.cpu_ms,
        },
        pages: u64::from(side.size.pages),
        transfers: summary.transfers,
        bytes: totals.bytes,
        layers: totals.layers,
        transfer_gbps: totals.transfer_gbps,
        hidden_share: totals.hidden_share,
        page_reuses: stats.pages.reuses,
        peak_in_flight: session.peak_in_flight,
        pages_conserved: summary.pages_conserved && stats.is_conserved() && in_use(&stats) == 0,
        canary: Canary {
            mode: side.options.verify.id().to_owned(),
            checked: found.checked,
            violations: found.violations,
        },
        counters: counters(session),
        fault: session.planted.clone(),
        hits: hits(summary),
        conversations: conversations(peer, summary, reuse),
        error: None,
    };
    conclude(&mut report, findings.is_equal(), peer);
    let mut spans = notes.spans;
    spans.extend(totals.transfers);
    spans.extend(
        summary
            .spans
            .iter()
            .map(|span| span.shifted(session.clock_shift_us)),
    );
    Ok((report, Timeline { spans }))
}

/// Slots that did not come back.
fn in_use(stats: &PoolStats) -> u32 {
    [stats.pages, stats.windows, stats.requests]
        .iter()
        .map(|space| space.owned + space.draining)
        .sum()
}

/// Damage is damage, whoever finds it; a run that cannot show any is invalid.
/// The path that was taken: with `auto`, the one that was found.
fn path(side: &super::Side, peer: &Peer) -> String {
    let info = side.agent.peer(peer.id);
    info.map_or_else(
        || side.options.transport.id().to_owned(),
        |info| info.backend.to_string(),
    )
}

fn conclude(report: &mut Report, is_equal: bool, peer: &Peer) {
    let is_clean = is_equal && report.canary.violations.is_empty();
    let fault = peer.fault.as_ref();
    let is_serial = fault.is_some_and(Watched::serialises);
    // A conversation has one turn in flight.
    let at_once = match &peer.plan.conversations {
        Some(turns) => turns.sessions,
        None => report.requests.asked,
    };
    let wanted_in_flight = if is_serial {
        1
    } else {
        peer.plan.concurrency.min(at_once)
    };
    let invalid = if report.logits.compared == 0 {
        Some("0 logits compared".to_owned())
    } else if report.peak_in_flight < wanted_in_flight {
        Some(format!(
            "only {} of {wanted_in_flight} requests were in flight at one time",
            report.peak_in_flight
        ))
    } else if !report.pages_conserved {
        Some("pages were lost: a pool is not whole at the end".to_owned())
    } else {
        fault.and_then(|fault| fault.proves_nothing(is_clean, &report.counters))
    };
    let invalid = invalid.map(|reason| Failure::new(FailureKind::ProvesNothing, reason));
    let invalid = invalid.or_else(|| tier_without_hit(peer, report));
    if !is_clean {
        report.verdict = Verdict::Mismatch;
    } else if let Some(failure) = invalid {
        report.verdict = Verdict::Invalid;
        report.error = Some(ErrorObject::of(&failure));
    }
}

/// A comparison over several turns in which a tier had no hit says nothing about that tier.
fn tier_without_hit(peer: &Peer, report: &Report) -> Option<Failure> {
    let turns = peer.plan.conversations.as_ref()?;
    if !turns.is_verified || turns.turns < 2 {
        return None;
    }
    let conversations = report.conversations.as_ref()?;
    let work = &conversations.work;
    Some(first_without_hit(&work.tiers, work.misses)?.failure())
}

fn conversations(
    peer: &Peer,
    summary: &PrefillSummary,
    decode_reuse: PrefixReuse,
) -> Option<Conversations> {
    let turns = peer.plan.conversations.as_ref()?;
    Some(Conversations {
        sessions: turns.sessions,
        turns: turns.turns,
        work: summary.tiers.clone().unwrap_or_default(),
        decode_reuse,
    })
}

fn hits(summary: &PrefillSummary) -> Hits {
    let tokens = |name: &str| {
        let tiers = summary.tiers.iter().flat_map(|work| &work.tiers);
        let tier = tiers.clone().find(|tier| tier.tier == name);
        tier.map_or(0, |tier| tier.hit_tokens)
    };
    Hits {
        device_tokens: tokens("device"),
        host_tokens: tokens("host"),
        storage_tokens: tokens("storage"),
        remote_tokens: tokens("remote"),
    }
}

fn counters(session: &Session) -> Counters {
    let agent = session.side.agent.counters();
    Counters {
        stale: agent.stale,
        duplicate: agent.duplicate,
        unknown: agent.unknown,
        late_after_close: agent.late_after_close,
        refused_connections: session.refused_connections,
        quarantined_pages: session.most_quarantined,
        leaked_pages: 0,
    }
}
