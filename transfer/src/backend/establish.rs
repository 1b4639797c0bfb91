//! From a connected socket to a link, or to the next connection of a session.

use std::cell::Cell;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::channel::Channel;
use super::cma::Visited;
use super::handshake::{self, Greeting, HandshakeError, Offer, OwnRegion, SessionOffer, Way};
use super::neighbour::NeighbourLink;
use super::net::{Established, Introduction, LinkHost};
use super::process::{NoProcess, PeerProcess};
use super::reader::FrameReader;
use super::refusal::Failure;
#[cfg(feature = "one-sided")]
use super::rma;
use super::shm::Mapped;
use super::socket::{Bounds, Socket, StopSignal, StreamEnd};
use super::tcp::session::{Claim, Next, Terms};
use super::tcp::{self, TcpLink};
use super::{BackendKind, Link};
use crate::agent::address::Address;
use crate::agent::auth::Side;
use crate::agent::metadata::AgentMetadata;
use crate::agent::wire::{SessionWords, WireError};
use crate::deadline::Deadline;
use crate::error::Error;
use crate::mem::ring;
use crate::sync::Arc;

/// How a connector finds its listener again.
pub(super) struct Redial {
    address: Address,
    host: Arc<dyn LinkHost>,
}

/// Why there is no other connection yet.
pub(super) enum NotYet {
    /// There will be none.
    Never(String),
    /// Nobody listens there.
    Nobody(String),
    /// The next attempt may do better.
    Later(String),
}

impl Redial {
    /// One attempt, with the whole handshake.
    pub(super) fn dial(&self, wish: SessionWords, bounds: Bounds<'_>) -> Result<Next, NotYet> {
        let Address::Tcp(target) = &self.address else {
            return Err(NotYet::Never("not a stream".into()));
        };
        let stream = connect_within(target, bounds).map_err(|end| match end {
            StreamEnd::Io(Errno::CONNREFUSED) => NotYet::Nobody(end.to_string()),
            end => NotYet::Later(end.to_string()),
        })?;
        let greeted = greet(
            stream,
            &self.address,
            &*self.host,
            SessionOffer::Wanted(wish),
            Side::Connector,
            bounds,
        );
        let greeted = greeted.map_err(|failure| {
            let reason = failure.reason();
            match failure {
                Failure::Handshake(
                    HandshakeError::Session { is_over: true, .. }
                    | HandshakeError::SecretMissing { .. }
                    | HandshakeError::WrongSecret
                    | HandshakeError::Stream(StreamEnd::Wire(WireError::Version { .. })),
                ) => NotYet::Never(reason),
                _ => NotYet::Later(reason),
            }
        })?;
        let Some((_, theirs)) = greeted.greeting.session else {
            return Err(NotYet::Never("the peer keeps no sessions any more".into()));
        };
        Ok(Next {
            metadata: greeted.greeting.metadata,
            channel: Arc::new(greeted.channel),
            reader: greeted.reader,
            received: theirs.received,
        })
    }
}

