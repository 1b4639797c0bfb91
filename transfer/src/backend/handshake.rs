//! The first words on a connection, the same on every transport.
//!
//! ```text
//! both        Hello(nonce, has secret)           the header carries the version: another one ends it here
//! both        Proof                              only if both have a secret; one alone is a refusal
//! connector   Metadata, Memory… (shm) or Place…, Probe (cma)
//! listener    the same                           one after the other, so that nobody writes unread
//! both        Ring                               shm and cma, at the end of the same turn
//! both        Ready                              over a stream the connector first, with the session it wants
//! ```
//! Before `Ready` nothing of the peer is believed beyond its own frames. All of it is bounded by one
//! deadline; whatever goes wrong is a [`HandshakeError`] that names the reason, and the peer is told
//! it in a `Refuse` frame where it can understand one.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::BorrowedFd;

use rustix::io::Errno;

use super::cma::{self, NONCE_BYTES, Permission, ProbeFailure};
use super::process::PeerProcess;
use super::reader::FrameReader;
use super::socket::{Bounds, Socket, StreamEnd};
use crate::agent::auth::{self, Side};
use crate::agent::metadata::{AgentMetadata, RegionInfo};
use crate::agent::wire::{self, Frame, Kind, Refusal, SessionWords, WireError};
use crate::deadline::Deadline;
use crate::ids::RegionId;
use crate::mem::ring::{self, Outbox};
use crate::mem::{Memory, MemoryKind, PeerMapping};
use crate::sync::Arc;

/// Most memories that are reached over one connection.
const MEMORY_LIMIT: usize = 1024;
/// How long a listener waits for the first word.
const HELLO_MS: u64 = 2_000;
/// How long a refused peer gets to read the reason.
const FAREWELL_MS: u64 = 250;

/// What this side brings.
pub(crate) struct Offer<'a> {
    pub(crate) side: Side,
    pub(crate) secret: Option<&'a [u8]>,
    pub(crate) metadata: &'a AgentMetadata,
    pub(crate) way: Way<'a>,
    /// Memory of the ring that this side reads.
    pub(crate) ring: Option<&'a Memory>,
    /// Set while the peer may believe that it is connected, and so reach the memory of this side, without
    /// this side having a link.
    pub(crate) is_unsettled: &'a Cell<bool>,
    pub(crate) session: SessionOffer<'a>,
}

/// What this side says of the session that the connection is to belong to.
pub(crate) enum SessionOffer<'a> {
    /// The connection is all there is.
    None,
    /// The connector's wish.
    Wanted(SessionWords),
    /// How the listener answers one.
    Answered(&'a dyn Fn(&AgentMetadata, &SessionWords) -> Result<SessionWords, Refusal>),
}

/// Code of a refusal: the session does not exist any more, or not for this peer.
pub(crate) const SESSION_OVER: u16 = 4;
/// Code of a refusal: the session is there, and the connection cannot be taken now.
pub(crate) const SESSION_BUSY: u16 = 5;

/// How each side will reach the memory of the other.
#[derive(Clone, Copy)]
pub(crate) enum Way<'a> {
    /// Over the stream.
    Stream,
    /// By mapping its memfds.
    Map(&'a [OwnRegion]),
    /// Through the kernel, by the number of its process.
    Visit(&'a [OwnRegion], &'a PeerProcess),
}

/// A region of this side.
#[derive(Clone)]
pub(crate) struct OwnRegion {
    pub(crate) id: RegionId,
    pub(crate) generation: u32,
    pub(crate) memory: Arc<Memory>,
}

/// What the peer brought.
pub(crate) struct Greeting {
    pub(crate) metadata: AgentMetadata,
    /// What was mapped.
    pub(crate) memories: BTreeMap<RegionId, PeerMapping>,
    /// Where its regions lie in its own memory.
    pub(crate) places: BTreeMap<RegionId, u64>,
    /// Its right to reach this process.
    pub(crate) permission: Option<Permission>,
    /// The ring that it reads.
    pub(crate) ring: Option<Outbox>,
    /// What this side, and what the peer has said of the session, if both keep one.
    pub(crate) session: Option<(SessionWords, SessionWords)>,
}

