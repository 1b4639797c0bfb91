//! Names of things. Every id is a newtype, so that a stage cannot be passed where a chunk is meant.

use std::fmt;

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident($repr:ty) $label:literal;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $repr);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}", self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($label, " {}"), self.0)
            }
        }
    )*};
}

ids! {
    /// One registered stretch of memory of one agent. Never given out twice by an agent.
    RegionId(u32) "region";
    /// One pool of equal slots inside a region. Never given out twice by an agent.
    PoolId(u32) "pool";
    /// One posted operation of one agent.
    OpId(u64) "op";
    /// One connection to a peer, counted by the agent that holds it. A reconnected peer gets another id.
    PeerId(u32) "peer";
    /// One attempt to fill a set of pages. The receiver gives it out and never uses a value twice.
    Epoch(u64) "epoch";
    /// One gate of a flight: what a reader waits for in one step (a layer, for a KV cache).
    StageId(u16) "stage";
    /// One unit of completion inside a stage.
    ChunkId(u16) "chunk";
    /// One sending process of a flight.
    WriterRank(u16) "writer";
}

/// One life of one agent: drawn at random when the agent is built, so a restarted process has another one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Incarnation(pub u128);

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "incarnation {self}")
    }
}

/// What a completion message names: one chunk of one stage in one epoch. Plain data; it is evidence that
/// [`crate::Barrier`] weighs, not a right to open anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TicketId {
    /// The attempt the chunk belongs to.
    pub epoch: Epoch,
    /// The gate it counts for.
    pub stage: StageId,
    /// The chunk inside the stage.
    pub chunk: ChunkId,
}