/// Connects; ends by the bounds too.
fn connect_within(target: &SocketAddr, bounds: Bounds<'_>) -> Result<OwnedFd, StreamEnd> {
    let family = match target {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket =
        rustix::net::socket_with(family, SocketType::STREAM, flags, None).map_err(StreamEnd::Io)?;
    match rustix::net::connect(&socket, target) {
        Ok(()) => return Ok(socket),
        Err(Errno::INPROGRESS | Errno::INTR) => {}
        Err(errno) => return Err(StreamEnd::Io(errno)),
    }
    let socket = Socket::new(socket).map_err(|_| StreamEnd::Io(Errno::IO))?;
    socket.wait(PollFlags::OUT, bounds)?;
    match rustix::net::sockopt::socket_error(&socket) {
        Ok(Ok(())) => Ok(socket.into()),
        Ok(Err(errno)) | Err(errno) => Err(StreamEnd::Io(errno)),
    }
}

/// The peer by its kind of address, and what was learnt of it before its first word: the number of a
/// process is good only while it answers.
enum Met {
    Stream,
    Mapping(PeerProcess),
    Visiting(PeerProcess),
}

impl Met {
    fn of(address: &Address, socket: &Socket) -> Result<Self, HandshakeError> {
        let process = || {
            PeerProcess::of(socket).map_err(|why| match why {
                NoProcess::Ended => HandshakeError::Stream(StreamEnd::PeerDead),
                NoProcess::Refused(reason) => HandshakeError::ByUs(reason),
            })
        };
        Ok(match address.backend() {
            BackendKind::Shm => Self::Mapping(process()?),
            BackendKind::Cma => Self::Visiting(process()?),
            _ => Self::Stream,
        })
    }

    fn way<'a>(&'a self, regions: &'a [OwnRegion]) -> Way<'a> {
        match self {
            Self::Stream => Way::Stream,
            Self::Mapping(_) => Way::Map(regions),
            Self::Visiting(process) => Way::Visit(regions, process),
        }
    }

    fn has_ended(&self) -> bool {
        match self {
            Self::Stream => true,
            Self::Mapping(process) | Self::Visiting(process) => process.has_ended(Deadline::now()),
        }
    }

    fn link(
        self,
        mut channel: Channel,
        reader: FrameReader,
        peer: Greeting,
    ) -> Result<Arc<dyn Link>, Error> {
        if let Some(ring) = peer.ring {
            channel.write_ring(ring);
        }
        Ok(match self {
            Self::Stream => TcpLink::alone(channel, StopSignal::new()?, reader),
            Self::Mapping(process) => {
                let mapped = Mapped::new(&peer.metadata, peer.memories);
                Arc::new(NeighbourLink::new(channel, reader, process, mapped)?)
            }
            Self::Visiting(process) => {
                let visited = Visited::new(&peer.metadata, &peer.places, peer.permission);
                Arc::new(NeighbourLink::new(channel, reader, process, visited)?)
            }
        })
    }
}

/// A connection whose handshake is done.
struct Greeted {
    greeting: Greeting,
    channel: Channel,
    reader: FrameReader,
    introduction: Introduction,
    met: Met,
}

fn greet(
    stream: OwnedFd,
    address: &Address,
    host: &dyn LinkHost,
    session: SessionOffer<'_>,
    side: Side,
    bounds: Bounds<'_>,
) -> Result<Greeted, Failure> {
    let is_unix = matches!(address, Address::Shm(_) | Address::Cma(_));
    if !is_unix {
        tcp::tune(&stream)?;
    }
    let socket = Socket::new(stream)?;
    let stop = StopSignal::new()?;
    let met = Met::of(address, &socket)?;
    let secret = host.secret();
    let introduction = host.introduction();
    let ring = match met {
        Met::Stream => None,
        Met::Mapping(_) | Met::Visiting(_) => Some(Arc::new(ring::memory()?)),
    };
    let is_unsettled = Cell::new(false);
    let offer = Offer {
        side,
        secret: secret.as_deref(),
        metadata: &introduction.metadata,
        way: met.way(&introduction.regions),
        ring: ring.as_deref(),
        is_unsettled: &is_unsettled,
        session,
    };
    let mut reader = FrameReader::new(ring.is_some());
    let greeting = match handshake::run(&socket, &mut reader, &offer, bounds) {
        Ok(greeting) => greeting,
        Err(error) => {
            if is_unsettled.get() && !met.has_ended() {
                // The peer may take itself for connected and reach this memory: its regions stay busy (I-21).
                std::mem::forget(introduction);
            }
            return Err(error.into());
        }
    };
    if let Some(ring) = ring.and_then(ring::inbox) {
        reader.read_ring(ring);
    }
    Ok(Greeted {
        greeting,
        channel: Channel::new(socket, stop),
        reader,
        introduction,
        met,
    })
}

/// `None`: the connection was given to a session that is there.
pub(super) fn establish(
    stream: OwnedFd,
    address: &Address,
    side: Side,
    host: &dyn LinkHost,
    bounds: Bounds<'_>,
) -> Result<Option<Established>, Failure> {
    let desk = host.desk().filter(|_| matches!(address, Address::Tcp(_)));
    let claimed: Cell<Option<Claim>> = Cell::new(None);
    let answer = |peer: &AgentMetadata, wish: &SessionWords| {
        let (words, claim) = match &desk {
            Some(desk) => desk.answer(peer, wish, bounds.deadline)?,
            None => (SessionWords::default(), None),
        };
        claimed.set(claim);
        Ok(words)
    };
    let session = match (&desk, side) {
        (None, _) => SessionOffer::None,
        (Some(desk), Side::Connector) => SessionOffer::Wanted(desk.words()),
        (Some(_), Side::Listener) => SessionOffer::Answered(&answer),
    };
    let greeted = greet(stream, address, host, session, side, bounds)?;
    let metadata = greeted.greeting.metadata.clone();
    let session = greeted.greeting.session;
    if let (Some(claim), Some((_, theirs))) = (claimed.take(), session) {
        claim.give(Next {
            metadata,
            channel: Arc::new(greeted.channel),
            reader: greeted.reader,
            received: theirs.received,
        });
        return Ok(None);
    }
    let link = match (desk, session) {
        (Some(desk), Some(words)) => {
            let redial = match side {
                Side::Connector => host.owned().map(|host| Redial {
                    address: address.clone(),
                    host,
                }),
                Side::Listener => None,
            };
            let terms = Terms::new(&metadata, words, redial, desk);
            TcpLink::in_session(greeted.channel, StopSignal::new()?, greeted.reader, terms)
        }
        _ => return link_of(greeted, address, side, host, bounds).map(Some),
    };
    Ok(Some(Established {
        metadata,
        address: address.to_string(),
        link,
        told: greeted.introduction,
    }))
}

/// The link over a connection that ends with it.
fn link_of(
    greeted: Greeted,
    address: &Address,
    side: Side,
    host: &dyn LinkHost,
    bounds: Bounds<'_>,
) -> Result<Established, Failure> {
    let Greeted {
        greeting,
        channel,
        reader,
        introduction,
        met,
    } = greeted;
    let metadata = greeting.metadata.clone();
    #[cfg(not(feature = "one-sided"))]
    let _ = (side, host, bounds);
    #[cfg(feature = "one-sided")]
    if let kind @ (BackendKind::Ucx | BackendKind::Libfabric) = address.backend() {
        let regions = host.regions(&introduction);
        let mut reader = reader;
        let wanted = rma::Wanted::new(kind, host.one_sided(), &channel.socket, regions)?;
        let mut exchange = rma::Exchange {
            socket: &channel.socket,
            reader: &mut reader,
            side,
            kind,
            bounds,
        };
        let endpoint = rma::establish(&mut exchange, &wanted, &metadata)?;
        let link = endpoint.link(channel, reader);
        return Ok(Established {
            metadata,
            address: address.to_string(),
            link,
            told: introduction,
        });
    }
    let link = met.link(channel, reader, greeting)?;
    Ok(Established {
        metadata,
        address: address.to_string(),
        link,
        told: introduction,
    })
}