/// Why a connection did not become a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum HandshakeError {
    /// The connection ended, or its bytes are no frames.
    Stream(StreamEnd),
    /// The peer refused this side.
    ByPeer(String),
    /// This side refuses the peer.
    ByUs(String),
    /// Only the peer, or only this side, demands a secret.
    SecretMissing { here: bool },
    /// The session that the connection was to go on with is over, or busy, says whoever listens.
    Session {
        is_over: bool,
        by_peer: bool,
        reason: String,
    },
    /// The peer's answer to the challenge is wrong.
    WrongSecret,
    /// The peer's memory is out of reach.
    Probe(ProbeFailure),
}

impl fmt::Display for HandshakeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stream(StreamEnd::Wire(WireError::Version { ours, theirs })) => {
                write!(
                    f,
                    "protocol version {theirs} of the peer, this build speaks {ours}"
                )
            }
            Self::Stream(end) => write!(f, "{end}"),
            Self::ByPeer(reason) => write!(f, "refused by the peer: {reason}"),
            Self::ByUs(reason) => f.write_str(reason),
            Self::SecretMissing { here: true } => {
                f.write_str("the peer demands an authentication secret and none is configured here")
            }
            Self::SecretMissing { here: false } => {
                f.write_str("the peer has no authentication secret and one is demanded here")
            }
            Self::Session { reason, .. } => f.write_str(reason),
            Self::WrongSecret => f.write_str("the peer does not know the authentication secret"),
            Self::Probe(failure) => write!(f, "{failure}"),
        }
    }
}

impl From<StreamEnd> for HandshakeError {
    fn from(end: StreamEnd) -> Self {
        Self::Stream(end)
    }
}

/// Runs the handshake. On an error the peer has been told, and the socket is of no more use.
pub(crate) fn run(
    socket: &Socket,
    reader: &mut FrameReader,
    offer: &Offer<'_>,
    bounds: Bounds<'_>,
) -> Result<Greeting, HandshakeError> {
    let outcome = Handshake {
        socket,
        reader,
        offer,
        bounds,
        nonce: Box::new([0; NONCE_BYTES]),
    }
    .run();
    if let Err(error) = &outcome {
        let code = match error {
            HandshakeError::Stream(StreamEnd::Wire(_)) => 1,
            HandshakeError::SecretMissing { .. } | HandshakeError::WrongSecret => 2,
            HandshakeError::Session { is_over: true, .. } => SESSION_OVER,
            HandshakeError::Session { is_over: false, .. } => SESSION_BUSY,
            _ => 3,
        };
        let refusal = Refusal {
            code,
            reason: error.to_string(),
        };
        let is_open = !matches!(
            error,
            HandshakeError::ByPeer(_)
                | HandshakeError::Session { by_peer: true, .. }
                | HandshakeError::Stream(StreamEnd::Closed | StreamEnd::Cut | StreamEnd::Io(_))
        );
        // A peer that refuses, or has closed its end, stores nothing any more.
        let mut is_over = !is_open;
        if is_open {
            let mut words = Vec::new();
            wire::append_refuse(&mut words, &refusal);
            let farewell = Bounds {
                deadline: Some(Deadline::after_ms(FAREWELL_MS)),
                ..bounds
            };
            is_over = socket.send_all(&words, farewell).is_ok() && socket.linger(farewell);
        }
        if is_over {
            offer.is_unsettled.set(false);
        }
    }
    outcome
}

struct Handshake<'a> {
    socket: &'a Socket,
    reader: &'a mut FrameReader,
    offer: &'a Offer<'a>,
    bounds: Bounds<'a>,
    /// What the peer reads here; it has done so when it is ready.
    nonce: Box<[u8; NONCE_BYTES]>,
}

