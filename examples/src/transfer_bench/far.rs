//! The conversation of two hosts: messages of a connection of agents, which has proved version and secret, and
//! whose peer is watched.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use kvgate_transfer::{Address, Agent, AgentEvent, Deadline, PeerId};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::control::Answer;
use super::route::Far;
use super::{SCHEMA, target};
use crate::handoff::console;
use crate::handoff::endpoint::{self, Target};
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::link::{PeerWatch, slice, transfer_failure};
use crate::handoff::options::Transport;

/// One end.
#[derive(Debug)]
pub struct FarLink {
    agent: Agent,
    watch: PeerWatch,
    /// Whether the other side's connection has ended.
    is_down: bool,
}

impl FarLink {
    /// Over a connection that stands, with somebody who runs the same tool.
    pub fn new(agent: &Agent, peer: PeerId, deadline: Duration) -> Result<Self, Failure> {
        let info = agent.peer(peer).ok_or_else(lost)?;
        if info.app_metadata != SCHEMA.as_bytes() {
            let said = String::from_utf8_lossy(&info.app_metadata).into_owned();
            return Err(Failure::new(
                FailureKind::SchemaMismatch,
                format!(
                    "{:?} is no transfer-bench of this version: it says {said:?}, expected {SCHEMA:?}",
                    info.name
                ),
            )
            .with_field("peer", said));
        }
        Ok(Self {
            agent: agent.clone(),
            watch: PeerWatch::new(agent, peer, deadline),
            is_down: false,
        })
    }

    /// Connects to a `transfer-bench serve`; also gives the address that it was found at.
    pub fn connect(far: &Far, deadline: Duration) -> Result<(Self, IpAddr), Failure> {
        let target = endpoint::connect(&far.address, Transport::Tcp, far.token.is_some())
            .map_err(|failure| named(failure, "peer"))?;
        let Target::Agent(addresses) = target else {
            return Err(Failure::internal("the peer has no address"));
        };
        let agent = target::build_agent("measuring", far.token.clone())?;
        let until = Deadline::after(deadline);
        let mut refused = Failure::internal("no address to connect to");
        for address in &addresses {
            let Address::Tcp(socket) = address else {
                continue;
            };
            match agent.connect(address, until) {
                Ok(peer) => return Ok((Self::new(&agent, peer, deadline)?, socket.ip())),
                Err(error) => refused = named(transfer_failure(&error), "peer"),
            }
        }
        Err(refused)
    }

    /// Sends one message.
    pub fn send(&self, message: &impl Serialize) -> Result<(), Failure> {
        let bytes = serde_json::to_vec(message)
            .map_err(|error| Failure::internal(format!("a message: {error}")))?;
        let sent = self.agent.send(self.watch.peer(), bytes);
        sent.map_err(|error| transfer_failure(&error))
    }

    /// The next message; `None` when the connection has ended.
    pub fn receive<T: DeserializeOwned>(&mut self) -> Result<Option<T>, Failure> {
        let began = Instant::now();
        while !self.is_down {
            match self.agent.next_event(slice()) {
                Some(AgentEvent::Message { peer, bytes }) if peer == self.watch.peer() => {
                    let message = serde_json::from_slice(&bytes).map_err(|error| {
                        let text = format!("a message of the peer cannot be read: {error}");
                        Failure::new(FailureKind::SchemaMismatch, text)
                    })?;
                    return Ok(Some(message));
                }
                Some(AgentEvent::PeerDown { peer, .. }) if peer == self.watch.peer() => {
                    self.is_down = true;
                }
                Some(AgentEvent::PeerUp { peer }) if peer != self.watch.peer() => {
                    self.turn_away(peer);
                }
                Some(_) => {}
                None => self.watch.check(began, "the conversation of the run")?,
            }
        }
        Ok(None)
    }

    /// One run at a time: somebody else is told so, instead of being left to wait.
    fn turn_away(&self, peer: PeerId) {
        let failure = Failure::new(FailureKind::Unavailable, "the peer serves another run");
        let told = serde_json::to_vec(&Answer::Failed(failure.clone()))
            .map_err(|error| Failure::internal(error.to_string()))
            .and_then(|bytes| {
                let sent = self.agent.send(peer, bytes);
                sent.map_err(|error| transfer_failure(&error))
            });
        match told {
            Ok(()) => console::note("transfer-bench: turned away a second measuring side"),
            Err(failure) => console::note(&format!("transfer-bench: a second one: {failure}")),
        }
    }
}

/// The same failure, of another option.
#[must_use]
pub fn named(mut failure: Failure, field: &str) -> Failure {
    if failure.field.is_some() {
        failure.field = Some(field.to_owned());
    }
    failure
}

fn lost() -> Failure {
    Failure::new(FailureKind::PeerLost, "the peer was lost")
}
