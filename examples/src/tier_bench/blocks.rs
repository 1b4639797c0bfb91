//! The records of a run: blocks of a model whose rows have the bytes that were asked for.

use kvgate_hicache::identity::{BlockKey, KeyChain, Namespace};
use kvgate_hicache::record::{Record, RecordId, RecordKind, RecordShape, Wanted};
use kvgate_kvcache::schema::CacheSchema;
use kvgate_kvcache::{Formats, IndexKFormat, LatentFormat, V4Geometry};

use crate::handoff::failure::{Failure, FailureKind};

/// Payloads that are given out in turn: more than a cache holds.
const SOURCE_BYTES: u64 = 64 << 20;

/// Blocks of one sequence.
pub(super) struct Blocks {
    namespace: Namespace,
    keys: Vec<BlockKey>,
    pub(super) shape: RecordShape,
    sources: Vec<Vec<u8>>,
}

impl Blocks {
    /// `count` blocks of `block_bytes` bytes of rows.
    pub(super) fn new(block_bytes: u64, count: u64) -> Result<Blocks, Failure> {
        let internal = |text: String| Failure::new(FailureKind::Internal, text);
        // Per layer 64 rows of `head_dim` values and 64 indexer keys of 2.
        let layers = (block_bytes / (32 << 10)).clamp(1, 512);
        let head_dim = block_bytes / layers / 256 - 2;
        let geometry = V4Geometry {
            layer_ratios: vec![4; layers as usize],
            head_dim: head_dim as u32,
            rope_dim: 2,
            index_head_dim: 2,
            ..V4Geometry::flash()
        };
        let formats = Formats {
            latent: LatentFormat::F32,
            index_k: IndexKFormat::F32,
            ..Formats::default()
        };
        let schema =
            CacheSchema::deepseek_v4(&geometry, &formats).map_err(|e| internal(e.to_string()))?;
        let namespace = Namespace::new(&schema, 256, b"").map_err(|e| internal(e.to_string()))?;
        let shape = RecordShape::block(&schema, 256).map_err(|e| internal(e.to_string()))?;
        let mut chain = KeyChain::new(&namespace);
        let mut block = vec![0_u32; 256];
        for k in 0..count {
            block[0] = k as u32;
            chain.extend(&block);
        }
        let payload_bytes = shape.payload_bytes();
        let source_count = (SOURCE_BYTES / payload_bytes).clamp(1, count);
        let source = |index: u64| {
            let mut payload = vec![0; payload_bytes as usize];
            for part in shape.parts() {
                for (at, byte) in payload[part.range()].iter_mut().enumerate() {
                    *byte = (at as u64).wrapping_mul(0x9E37).wrapping_add(index * 77) as u8;
                }
            }
            payload
        };
        Ok(Blocks {
            keys: chain.keys().to_vec(),
            sources: (0..source_count).map(source).collect(),
            namespace,
            shape,
        })
    }

    pub(super) fn count(&self) -> u64 {
        self.keys.len() as u64
    }

    pub(super) fn id(&self, k: u64) -> RecordId {
        RecordId {
            kind: RecordKind::Block,
            key: self.keys[k as usize],
        }
    }

    pub(super) fn payload(&self, k: u64) -> &[u8] {
        &self.sources[(k % self.sources.len() as u64) as usize]
    }

    pub(super) fn wanted(&self, k: u64) -> Wanted<'_> {
        Wanted {
            namespace: self.namespace.digest(),
            id: self.id(k),
            parent: match k {
                0 => self.namespace.root(),
                _ => self.keys[k as usize - 1],
            },
            position: k * 256,
            shape: &self.shape,
        }
    }

    pub(super) fn record(&self, k: u64) -> Record<'_> {
        let wanted = self.wanted(k);
        Record {
            namespace: wanted.namespace,
            id: wanted.id,
            parent: wanted.parent,
            position: wanted.position,
            shape: wanted.shape,
            payload: self.payload(k),
        }
    }

    /// A place in no order that a cache or a disk could guess, the same in every run.
    pub(super) fn shuffled(&self, step: u64) -> u64 {
        step.wrapping_mul(0x9E37_79B9_7F4A_7C15) % self.count()
    }
}