impl Handshake<'_> {
    fn run(&mut self) -> Result<Greeting, HandshakeError> {
        self.authenticate()?;
        // Not to a stranger, and before the other side probes.
        let permission = match self.offer.way {
            Way::Visit(_, process) => Some(Permission::grant(process)),
            Way::Stream | Way::Map(_) => None,
        };
        self.reader.trust(wire::METADATA_LIMIT_BYTES);
        let mut greeting = match self.offer.side {
            Side::Connector => {
                self.introduce()?;
                self.listen()?
            }
            Side::Listener => {
                let greeting = self.listen()?;
                self.introduce()?;
                greeting
            }
        };
        greeting.permission = permission;
        greeting.session = self.settle(&greeting.metadata)?;
        self.reader.trust(usize::MAX);
        self.offer.is_unsettled.set(false);
        Ok(greeting)
    }

    /// Both say that they are ready, and over a stream to which session the connection belongs.
    fn settle(
        &mut self,
        peer: &AgentMetadata,
    ) -> Result<Option<(SessionWords, SessionWords)>, HandshakeError> {
        let offer = self.offer;
        let answer = match &offer.session {
            SessionOffer::None => None,
            SessionOffer::Wanted(words) => {
                self.ready(Some(words))?;
                let theirs = self.await_ready()?;
                return agree(words, theirs);
            }
            SessionOffer::Answered(answer) => Some(answer),
        };
        let Some(answer) = answer else {
            self.offer
                .is_unsettled
                .set(!matches!(self.offer.way, Way::Stream));
            self.ready(None)?;
            self.await_ready()?;
            return Ok(None);
        };
        let Some(theirs) = self.await_ready()? else {
            self.ready(None)?;
            return Ok(None);
        };
        let ours = answer(peer, &theirs).map_err(|refusal| HandshakeError::Session {
            is_over: refusal.code == SESSION_OVER,
            by_peer: false,
            reason: refusal.reason,
        })?;
        self.ready(Some(&ours))?;
        Ok(Some((ours, theirs)))
    }

    fn ready(&mut self, session: Option<&SessionWords>) -> Result<(), HandshakeError> {
        let mut words = Vec::new();
        wire::append_ready(&mut words, session);
        self.send(&words)
    }

    fn await_ready(&mut self) -> Result<Option<SessionWords>, HandshakeError> {
        match self.next()? {
            Frame::Ready(session) => Ok(session),
            other => Err(out_of_turn("Ready", &other)),
        }
    }

    fn authenticate(&mut self) -> Result<(), HandshakeError> {
        let mut nonce = [0; 32];
        draw(&mut nonce)?;
        let mut words = Vec::new();
        wire::append_hello(&mut words, &nonce, self.offer.secret.is_some());
        self.send(&words)?;
        let (peer_nonce, has_auth_token) = match self.first()? {
            Frame::Hello {
                nonce,
                has_auth_token,
            } => (nonce, has_auth_token),
            other => return Err(out_of_turn("Hello", &other)),
        };
        let Some(secret) = self.offer.secret else {
            return match has_auth_token {
                true => Err(HandshakeError::SecretMissing { here: true }),
                false => Ok(()),
            };
        };
        if !has_auth_token {
            return Err(HandshakeError::SecretMissing { here: false });
        }
        let side = self.offer.side;
        words.clear();
        wire::append_proof(&mut words, &auth::prove(secret, side, &nonce, &peer_nonce));
        self.send(&words)?;
        match self.next()? {
            Frame::Proof { mac }
                if auth::verify(secret, side.other(), &peer_nonce, &nonce, &mac) =>
            {
                Ok(())
            }
            Frame::Proof { .. } => Err(HandshakeError::WrongSecret),
            other => Err(out_of_turn("Proof", &other)),
        }
    }

    /// Says who this side is, and how its memory is reached.
    fn introduce(&mut self) -> Result<(), HandshakeError> {
        let mut words = Vec::new();
        wire::append_metadata(&mut words, &self.offer.metadata.encode());
        self.send(&words)?;
        match self.offer.way {
            Way::Stream => {}
            Way::Map(regions) => self.hand_over(regions)?,
            Way::Visit(regions, _) => self.tell_places(regions)?,
        }
        let Some((ring, file)) = self.offer.ring.and_then(|ring| Some((ring, ring.file()?))) else {
            return Ok(());
        };
        words.clear();
        wire::append_ring(&mut words, ring.len_bytes());
        self.send_with_fd(&words, file)
    }

    fn hand_over(&mut self, regions: &[OwnRegion]) -> Result<(), HandshakeError> {
        let mut words = Vec::new();
        for region in regions {
            let Some(file) = region.memory.file() else {
                continue;
            };
            words.clear();
            wire::append_memory(
                &mut words,
                region.id,
                region.generation,
                region.memory.mapped_bytes(),
            );
            self.send_with_fd(&words, file)?;
        }
        Ok(())
    }

    fn tell_places(&mut self, regions: &[OwnRegion]) -> Result<(), HandshakeError> {
        let mut words = Vec::new();
        for region in regions {
            let address = region.memory.base_ptr().expose_provenance() as u64;
            wire::append_place(&mut words, region.id, region.generation, address);
        }
        draw(&mut self.nonce)?;
        let address = self.nonce.as_ptr().expose_provenance() as u64;
        wire::append_probe(&mut words, address, &self.nonce);
        self.send(&words)
    }

    /// Hears who the peer is, and reaches its memory.
    fn listen(&mut self) -> Result<Greeting, HandshakeError> {
        let blob = match self.next()? {
            Frame::Metadata(blob) => blob,
            other => return Err(out_of_turn("Metadata", &other)),
        };
        let metadata = AgentMetadata::decode(blob)
            .map_err(|error| HandshakeError::ByUs(format!("metadata: {error}")))?;
        let mut greeting = Greeting {
            metadata,
            memories: BTreeMap::new(),
            places: BTreeMap::new(),
            permission: None,
            ring: None,
            session: None,
        };
        match self.offer.way {
            Way::Stream => {}
            Way::Map(_) => greeting.memories = self.map(&greeting.metadata)?,
            Way::Visit(_, process) => {
                greeting.places = self.hear_places(&greeting.metadata)?;
                self.probe(process)?;
            }
        }
        if self.offer.ring.is_some() {
            greeting.ring = Some(self.map_ring()?);
        }
        if self.reader.has_fds() {
            return Err(HandshakeError::ByUs("more memories than announced".into()));
        }
        self.reader.refuse_fds();
        Ok(greeting)
    }

    fn map(
        &mut self,
        metadata: &AgentMetadata,
    ) -> Result<BTreeMap<RegionId, PeerMapping>, HandshakeError> {
        let mut memories = BTreeMap::new();
        let is_shared = |region: &&RegionInfo| region.kind == MemoryKind::Shared;
        let shared: Vec<_> = metadata.regions.iter().filter(is_shared).collect();
        check_count(shared.len())?;
        for region in shared {
            let (id, generation, mapped_bytes) = match self.next()? {
                Frame::Memory {
                    region,
                    generation,
                    mapped_bytes,
                } => (region, generation, mapped_bytes),
                other => return Err(out_of_turn("Memory", &other)),
            };
            let file = self.reader.take_fd();
            let file = file
                .ok_or_else(|| HandshakeError::ByUs(format!("{id:?} came without its memory")))?;
            if id != region.id || generation != region.generation || mapped_bytes < region.len_bytes
            {
                return Err(HandshakeError::ByUs(format!(
                    "{id:?} generation {generation} of {mapped_bytes} bytes does not fit the metadata"
                )));
            }
            let mapping = PeerMapping::map(&file, region.len_bytes)
                .map_err(|reason| HandshakeError::ByUs(format!("{id:?}: {reason}")))?;
            memories.insert(id, mapping);
        }
        Ok(memories)
    }

    fn map_ring(&mut self) -> Result<Outbox, HandshakeError> {
        let len_bytes = match self.next()? {
            Frame::Ring { len_bytes } => len_bytes,
            other => return Err(out_of_turn("Ring", &other)),
        };
        let file = self.reader.take_fd();
        let file =
            file.ok_or_else(|| HandshakeError::ByUs("a ring came without its memory".into()))?;
        let refused = |reason: String| HandshakeError::ByUs(format!("ring: {reason}"));
        let mapping = PeerMapping::map(&file, len_bytes.min(ring::RING_BYTES)).map_err(refused)?;
        ring::outbox(mapping).ok_or_else(|| refused(format!("{len_bytes} bytes are too few")))
    }

    fn hear_places(
        &mut self,
        metadata: &AgentMetadata,
    ) -> Result<BTreeMap<RegionId, u64>, HandshakeError> {
        let mut places = BTreeMap::new();
        check_count(metadata.regions.len())?;
        for region in &metadata.regions {
            let (id, generation, address) = match self.next()? {
                Frame::Place {
                    region,
                    generation,
                    address,
                } => (region, generation, address),
                other => return Err(out_of_turn("Place", &other)),
            };
            if id != region.id || generation != region.generation {
                return Err(HandshakeError::ByUs(format!(
                    "{id:?} generation {generation} does not fit the metadata"
                )));
            }
            places.insert(id, address);
        }
        Ok(places)
    }

    fn probe(&mut self, process: &PeerProcess) -> Result<(), HandshakeError> {
        match self.next()? {
            Frame::Probe { address, nonce } => {
                cma::probe(process, address, &nonce).map_err(HandshakeError::Probe)
            }
            other => Err(out_of_turn("Probe", &other)),
        }
    }

    /// Somebody who connects and says nothing is sent away soon: such connections have a limited number
    /// of places.
    fn first(&mut self) -> Result<Frame, HandshakeError> {
        let bounds = self.bounds;
        if self.offer.side == Side::Listener {
            let soon = Deadline::after_ms(HELLO_MS);
            self.bounds.deadline = Some(bounds.deadline.map_or(soon, |all| all.min(soon)));
        }
        let first = self.next();
        self.bounds = bounds;
        first
    }

    fn next(&mut self) -> Result<Frame, HandshakeError> {
        match self.reader.next(self.socket, self.bounds)? {
            Frame::Refuse(refusal) => Err(match refusal.code {
                code @ (SESSION_OVER | SESSION_BUSY) => HandshakeError::Session {
                    is_over: code == SESSION_OVER,
                    by_peer: true,
                    reason: format!("refused by the peer: {}", refusal.reason),
                },
                _ => HandshakeError::ByPeer(refusal.reason),
            }),
            frame => Ok(frame),
        }
    }

    fn send(&mut self, words: &[u8]) -> Result<(), HandshakeError> {
        match self.socket.send_all(words, self.bounds) {
            Ok(()) => Ok(()),
            // The peer may have said why before it closed; that is the better reason.
            Err(StreamEnd::Io(Errno::PIPE | Errno::CONNRESET)) => match self.next() {
                Err(error @ HandshakeError::ByPeer(_)) => Err(error),
                _ => Err(StreamEnd::Closed.into()),
            },
            Err(end) => Err(end.into()),
        }
    }

    fn send_with_fd(&mut self, words: &[u8], file: BorrowedFd<'_>) -> Result<(), HandshakeError> {
        let sent = self.socket.send_with_fd(words, file, self.bounds)?;
        // The descriptor travels with the first byte; the rest is plain.
        self.send(&words[sent..])
    }
}

