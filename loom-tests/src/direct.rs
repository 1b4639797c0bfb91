//! A link whose peer writes by itself: operations stay pending until the model completes them, and what
//! the engine sends is there for the model to answer.

use std::collections::VecDeque;

use kvgate_transfer::backend::{
    Access, BackendKind, Caps, Link, LinkEvents, Posted, PostedOp, Quiesce,
};
use kvgate_transfer::sync::{Arc, Condvar, Mutex};
use kvgate_transfer::{Arrival, Cause, Error, OpId, PeerId, Visibility};

/// The engine as the model calls it, and what the engine gave to the link.
pub struct DirectLink {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    events: Option<(PeerId, Arc<dyn LinkEvents>)>,
    posted: VecDeque<OpId>,
    frames: VecDeque<Vec<u8>>,
    is_closed: bool,
}

impl DirectLink {
    /// A link to a peer that is proven dead when it is lost.
    pub fn new() -> Arc<DirectLink> {
        Arc::new(DirectLink {
            state: Mutex::new(State::default()),
            changed: Condvar::new(),
        })
    }

    /// As the trait object that agents take.
    pub fn object(this: &Arc<DirectLink>) -> Arc<dyn Link> {
        let link = Handle(this.clone());
        kvgate_transfer::arc_dyn!(link => dyn Link)
    }

    /// The engine, unless the connection has been closed.
    pub fn events(&self) -> Option<(PeerId, Arc<dyn LinkEvents>)> {
        self.state.lock().events.clone()
    }

    /// Whether the engine has closed the connection.
    pub fn is_closed(&self) -> bool {
        self.state.lock().is_closed
    }

    /// The next operation that was posted; blocks. `None` once the connection is closed.
    pub fn next_posted(&self) -> Option<OpId> {
        self.take(|state| match state.posted.pop_front() {
            Some(op) => Some(Some(op)),
            None => state.is_closed.then_some(None),
        })
    }

    /// The next frame that was sent; blocks.
    pub fn next_frame(&self) -> Vec<u8> {
        self.take(|state| state.frames.pop_front())
    }

    /// Whether a frame waits for [`DirectLink::next_frame`].
    pub fn has_sent(&self) -> bool {
        !self.state.lock().frames.is_empty()
    }

    /// The hardware says: this operation is over.
    pub fn complete(&self, op: OpId) {
        if let Some((peer, events)) = self.events() {
            events.completed(peer, op, Ok(Visibility::RemoteVisible));
        }
    }

    /// The peer sends a frame.
    pub fn receive(&self, frame: Vec<u8>) {
        if let Some((peer, events)) = self.events() {
            events.message(peer, frame.into());
        }
    }

    /// The hardware says: the peer is dead.
    pub fn lose(&self) {
        if let Some((peer, events)) = self.events() {
            let reason = "the model says so".to_owned();
            events.down(peer, Cause::PeerLost { reason }, Quiesce::Proven);
        }
    }

    fn take<R>(&self, mut take: impl FnMut(&mut State) -> Option<R>) -> R {
        let mut state = self.state.lock();
        loop {
            if let Some(taken) = take(&mut state) {
                return taken;
            }
            self.changed.wait(&mut state);
        }
    }

    fn put(&self, put: impl FnOnce(&mut State)) {
        let mut state = self.state.lock();
        put(&mut state);
        self.changed.notify_all();
    }
}

struct Handle(Arc<DirectLink>);

impl Link for Handle {
    fn start(&self, peer: PeerId, events: Arc<dyn LinkEvents>) -> Result<(), Error> {
        self.0.put(|state| {
            if !state.is_closed {
                state.events = Some((peer, events));
            }
        });
        Ok(())
    }

    fn kind(&self) -> BackendKind {
        BackendKind::Sim
    }

    fn caps(&self) -> Caps {
        Caps {
            completion: Visibility::RemoteVisible,
            max_descriptors: 16,
            arrival_in_band: true,
            access: Access::Direct,
        }
    }

    fn post(&self, op: &PostedOp) -> Result<Posted, Error> {
        self.0.put(|state| state.posted.push_back(op.id));
        Ok(Posted::Pending)
    }

    fn announce(&self, _arrival: &Arrival, _level: Visibility) -> Result<(), Error> {
        Ok(())
    }

    fn send(&self, message: &[u8]) -> Result<(), Error> {
        self.0.put(|state| state.frames.push_back(message.to_vec()));
        Ok(())
    }

    fn send_progress(&self, _counter: u64) -> Result<(), Error> {
        Ok(())
    }

    fn quiesce(&self) -> Quiesce {
        Quiesce::Proven
    }

    fn close(&self) {
        let mut events = None;
        self.0.put(|state| {
            state.is_closed = true;
            events = state.events.take();
        });
        // Engine and link own each other only while the connection stands.
        drop(events);
    }
}
