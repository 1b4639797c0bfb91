//! One end of a simulated connection.

use bytes::Bytes;

use super::{Net, SimFaults, State, What};
use crate::{
    Arrival,
    backend::{Access, BackendKind, Caps, Link, LinkEvents, Posted, PostedOp, Quiesce},
    error::{Error, ErrorKind},
    ids::PeerId,
    sync::Arc,
    visibility::Visibility,
};

pub(super) struct SimLink {
    pub(super) net: Arc<Net>,
    pub(super) end: usize,
}

impl SimLink {
    /// The engine on the other side and the state, unless the connection has ended.
    fn with<R>(&self, act: impl FnOnce(&mut State, &SimFaults) -> R) -> Result<R, Error> {
        let mut state = self.net.state.lock();
        if state.ends[self.end].is_closed || state.ends[self.end ^ 1].is_closed {
            return Err(ErrorKind::PeerLost {
                reason: "the connection has ended".to_owned(),
            }
            .into());
        }
        Ok(act(&mut state, &self.net.faults))
    }
}

impl Link for SimLink {
    fn start(&self, peer: PeerId, events: Arc<dyn LinkEvents>) -> Result<(), Error> {
        self.with(|state, _| state.ends[self.end].receiver = Some((peer, events)))
    }

    fn kind(&self) -> BackendKind {
        BackendKind::Sim
    }

    fn caps(&self) -> Caps {
        Caps {
            completion: Visibility::RemoteVisible,
            max_descriptors: u64::MAX,
            arrival_in_band: true,
            access: Access::Checked,
        }
    }

    fn post(&self, op: &PostedOp) -> Result<Posted, Error> {
        let receiver = self.with(|state, _| state.ends[self.end ^ 1].receiver.clone())?;
        let lost = || {
            Error::from(ErrorKind::PeerLost {
                reason: "not connected".to_owned(),
            })
        };
        let (peer, events) = receiver.ok_or_else(lost)?;
        let target = events.resolve(peer, &op.runs.remote());
        let target = target.inspect_err(|_| op.landing.settle())?;
        self.with(|state, faults| state.operation(self.end, op, target, faults))?;
        Ok(Posted::Pending)
    }

    fn announce(&self, arrival: &Arrival, level: Visibility) -> Result<(), Error> {
        let what = What::Arrive {
            arrival: arrival.clone(),
            level,
        };
        self.with(|state, faults| state.in_order(self.end, what, faults))
    }

    fn send(&self, message: &[u8]) -> Result<(), Error> {
        let what = What::Message(Bytes::copy_from_slice(message));
        self.with(|state, faults| state.in_order(self.end, what, faults))
    }

    fn send_progress(&self, counter: u64) -> Result<(), Error> {
        self.with(|state, faults| state.in_order(self.end, What::Progress(counter), faults))
    }

    fn quiesce(&self) -> Quiesce {
        self.net.state.lock().ends[self.end].quiesce.clone()
    }

    fn close(&self) {
        self.net.close(self.end);
    }
}
