//! Doors for the models of `loom-tests`: a link that is a loom thread, an engine without workers.

use bytes::Bytes;

use crate::{
    agent::{
        Agent, AgentBuilder,
        metadata::{AgentMetadata, PoolInfo, RegionInfo},
    },
    backend::Link,
    engine::Engine,
    error::Error,
    ids::{Incarnation, PeerId, PoolId, RegionId},
    mem::{MemoryKind, PoolGeometry},
    sync::Arc,
};

/// A peer as a model describes it: one region with these pools, of generation 1.
#[derive(Clone, Debug)]
pub struct ModelPeer {
    /// Its name.
    pub name: String,
    /// Which life of it.
    pub incarnation: Incarnation,
    /// Its pools, in ascending order of their ids.
    pub pools: Vec<(PoolId, PoolGeometry)>,
}

impl AgentBuilder {
    /// No threads: the model runs the queues with [`Agent::run_queued`].
    pub fn without_threads(self) -> Self {
        self.without_workers()
    }
}

impl Agent {
    /// Takes a link of the model into service, with a worker unless the agent has none.
    ///
    /// # Errors
    /// As for every connection.
    pub fn attach_link(&self, link: Arc<dyn Link>, peer: &ModelPeer) -> Result<PeerId, Error> {
        let region = RegionId(0);
        let pools = peer.pools.iter().map(|&(id, geometry)| PoolInfo {
            id,
            region,
            geometry,
        });
        let len_bytes = peer
            .pools
            .iter()
            .filter_map(|(_, g)| g.end_bytes())
            .max()
            .unwrap_or(0);
        let metadata = AgentMetadata {
            incarnation: peer.incarnation,
            name: peer.name.clone(),
            regions: vec![RegionInfo {
                id: region,
                generation: 1,
                len_bytes,
                kind: MemoryKind::Host,
            }],
            pools: pools.collect(),
            app: Bytes::new(),
        };
        let told = self.engine().describe();
        Engine::attach(self.engine(), link, metadata, &told)
    }

    /// Looks whether everything in flight goes on, as if it were so much later.
    pub fn look_for_stalls(&self, later: std::time::Duration) {
        let now = std::time::Instant::now() + later;
        self.engine().look_for_stalls(now);
    }

    /// Sleeps as the thread that looks does: until something is in flight.
    pub fn await_in_flight(&self) -> bool {
        self.engine().await_in_flight()
    }

    /// Runs what is queued for a peer, on this thread.
    pub fn run_queued(&self, peer: PeerId) {
        self.engine().run_queued(peer);
    }
}