/// What the listener has answered to the wish of the connector.
fn agree(
    ours: &SessionWords,
    theirs: Option<SessionWords>,
) -> Result<Option<(SessionWords, SessionWords)>, HandshakeError> {
    let fits = |theirs: &SessionWords| match ours.is_resumed {
        true => theirs.is_resumed && theirs.session == ours.session,
        false => !theirs.is_resumed && theirs.session != 0 && theirs.received == 0,
    };
    match theirs {
        Some(theirs) if fits(&theirs) => Ok(Some((*ours, theirs))),
        None if !ours.is_resumed => Ok(None),
        _ => Err(HandshakeError::Session {
            is_over: true,
            by_peer: false,
            reason: "the answer is not about the session that was asked for".into(),
        }),
    }
}

fn draw(nonce: &mut [u8; 32]) -> Result<(), HandshakeError> {
    getrandom::fill(nonce)
        .map_err(|error| HandshakeError::ByUs(format!("no random numbers: {error}")))
}

fn check_count(region_count: usize) -> Result<(), HandshakeError> {
    if region_count > MEMORY_LIMIT {
        return Err(HandshakeError::ByUs(format!(
            "{region_count} memories, at most {MEMORY_LIMIT} are reached"
        )));
    }
    Ok(())
}

fn out_of_turn(expected: &'static str, found: &Frame) -> HandshakeError {
    let hint = match found.kind() {
        Kind::Memory => ": the peer wants to share mapped memory (shm)",
        Kind::Place | Kind::Probe => ": the peer wants to copy between processes (cma)",
        _ => "",
    };
    let found = found.kind();
    HandshakeError::ByUs(format!("expected a {expected} frame, got {found:?}{hint}"))
}
