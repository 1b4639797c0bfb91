//! What the two processes of a run tell each other beside the path that is measured.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::activity::Activity;
use super::far::FarLink;
use super::layout::Layout;
use super::options::{Backend, Load};
use crate::handoff::channel::{self, ChannelReceiver, ChannelSender};
use crate::handoff::failure::{Failure, FailureKind};

/// Orders to the peer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Make pools and be reachable.
    Start {
        /// The path that was asked for.
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
        /// Say of each arrival when it came. That takes a system call, before the gate hears of the arrival.
        is_noted: bool,
    },
    /// What did you use so far?
    Activity,
    /// The processor time alone, which is cheap to tell.
    Cpu,
    /// Serve the bare loop of a stream socket.
    BareStream,
    /// Serve the bare loop of the path's library.
    BareLibrary,
    /// Make the lists of this load, as the measuring side has them: it cannot reach this memory.
    Lists {
        /// The load.
        load: Load,
        /// Of the lists.
        seed: u64,
    },
    /// Write bytes that depend on the seed into the slots of a list.
    Fill {
        /// Which one.
        list: usize,
        /// Of the bytes.
        seed: u64,
    },
    /// How many slots of a list do not hold what this seed gives?
    Differing {
        /// Which one.
        list: usize,
        /// Of the bytes.
        seed: u64,
    },
    /// The run is over, and ended well.
    End,
    /// See events come, and note when. The flight has one stage per event.
    Watch {
        /// What to wait for.
        watch: Watch,
        /// The slot that each event fills; for the bare ones only their number counts.
        slots: Vec<u32>,
        /// Content of the first slot; each one has the next.
        first_seed: u64,
        /// Answer each event at once: the measuring side has another clock.
        is_answered: bool,
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
    /// To `BareStream`: connect to this port of the same address, and say the cookie.
    BareStream {
        /// The port.
        port: u16,
        /// Only the measuring side knows it.
        cookie: [u8; 16],
    },
    /// To `BareLibrary`.
    BareLibrary(LibraryCard),
    /// To `Lists`, `Fill` and `End`.
    Done,
    /// To `Differing`.
    Bad {
        /// Slots.
        pages: u64,
    },
    /// To `Watch`, for each event, when it is to be answered.
    SeenOne,
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
    /// A [`kvgate_transfer::Contact`]; empty within one process.
    pub contact: String,
    /// The process.
    pub pid: u32,
    /// Its file descriptor of the pools.
    pub memory_fd: i32,
    /// Where the pools begin in its memory.
    pub memory_address: u64,
    /// Its eventfd for [`Watch::Eventfd`].
    pub event_fd: i32,
}

/// How the bare loop of a library reaches the peer's memory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LibraryCard {
    /// Of the endpoint.
    pub address: Vec<u8>,
    /// Remote address of the first byte.
    pub base: u64,
    /// What lets the other side in.
    pub key: Vec<u8>,
}

/// One end of the conversation.
#[derive(Debug)]
pub struct Control {
    link: Link,
}

#[derive(Debug)]
enum Link {
    Socket(ChannelSender, ChannelReceiver),
    Far(FarLink),
}

impl Control {
    /// Over a connected socket. A wait for the other end is bounded by `limit`.
    pub fn new(stream: UnixStream, limit: Option<Duration>) -> Result<Self, Failure> {
        let bound = limit.unwrap_or(WRITE_LIMIT);
        stream
            .set_read_timeout(limit)
            .map_err(|error| lost(&error))?;
        let (sender, receiver) = channel::split(stream, bound).map_err(|error| lost(&error))?;
        let link = Link::Socket(sender, receiver);
        Ok(Self { link })
    }

    /// Over a connection of agents.
    #[must_use]
    pub fn far(link: FarLink) -> Self {
        let link = Link::Far(link);
        Self { link }
    }

    /// Gives an order and waits for the answer.
    pub fn ask(&mut self, order: &Order) -> Result<Answer, Failure> {
        self.tell(order)?;
        self.hear()
    }

    /// Gives an order whose answer comes later.
    pub fn tell(&mut self, order: &Order) -> Result<(), Failure> {
        self.send(order)
    }

    /// The answer to the oldest order without one.
    pub fn hear(&mut self) -> Result<Answer, Failure> {
        match self.receive()? {
            Some(Answer::Failed(failure)) => Err(failure),
            Some(answer) => Ok(answer),
            None => Err(Failure::new(
                FailureKind::PeerLost,
                "the peer process has ended",
            )),
        }
    }

    /// The next order; `None` when the other side has ended.
    pub fn next_order(&mut self) -> Result<Option<Order>, Failure> {
        self.receive()
    }

    /// Answers an order.
    pub fn answer(&self, answer: &Answer) -> Result<(), Failure> {
        self.send(answer)
    }

    fn send(&self, message: &impl Serialize) -> Result<(), Failure> {
        match &self.link {
            Link::Socket(sender, _) => sender.send(message).map_err(|error| lost(&error)),
            Link::Far(link) => link.send(message),
        }
    }

    fn receive<T: DeserializeOwned>(&mut self) -> Result<Option<T>, Failure> {
        match &mut self.link {
            Link::Socket(_, receiver) => {
                let received = receiver.receive().map_err(|error| lost(&error))?;
                Ok(received.map(|(message, _)| message))
            }
            Link::Far(link) => link.receive(),
        }
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
