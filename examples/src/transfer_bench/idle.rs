//! What an agent uses when nothing is asked of it.

use std::thread;
use std::time::Duration;

use serde::Serialize;

use super::activity::Activity;
use super::layout::{Layout, PoolShape};
use super::options::Backend;
use super::pair::Pair;
use super::route::Route;
use super::target::build_agent;
use crate::handoff::failure::Failure;

/// Use of one process while idle.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Idle {
    /// Seconds of looking.
    pub seconds: f64,
    /// Cores, of all threads.
    pub cpu_share: f64,
    /// Context switches per second of all threads but the one that measures.
    pub context_switches_s: f64,
    /// The same, in all.
    pub context_switches: u64,
    /// Threads but the one that measures.
    pub threads: u64,
}

/// Both ends of an idle connection, and an agent alone.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct IdleReport {
    /// The path of the connection.
    pub backend: &'static str,
    /// This process, with one peer.
    pub with_peer: Idle,
    /// The peer process.
    pub peer: Idle,
    /// An agent without a peer.
    pub alone: Idle,
}

/// Looks for `seconds` at a connection, and for the same time at an agent alone.
pub fn measure(
    backend: Backend,
    seconds: Duration,
    deadline: Duration,
) -> Result<IdleReport, Failure> {
    let agent = build_agent("alone", None)?;
    let before = Activity::now();
    thread::sleep(seconds);
    let alone = between(before, Activity::now(), seconds);
    drop(agent);
    let pool = PoolShape {
        offset_bytes: 0,
        slot_bytes: 4096,
        slot_count: 16,
    };
    let route = Route::here(backend, deadline);
    let mut pair = Pair::start(&route, Layout { pools: vec![pool] })?;
    // Once around, so that everything is set up.
    pair.next_flight(super::options::Direction::Write, (1, 1), false)?;
    let (there_before, before) = (pair.peer_activity()?, Activity::now());
    thread::sleep(seconds);
    let with_peer = between(before, Activity::now(), seconds);
    let peer = between(there_before, pair.peer_activity()?, seconds);
    Ok(IdleReport {
        backend: pair.backend().id(),
        with_peer,
        peer,
        alone,
    })
}

fn between(before: Activity, after: Activity, seconds: Duration) -> Idle {
    let switches = after.switches.saturating_sub(before.switches);
    let seconds = seconds.as_secs_f64();
    Idle {
        seconds,
        cpu_share: after.cpu_ns.saturating_sub(before.cpu_ns) as f64 / 1e9 / seconds,
        context_switches_s: switches as f64 / seconds,
        context_switches: switches,
        threads: after.threads,
    }
}

impl IdleReport {
    /// One line per process, for people.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let line = |name: &str, idle: &Idle| {
            format!(
                "{name}: {:.6} cores, {:.2} context switches a second, {} threads, {} s",
                idle.cpu_share, idle.context_switches_s, idle.threads, idle.seconds
            )
        };
        let with = format!("one peer over {}", self.backend);
        vec![
            line(&with, &self.with_peer),
            line("that peer", &self.peer),
            line("no peer", &self.alone),
        ]
    }
}
