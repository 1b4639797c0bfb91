//! Connections that are not that of the prefill side of the run.

use kvgate_transfer::PeerId;

use super::session::Session;
use crate::handoff::console;
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::link;
use crate::handoff::plan::{self, Message, SideMessage};
use crate::handoff::protocol::{self, FromPrefill};

impl Session {
    /// Whether the connection is that of the prefill side of this run.
    pub(super) fn is_of_run(&self, peer: PeerId) -> bool {
        self.greeted == Some(peer)
    }

    /// The first connection that says hello is the prefill side of the run. Whatever another one says changes nothing.
    pub(super) fn on_stranger(
        &mut self,
        from: PeerId,
        bytes: &bytes::Bytes,
    ) -> Result<(), Failure> {
        if self.greeted.is_none() {
            let incarnation = link::incarnation(&self.side.agent, from);
            let hello = incarnation.and_then(|incarnation| match plan::parse(bytes)? {
                Message::Handoff(bytes) => protocol::from_prefill(&bytes, incarnation),
                Message::Side(_) => Ok(None),
            });
            if let Ok(Some(FromPrefill::Hello(fields))) = hello {
                return self.on_hello(from, &fields);
            }
        }
        if self.strangers.insert(from) {
            self.refused_connections += 1;
            let reason = match self.greeted {
                Some(_) => "another prefill side has this run",
                None => "it said something else than hello",
            };
            let info = self.side.agent.peer(from);
            let name = info.map_or_else(String::new, |info| info.name);
            console::note(&format!(
                "pd-handoff: refused a connection of {name:?}: {reason}"
            ));
            let failure = Failure::new(FailureKind::Locked, format!("decode refused: {reason}"));
            // Whether it listens is its own affair.
            let _ = self
                .side
                .agent
                .send(from, plan::encode(&SideMessage::Failed(failure)));
        }
        Ok(())
    }
}
