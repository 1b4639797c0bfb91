//! What is measured beside the events: the time of a post and of a sleep at a gate. In a build without
//! metrics nothing is.

use crate::{barrier::Barrier, engine::Engine, ids::PeerId, op::Op, stopwatch::Stopwatch};

#[cfg(all(feature = "metrics", not(kv_loom)))]
impl Engine {
    /// An operation was admitted, and this is how long that took.
    pub(crate) fn post_took(&self, peer: PeerId, op: Op, stopwatch: Stopwatch) {
        self.metrics.posted(peer, op, stopwatch);
    }

    /// The sleeps at the gates of this barrier are measured from now on.
    pub(crate) fn observe_waits(&self, barrier: &Barrier) {
        barrier.observe_waits(self.metrics.stage_waits());
    }
}

#[cfg(not(all(feature = "metrics", not(kv_loom))))]
impl Engine {
    pub(crate) fn post_took(&self, _: PeerId, _: Op, _: Stopwatch) {}

    pub(crate) fn observe_waits(&self, _: &Barrier) {}
}
