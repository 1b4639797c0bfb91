//! From a control channel whose handshake is done to a link.

use std::net::{IpAddr, SocketAddr};

use super::card::{Card, Exchange, Key};
use super::link::{Parts, RmaLink};
use super::mover::Mover;
use super::requests::Targets;
use crate::agent::auth::Side;
use crate::agent::metadata::AgentMetadata;
use crate::backend::channel::Channel;
use crate::backend::handshake::HandshakeError;
use crate::backend::reader::FrameReader;
use crate::backend::socket::Socket;
use crate::backend::{BackendKind, Link};
use crate::config::OneSided;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind};
use crate::mem::region::RegionCore;
use crate::sync::Arc;

/// Time for the endpoints to connect when the handshake has no limit of its own.
const CONNECT_MS: u64 = 10_000;

/// What a connection over a library needs to know.
pub(crate) struct Wanted {
    pub(crate) kind: BackendKind,
    pub(crate) config: OneSided,
    /// This side's end of the control channel.
    pub(crate) local: IpAddr,
    /// What the handshake has told the peer; held until the connection is in service.
    pub(crate) regions: Vec<Arc<RegionCore>>,
}

impl Wanted {
    /// For a connected control channel.
    pub(crate) fn new(
        kind: BackendKind,
        config: OneSided,
        socket: &Socket,
        regions: Vec<Arc<RegionCore>>,
    ) -> Result<Self, Error> {
        let local = rustix::net::getsockname(socket)
            .map_err(|errno| Error::system("getsockname", errno))?;
        let local = SocketAddr::try_from(local)
            .map_err(|errno| Error::system("getsockname", errno))?
            .ip();
        Ok(Self {
            kind,
            config,
            local,
            regions,
        })
    }
}

/// Why it did not come to a link.
pub(crate) enum Refused {
    Handshake(HandshakeError),
    Here(Error),
}

/// The library's half, ready.
pub(crate) struct Endpoint {
    mover: Mover,
    targets: Arc<Targets>,
    kind: BackendKind,
    is_emulated: bool,
}

impl From<HandshakeError> for Refused {
    fn from(error: HandshakeError) -> Self {
        Self::Handshake(error)
    }
}

/// Whether the library of a backend can be loaded.
///
/// # Errors
/// [`ErrorKind::BackendUnavailable`] with everything that was tried.
pub(crate) fn available(kind: BackendKind, config: &OneSided) -> Result<(), Error> {
    match kind {
        #[cfg(feature = "ucx")]
        BackendKind::Ucx => crate::backend::ucx::load(&config.ucx).map(drop),
        #[cfg(feature = "libfabric")]
        BackendKind::Libfabric => crate::backend::libfabric::load(&config.libfabric).map(drop),
        _ => Err(missing(kind)),
    }
}

fn missing(backend: BackendKind) -> Error {
    let tried = vec![format!("this build, which was made without {backend}")];
    ErrorKind::BackendUnavailable { backend, tried }.into()
}

fn start(wanted: &Wanted) -> Result<(Mover, bytes::Bytes, bool), Error> {
    let local = wanted.local;
    match wanted.kind {
        #[cfg(feature = "ucx")]
        BackendKind::Ucx => {
            let config = wanted.config.ucx.clone();
            let is_emulated = config.is_emulated();
            let open = move || crate::backend::ucx::Endpoint::open(&config, local);
            let (mover, address) = Mover::start("kvgate-ucx", open)?;
            Ok((mover, address, is_emulated))
        }
        #[cfg(feature = "libfabric")]
        BackendKind::Libfabric => {
            let config = wanted.config.libfabric.clone();
            let is_emulated = config.is_emulated();
            let open = move || crate::backend::libfabric::Endpoint::open(&config, local);
            let (mover, address) = Mover::start("kvgate-libfabric", open)?;
            Ok((mover, address, is_emulated))
        }
        kind => Err(missing(kind)),
    }
}

/// Greets, opens the library, and trades addresses and keys. The peer is told why it fails here.
pub(crate) fn establish(
    exchange: &mut Exchange<'_>,
    wanted: &Wanted,
    peer: &AgentMetadata,
) -> Result<Endpoint, Refused> {
    exchange.greet()?;
    let made = start(wanted).and_then(|(mover, address, is_emulated)| {
        let keys = register(&mover, &wanted.regions)?;
        Ok((mover, Card { address, keys }, is_emulated))
    });
    let (mover, card, is_emulated) = match made {
        Ok(made) => made,
        Err(error) => {
            exchange.refuse(error.to_string());
            return Err(Refused::Here(error));
        }
    };
    let theirs = exchange.trade(&card)?;
    let targets = Targets::new(peer, &theirs).map_err(|reason| exchange.refuse(reason))?;
    let targets = Arc::new(targets);
    let keys = theirs.keys.into_iter().map(|key| key.key).collect();
    // One after the other: not every library bears two sides that connect to each other at once.
    if exchange.side == Side::Listener {
        exchange.await_ready()?;
    }
    let deadline = exchange.bounds.deadline;
    let deadline = deadline.unwrap_or_else(|| Deadline::after_ms(CONNECT_MS));
    let connected = mover
        .shared()
        .connect(theirs.address, keys, Arc::clone(&targets), deadline);
    if let Err(error) = connected {
        exchange.refuse(error.to_string());
        return Err(Refused::Here(error));
    }
    exchange.say_ready()?;
    if exchange.side == Side::Connector {
        exchange.await_ready()?;
    }
    Ok(Endpoint {
        mover,
        targets,
        kind: wanted.kind,
        is_emulated,
    })
}

fn register(mover: &Mover, regions: &[Arc<RegionCore>]) -> Result<Vec<Key>, Error> {
    let mut keys = Vec::with_capacity(regions.len());
    for region in regions {
        let memory = region.memory().ok_or(ErrorKind::Closed)?;
        region.announce_end_to(Arc::clone(mover.shared()) as Arc<_>);
        let local = mover.shared().register(region.id, memory)?;
        keys.push(Key {
            region: region.id,
            generation: region.generation,
            base: local.base,
            key: local.key,
        });
    }
    Ok(keys)
}

impl Endpoint {
    /// The link over both halves.
    pub(crate) fn link(self, channel: Channel, reader: FrameReader) -> Arc<dyn Link> {
        Arc::new(RmaLink::new(Parts {
            kind: self.kind,
            channel,
            reader,
            mover: self.mover,
            targets: self.targets,
            is_emulated: self.is_emulated,
        }))
    }
}
