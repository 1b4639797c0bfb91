//! What the two processes of a run tell each other beside the path that is measured.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::activity::Activity;
use super::layout::Layout;
use super::options::Backend;
use crate::handoff::channel::{self, ChannelReceiver, ChannelSender};
use crate::handoff::failure::{Failure, FailureKind};

/// Orders to the peer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Make pools and be reachable.
    Start {
        /// The path, never `Auto`.
        backend: Backend,
        /// The pools.
        layout: Layout,
    },
    /// Wait for the next flight. The former one is over.
    Flight {
        /// Stages.
        stages: u16,
        /// Chunks of each.
        chunks: u16,
    },
    /// What did you use so far?
    Activity,
    /// The processor time alone, which is cheap to tell.
    Cpu,
    /// Serve the bare loop of a stream socket.
    BareStream,
    /// See events come, and note when. The flight has one stage per event.
    Watch {
        /// What to wait for.
        watch: Watch,
        /// The slot that each event fills; for the bare ones only their number counts.
        slots: Vec<u32>,
        /// Content of the first slot; each one has the next.
        first_seed: u64,
    },
}

/// What a reader waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Watch {
    /// The gate of a stage, asleep.
    GateParked,
    /// The gate of a stage, looking all the time.
    GateSpinning,
    /// The note of an arrival.
    Note,
    /// A word in shared memory, asleep in the kernel.
    WordParked,
    /// A word in shared memory, looking all the time.
    WordSpinning,
    /// An eventfd, asleep in epoll.
    Eventfd,
}

/// Answers of the peer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// To `Start`.
    Started(Started),
    /// To `Flight`.
    Armed {
        /// The flight.
        epoch: u64,
    },
    /// To `Activity`.
    Activity(Activity),
    /// To `Cpu`.
    Cpu {
        /// Of all threads, since the start.
        ns: u64,
    },
    /// To `BareStream`: connect to this port of the loopback address.
    BareStream {
        /// The port.
        port: u16,
    },
    /// To `Watch`, when everything was seen.
    Seen {
        /// On the monotonic clock of the host.
        at_ns: Vec<u64>,
        /// Slots that did not hold what they should when they were seen.
        bad_pages: u64,
    },
    /// Instead of any of these.
    Failed(Failure),
}

/// Where the peer is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Started {
    /// An abstract socket or `HOST:PORT`; empty within one process.
    pub address: String,
    /// The process.
    pub pid: u32,
    /// Its file descriptor of the pools.
    pub memory_fd: i32,
    /// Where the pools begin in its memory.
    pub memory_address: u64,
    /// Its eventfd for [`Watch::Eventfd`].
    pub event_fd: i32,
}

/// One end of the conversation.
#[derive(Debug)]
pub struct Control {
    sender: ChannelSender,
    receiver: ChannelReceiver,
}

impl Control {
    /// Over a connected socket. A wait for the other end is bounded by `limit`.
    pub fn new(stream: UnixStream, limit: Option<Duration>) -> Result<Self, Failure> {
        let bound = limit.unwrap_or(WRITE_LIMIT);
        stream
            .set_read_timeout(limit)
            .map_err(|error| lost(&error))?;
        let (sender, receiver) = channel::split(stream, bound).map_err(|error| lost(&error))?;
        Ok(Self { sender, receiver })
    }

    /// Gives an order and waits for the answer.
    pub fn ask(&mut self, order: &Order) -> Result<Answer, Failure> {
        self.tell(order)?;
        self.hear()
    }

    /// Gives an order whose answer comes later.
    pub fn tell(&mut self, order: &Order) -> Result<(), Failure> {
        self.sender.send(order).map_err(|error| lost(&error))
    }

    /// The answer to the oldest order without one.
    pub fn hear(&mut self) -> Result<Answer, Failure> {
        match self.receiver.receive().map_err(|error| lost(&error))? {
            Some((Answer::Failed(failure), _)) => Err(failure),
            Some((answer, _)) => Ok(answer),
            None => Err(Failure::new(
                FailureKind::PeerLost,
                "the peer process has ended",
            )),
        }
    }

    /// The next order; `None` when the other side has ended.
    pub fn next_order(&mut self) -> Result<Option<Order>, Failure> {
        let received = self.receiver.receive().map_err(|error| lost(&error))?;
        Ok(received.map(|(order, _)| order))
    }

    /// Answers an order.
    pub fn answer(&self, answer: &Answer) -> Result<(), Failure> {
        self.sender.send(answer).map_err(|error| lost(&error))
    }
}

/// A frame is short: whoever does not take it in this time is stuck.
const WRITE_LIMIT: Duration = Duration::from_secs(10);

fn lost(error: &std::io::Error) -> Failure {
    use std::io::ErrorKind::{TimedOut, WouldBlock};
    let kind = match error.kind() {
        TimedOut | WouldBlock => FailureKind::DeadlineExceeded,
        _ => FailureKind::PeerLost,
    };
    Failure::new(kind, format!("control socket of the peer process: {error}"))
}

/// An answer that does not fit the order.
#[must_use]
pub fn out_of_turn(answer: &Answer) -> Failure {
    Failure::internal(format!("an answer out of turn: {answer:?}"))
}
