//! The paged KV cache of DeepSeek-V4: what it consists of, who may touch it when, and how it crosses
//! from one process to another.
//!
//! # One enumeration
//! [`CacheSchema`] lists every component of every layer. Pools, views, descriptors, expected chunks,
//! the fingerprint that two peers compare and the canary all come from it; nothing is counted twice.
//!
//! # Three witnesses
//! * A layer is **sent** against [`WrittenLayer`]: its rows are written ([`WriteLease::commit_layer`]).
//! * A layer is **read** against [`ReadyLayer`]: every chunk of every component of it has landed
//!   ([`PageLease::layer`]), or [`prefix::PrefixLayer`] for pages that the tree holds.
//! * A slot is **reused** against [`kvgate_transfer::Quiesced`]: every writer and every reader of its
//!   generation is over ([`DrainingFlight`]).
//!
//! There is no other way to a byte, and no exit by time: a request that ends while somebody may still
//! touch its slots leaves them draining, and what can never be proven quiet stays out of use and is
//! counted ([`PoolStats`]).
//!
//! # The life of a slot
//! `Free → Reserved → InFlight → Ready → Draining → Free` of the next generation
//! ([`page::Slot`]). A request takes slots of three spaces or none: logical pages of 256 tokens, a ring
//! of window slots, one request slot.
//!
//! # Example
//! Two agents in one process; the cache of 300 tokens goes from one to the other.
//! ```
//! # #[cfg(not(kv_loom))]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use kvgate_kvcache::canary::{VerifyMode, page_digests};
//! use kvgate_kvcache::*;
//! use kvgate_transfer::{Agent, Deadline, Epoch, Op, PostOptions, WriterRank, sync::Arc};
//!
//! // A model of three layers, in its real formats.
//! let geometry = V4Geometry { layer_ratios: vec![0, 4, 128], ..V4Geometry::flash() };
//! let schema = Arc::new(CacheSchema::deepseek_v4(&geometry, &Formats::default())?);
//! let config = PoolConfig { pages: 4, windows: 4, requests: 2, memory: MemoryKind::Host };
//! let (source, target) = (PoolSet::new(schema.clone(), config)?, PoolSet::new(schema.clone(), config)?);
//! let (prefill, decode) = (Agent::builder("prefill").build()?, Agent::builder("decode").build()?);
//! source.register(&prefill)?;
//! target.register(&decode)?;
//! let (to_decode, to_prefill) = Agent::connect_local(&prefill, &decode)?;
//!
//! // Both sides compile the same plan: one segment, one writer that delivers all layers.
//! let writer = WriterLayers { rank: WriterRank(0), layers: 0..schema.layer_count() };
//! let plan = TransferPlan::compile(schema.clone(), 300, vec![300], vec![writer])?;
//!
//! // Decode reserves slots and arms the gates before anybody is told where to write.
//! let slots = target.reserve(364, Room(7))?;
//! let mut flight = slots.into_inflight(&plan, Epoch(1), &[(to_prefill, WriterRank(0))]).map_err(|e| e.1)?;
//! flight.arm(&decode, None)?;
//! let lease = flight.lease()?;
//!
//! // Prefill writes a layer, commits it, sends it.
//! let mut computed = source.reserve(300, Room(7))?;
//! let peer = prefill.peer(to_decode).expect("connected above");
//! let pools: Vec<_> = peer.pools.iter().map(|pool| pool.pool).collect();
//! for layer in schema.layers() {
//!     let rows = computed.layer_mut(layer)?;
//!     let mut window = rows.component(Component::SwaLatent).expect("every layer has a window");
//!     window.write_row(299, &vec![layer.0 as u8 + 1; window.row_image_bytes()])?;
//!     let written: WrittenLayer = computed.commit_layer(layer, 0..300)?;
//!     let target = PostTarget {
//!         incarnation: peer.incarnation,
//!         pools: &pools,
//!         table: flight.block_table(),
//!         epoch: Epoch(1),
//!         room: Room(7),
//!         verify: VerifyMode::Canary,
//!     };
//!     let post = plan.post(&source, 0, &written, &target)?;
//!     let (here, there) = post.descriptors();
//!     let transfer = prefill.prepare(Op::Write, &here, &there, to_decode)?;
//!     let options = PostOptions {
//!         arrival: Some(post.arrival),
//!         keepalive: Some(Box::new(post.keepalive)),
//!         ledger: Some(computed.ledger().clone()),
//!         ..Default::default()
//!     };
//!     let _handle = prefill.post(&transfer, post.source, options)?;
//! }
//!
//! // Decode reads a layer once all of it is there.
//! let ready: ReadyLayer<'_> = lease.layer(LayerId(1), Deadline::after_ms(5_000))?;
//! let window = ready.view().component(Component::SwaLatent).expect("every layer has a window");
//! let mut row = vec![0; window.row_image_bytes()];
//! window.read_row(299, &mut row);
//! assert!(row.iter().all(|byte| *byte == 2));
//!
//! // The slots come back when everybody is done with them.
//! drop(lease.all_layers(Deadline::after_ms(5_000))?);
//! let same = page_digests(&source, computed.block_table(), 300) == page_digests(&target, flight.block_table(), 300);
//! assert!(same);
//! drop(lease);
//! flight.close().wait(Deadline::after_ms(5_000)).expect("everything has landed");
//! assert_eq!(target.stats().pages.free, 4);
//! # Ok(())
//! # }
//! # #[cfg(kv_loom)]
//! # fn main() {}
//! ```
//!
//! # Features
//! `fault-injection`: hidden hooks that break a hand-off on purpose, for tests of the detectors. Under
//! `--cfg kv_loom` the crate compiles for the model checker; pools then have slots and no bytes.

#![deny(unsafe_code)]
#![deny(missing_docs)]

pub mod block_table;
pub mod canary;
pub mod error;
#[cfg(all(feature = "fault-injection", not(kv_loom)))]
#[doc(hidden)]
pub mod fault;
pub mod fingerprint;
pub mod geometry;
pub mod handoff;
pub mod identity;
pub mod ids;
pub mod layout;
pub mod lease;
pub mod page;
pub mod plan;
pub mod pool;
pub mod prefix;
pub mod schema;

pub use block_table::BlockTable;
pub use error::{Error, ErrorKind};
pub use fingerprint::{FieldDifference, Fingerprint};
pub use geometry::{Formats, IndexKFormat, LatentFormat, V4Geometry, WindowPage, Yarn};
pub use ids::{Attempt, LayerId, PageId, Room};
pub use kvgate_transfer::MemoryKind;
pub use layout::{RowFormat, RowPlace};
pub use lease::{
    AllReady, AppendLease, ComponentView, InFlight, LayerMut, LayerRef, PageLease, ReadyLayer,
    SourceLease, WriteLease, WrittenLayer,
};
pub use plan::{KvPost, PageMove, PlannedChunk, PostTarget, TransferPlan, WriterLayers};
pub use pool::drain::DrainingFlight;
pub use pool::{PoolConfig, PoolSet, PoolStats, SpaceStats};
pub use prefix::{Hit, PrefixLease, PrefixTree};
pub use schema::{CacheSchema, Component, ComponentRow, LivePage, PoolIndex, Space};
