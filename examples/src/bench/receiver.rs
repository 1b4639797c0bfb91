//! The receiving process: offers slots, waits until everything is there, gives them back.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use kvgate_kvcache::{PageId, Room};
use kvgate_transfer::{Address, Agent, AgentEvent, Deadline, PeerId};

use super::{FromReceiver, Heap, ToReceiver, shape};
use crate::handoff::channel::{self, ChannelReceiver, ChannelSender};
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::link::transfer_failure;
use crate::handoff::model::cache_failure;
use crate::handoff::timeline;

/// Bound of every wait.
pub(super) const LIMIT: Duration = Duration::from_secs(30);

/// Serves hand-offs until the sender closes the socket.
pub fn run(control: UnixStream, heap: Heap) -> Result<(), Failure> {
    let (sender, mut receiver) = channel::split(control, LIMIT).map_err(|error| lost(&error))?;
    let Some(tokens) = first(&mut receiver)? else {
        return Ok(());
    };
    let schema = shape::schema().map_err(|error| cache_failure(&error))?;
    let pools = shape::pools(&schema, tokens).map_err(|error| cache_failure(&error))?;
    let agent = Agent::builder("receiver")
        .build()
        .map_err(|error| transfer_failure(&error))?;
    pools
        .register(&agent)
        .map_err(|error| cache_failure(&error))?;
    let name = format!("kvgate-handoff-bench-{}", std::process::id());
    agent
        .listen(&Address::Shm(name.clone()))
        .map_err(|error| transfer_failure(&error))?;
    tell(&sender, &FromReceiver::Listening { name })?;
    let peer = wait_for_peer(&agent)?;
    let plan = shape::plan(&schema, tokens).map_err(|error| cache_failure(&error))?;
    while let Some((ToReceiver::Next, _)) = receiver
        .receive::<ToReceiver>()
        .map_err(|error| lost(&error))?
    {
        let lease = pools
            .reserve(tokens, Room(1))
            .map_err(|error| cache_failure(&error))?;
        let epoch = lease.number();
        let begin = heap.begin();
        let mut flight = lease
            .into_inflight(&plan, epoch, &[(peer, shape::RANK)])
            .map_err(|refused| cache_failure(&refused.1))?;
        flight
            .arm(&agent, None)
            .map_err(|error| cache_failure(&error))?;
        let table = flight.block_table();
        let pair = |id: &PageId| (id.index, id.generation);
        let offer = FromReceiver::Offer {
            epoch: epoch.0,
            pages: table.pages().iter().map(pair).collect(),
            windows: table.windows().iter().map(pair).collect(),
            request: pair(&table.request()),
        };
        tell(&sender, &offer)?;
        let pages = flight.lease().map_err(|error| cache_failure(&error))?;
        drop(
            pages
                .all_layers(Deadline::after(LIMIT))
                .map_err(|error| cache_failure(&error))?,
        );
        let at_us = timeline::now_us();
        tell(
            &sender,
            &FromReceiver::Landed {
                at_us,
                extra_bytes: heap.extra_since(begin),
            },
        )?;
        drop(pages);
        flight.close().wait(Deadline::after(LIMIT)).map_err(|_| {
            Failure::new(FailureKind::DeadlineExceeded, "the slots did not come back")
        })?;
    }
    Ok(())
}

fn first(receiver: &mut ChannelReceiver) -> Result<Option<u32>, Failure> {
    match receiver
        .receive::<ToReceiver>()
        .map_err(|error| lost(&error))?
    {
        Some((ToReceiver::Start { tokens }, _)) => Ok(Some(tokens)),
        Some(_) => Err(Failure::internal("an order out of turn")),
        None => Ok(None),
    }
}

fn wait_for_peer(agent: &Agent) -> Result<PeerId, Failure> {
    match agent.next_event(Deadline::after(LIMIT)) {
        Some(AgentEvent::PeerUp { peer }) => Ok(peer),
        _ => Err(Failure::new(
            FailureKind::PeerLost,
            "the sender did not connect",
        )),
    }
}

fn tell(sender: &ChannelSender, message: &FromReceiver) -> Result<(), Failure> {
    sender.send(message).map_err(|error| lost(&error))
}

pub(super) fn lost(error: &std::io::Error) -> Failure {
    Failure::new(FailureKind::PeerLost, format!("control socket: {error}"))
}
