//! The peer of runs on other hosts: `transfer-bench serve`.

use std::time::Duration;

use kvgate_transfer::{Address, Agent, AgentEvent, Deadline, PeerId};
use serde::Serialize;

use super::control::Control;
use super::far::FarLink;
use super::target::{self, Home};
use crate::handoff::console;
use crate::handoff::endpoint;
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::link::transfer_failure;
use crate::handoff::options::Transport;

/// What to serve.
#[derive(Debug)]
pub struct Serve {
    /// `HOST:PORT`.
    pub listen: String,
    /// Port of the connections that move the bytes; 0 lets the system choose.
    pub data_port: u16,
    /// So many runs.
    pub runs: u32,
    /// The secret of both sides.
    pub token: Option<Vec<u8>>,
    /// Bound of every wait for a peer.
    pub deadline: Duration,
}

/// What was served.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Served {
    /// Runs that ended well.
    pub runs: u32,
}

/// Serves one run after the other.
///
/// # Errors
/// The address cannot be used; no peer came, or one was lost, within the deadline.
pub fn run(serve: &Serve) -> Result<Served, Failure> {
    let listening = endpoint::listen(&serve.listen, Transport::Tcp, serve.token.is_some())?;
    let agent = target::build_agent("serve", serve.token.clone())?;
    let bound = agent
        .listen(&listening.address)
        .map_err(|error| transfer_failure(&error))?;
    let Address::Tcp(bound) = bound else {
        return Err(Failure::internal(format!("listens on {bound}")));
    };
    console::print(&format!("listening {bound}"));
    let home = Home {
        agent: None,
        ip: bound.ip(),
        port: serve.data_port,
        is_far: true,
        token: serve.token.clone(),
    };
    let mut served = Served { runs: 0 };
    while served.runs < serve.runs {
        let peer = next_peer(&agent, serve.deadline)?;
        match FarLink::new(&agent, peer, serve.deadline) {
            Ok(link) => {
                console::note(&format!("transfer-bench: serves run {}", served.runs + 1));
                target::run(Control::far(link), &home, serve.deadline)?;
                served.runs += 1;
            }
            Err(failure) => console::note(&format!("transfer-bench: refused: {failure}")),
        }
    }
    // The last answer goes out before the process ends.
    let _ = agent.shutdown(Deadline::after(serve.deadline));
    Ok(served)
}

/// The next one whose version and secret are right. Others are named.
fn next_peer(agent: &Agent, deadline: Duration) -> Result<PeerId, Failure> {
    let until = Deadline::after(deadline);
    loop {
        match agent.next_event(until) {
            Some(AgentEvent::PeerUp { peer }) => return Ok(peer),
            Some(AgentEvent::Refused { address, reason }) => {
                console::note(&format!("transfer-bench: refused {address}: {reason}"));
            }
            Some(_) => {}
            None => {
                let deadline_ms = deadline.as_millis();
                let message = format!("no measuring side connected within {deadline_ms} ms");
                return Err(Failure::new(FailureKind::DeadlineExceeded, message)
                    .with_field("deadline_ms", deadline_ms));
            }
        }
    }
}
