//! How an agent gets its links over sockets: the engine as host of listeners and connections.

use crate::{
    agent::address::Address,
    backend::{
        handshake::OwnRegion,
        net::{self, Established, Introduction, LinkHost},
        tcp::session::Desk,
    },
    deadline::Deadline,
    engine::{Described, Engine},
    error::{Cause, Error, ErrorKind},
    ids::{Incarnation, PeerId},
    obs::RefusedField,
    sync::Arc,
};

struct EngineHost(Arc<Engine>);

/// Listens until the agent is shut down; gives back the bound address.
pub(crate) fn listen(engine: &Arc<Engine>, address: &Address) -> Result<Address, Error> {
    if engine.is_stopping() {
        return Err(ErrorKind::Closed.into());
    }
    let host = EngineHost(engine.clone());
    let mut listener = net::listen(address, Arc::new(host))?;
    let bound = listener.address().clone();
    engine.on_shutdown(move || listener.close());
    Ok(bound)
}

/// Connects and takes the link into service. Another life than the `expected` one is a peer for a moment, and
/// ends as every peer does: it has been told where this side's memory is (I-21).
pub(crate) fn connect(
    engine: &Arc<Engine>,
    address: &Address,
    expected: Option<Incarnation>,
    deadline: Deadline,
) -> Result<PeerId, Error> {
    if engine.is_stopping() {
        return Err(ErrorKind::Closed.into());
    }
    let host = EngineHost(engine.clone());
    let established = net::connect(address, deadline, &host)?;
    let found = established.metadata.incarnation;
    let peer = host.attach(established)?;
    match expected {
        Some(expected) if expected != found => {
            engine.drop_peer(peer, Cause::PeerRestarted);
            Err(ErrorKind::IncarnationMismatch { expected, found }.into())
        }
        _ => Ok(peer),
    }
}

impl EngineHost {
    fn attach(&self, established: Established) -> Result<PeerId, Error> {
        let Established {
            metadata,
            link,
            told,
            ..
        } = established;
        // `introduction` has put it there.
        let told = told
            .keep
            .downcast::<Described>()
            .map_err(|_| ErrorKind::Closed)?;
        Engine::attach(&self.0, link, metadata, &told)
    }
}

impl LinkHost for EngineHost {
    fn introduction(&self) -> Introduction {
        let described = self.0.describe();
        let regions = described
            .memories
            .iter()
            .map(|(id, generation, memory)| OwnRegion {
                id: *id,
                generation: *generation,
                memory: memory.clone(),
            })
            .collect();
        Introduction {
            metadata: described.metadata.clone(),
            regions,
            keep: Box::new(described),
        }
    }

    fn desk(&self) -> Option<Arc<Desk>> {
        self.0.desk.clone()
    }

    fn owned(&self) -> Option<Arc<dyn LinkHost>> {
        Some(Arc::new(Self(self.0.clone())))
    }

    #[cfg(feature = "one-sided")]
    fn one_sided(&self) -> crate::config::OneSided {
        self.0.one_sided.clone()
    }

    #[cfg(feature = "one-sided")]
    fn regions(&self, told: &Introduction) -> Vec<Arc<crate::mem::region::RegionCore>> {
        // `introduction` has put it there, and it holds them.
        let described = told.keep.downcast_ref::<Described>();
        let memories = described.map_or(&[][..], |described| &described.memories);
        let find = |(id, ..): &(_, _, _)| self.0.regions.get(*id);
        memories.iter().filter_map(find).collect()
    }

    fn secret(&self) -> Option<Vec<u8>> {
        self.0.auth_token.clone()
    }

    fn established(&self, established: Established) {
        let address = established.address.clone();
        if let Err(error) = self.attach(established) {
            self.refused(address, RefusedField::Here, error.to_string());
        }
    }

    fn refused(&self, address: String, field: RefusedField, reason: String) {
        self.0.refuse(address, field, reason);
    }
}
