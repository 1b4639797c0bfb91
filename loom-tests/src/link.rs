//! A link without a wire: the model is the hardware.

use kvgate_transfer::ModelPeer;
use kvgate_transfer::backend::{Access, Caps, Link, LinkEvents, Posted, PostedOp, Quiesce};
use kvgate_transfer::sync::{Arc, Mutex};
use kvgate_transfer::{
    Agent, Arrival, BackendKind, Cause, ChunkId, Epoch, Error, Incarnation, Memory, MemoryRegion,
    PeerId, PoolGeometry, PoolId, StageId, Visibility,
};

type OnPost = Box<dyn Fn(&PostedOp) -> Result<Posted, Error> + Send + Sync>;

/// A link whose posts run a function of the model, and whose arrivals the model calls for.
pub struct ModelLink {
    events: Mutex<Option<(PeerId, Arc<dyn LinkEvents>)>>,
    on_post: OnPost,
    is_proven: bool,
}

impl ModelLink {
    /// Posts run `on_post`. A peer that is lost is proven dead if `is_proven`.
    pub fn new(
        is_proven: bool,
        on_post: impl Fn(&PostedOp) -> Result<Posted, Error> + Send + Sync + 'static,
    ) -> Arc<ModelLink> {
        Arc::new(ModelLink {
            events: Mutex::new(None),
            on_post: Box::new(on_post),
            is_proven,
        })
    }

    /// A link that only receives.
    pub fn receiver() -> Arc<ModelLink> {
        ModelLink::new(true, |_| Ok(Posted::Done(Visibility::RemoteVisible)))
    }

    /// As the trait object that agents take.
    pub fn object(this: &Arc<ModelLink>) -> Arc<dyn Link> {
        let link = Handle(this.clone());
        kvgate_transfer::arc_dyn!(link => dyn Link)
    }

    /// The hardware says: bytes of this chunk have come as far as `level`.
    pub fn arrive(&self, epoch: u64, stage: u16, chunk: u16, level: Visibility) {
        let (peer, events) = self.events.lock().clone().expect("the link was attached");
        let tickets = vec![(StageId(stage), ChunkId(chunk))];
        let arrival = Arrival {
            epoch: Epoch(epoch),
            tickets,
            note: Default::default(),
        };
        events.arrived(peer, arrival, level);
    }

    /// The hardware says: the peer is gone.
    pub fn lose(&self) {
        let (peer, events) = self.events.lock().clone().expect("the link was attached");
        let cause = Cause::PeerLost {
            reason: "the model says so".to_owned(),
        };
        events.down(peer, cause, self.verdict());
    }

    /// Lets go of the engine. Engine and link own each other while the connection stands.
    pub fn forget(&self) {
        drop(self.events.lock().take());
    }

    fn verdict(&self) -> Quiesce {
        match self.is_proven {
            true => Quiesce::Proven,
            false => Quiesce::Unprovable(Cause::PeerLost {
                reason: "no proof".to_owned(),
            }),
        }
    }
}

struct Handle(Arc<ModelLink>);

impl Link for Handle {
    fn start(&self, peer: PeerId, events: Arc<dyn LinkEvents>) -> Result<(), Error> {
        *self.0.events.lock() = Some((peer, events));
        Ok(())
    }

    fn kind(&self) -> BackendKind {
        BackendKind::Sim
    }

    fn caps(&self) -> Caps {
        Caps {
            completion: Visibility::RemoteVisible,
            max_descriptors: 1 << 20,
            arrival_in_band: true,
            access: Access::Checked,
        }
    }

    fn post(&self, op: &PostedOp) -> Result<Posted, Error> {
        (self.0.on_post)(op)
    }

    fn announce(&self, _arrival: &Arrival, _level: Visibility) -> Result<(), Error> {
        Ok(())
    }

    fn send(&self, _message: &[u8]) -> Result<(), Error> {
        Ok(())
    }

    fn send_progress(&self, _counter: u64) -> Result<(), Error> {
        Ok(())
    }

    fn quiesce(&self) -> Quiesce {
        self.0.verdict()
    }

    fn close(&self) {
        // The model holds the events only while the link stands, or engine and link would own each other.
        drop(self.0.events.lock().take());
    }
}

/// Four slots of 16 bytes.
fn four_slots() -> PoolGeometry {
    PoolGeometry {
        offset_bytes: 0,
        stride_bytes: 16,
        slot_bytes: 16,
        slot_count: 4,
    }
}

/// One pool of four slots of 16 bytes, registered with `agent`.
///
/// # Panics
/// When the agent takes none any more.
pub fn model_region(agent: &Agent) -> MemoryRegion {
    let memory = Memory::host(64).expect("64 bytes");
    let region = agent.register(Arc::new(memory), &[four_slots()]);
    region.expect("an agent that is not shut down")
}

/// A peer with one pool of four slots of 16 bytes.
pub fn model_peer(incarnation: u128) -> ModelPeer {
    ModelPeer {
        name: "peer".to_owned(),
        incarnation: Incarnation(incarnation),
        pools: vec![(PoolId(0), four_slots())],
    }
}
