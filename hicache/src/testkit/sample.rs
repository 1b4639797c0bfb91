//! Records whose content follows from their name, so that any hit can be checked byte by byte.

use kvgate_kvcache::identity::{KeyChain, Namespace};
use kvgate_kvcache::schema::CacheSchema;
use kvgate_kvcache::{Formats, IndexKFormat, LatentFormat, V4Geometry};

use crate::miss::Miss;
use crate::record::{Record, RecordId, RecordKind, RecordShape, Verified, Wanted};

/// One sequence of blocks of a small model: block `k` and the checkpoint behind it, for every `k`.
#[derive(Clone, Debug)]
pub struct Sample {
    schema: CacheSchema,
    namespace: Namespace,
    chain: KeyChain,
    block: RecordShape,
    checkpoint: RecordShape,
}

impl Sample {
    /// `block_count` blocks of a model of three layers whose records take 8 KiB (a block) and 24 KiB.
    pub fn small(block_count: u32) -> Sample {
        Sample::of(&Sample::geometry(), &Sample::formats(), b"", block_count)
    }

    /// The geometry of [`Sample::small`].
    pub fn geometry() -> V4Geometry {
        V4Geometry {
            layer_ratios: vec![0, 4, 128],
            head_dim: 4,
            rope_dim: 2,
            index_head_dim: 2,
            ..V4Geometry::flash()
        }
    }

    /// The formats of [`Sample::small`].
    pub fn formats() -> Formats {
        Formats {
            latent: LatentFormat::F32,
            index_k: IndexKFormat::F32,
            ..Formats::default()
        }
    }

    /// The same tokens in the cache of another model, other formats or another tenant.
    ///
    /// # Panics
    /// If there is no such cache.
    pub fn of(geometry: &V4Geometry, formats: &Formats, salt: &[u8], block_count: u32) -> Sample {
        let schema = CacheSchema::deepseek_v4(geometry, formats).expect("a possible cache");
        let namespace = Namespace::new(&schema, 256, salt).expect("a short salt");
        let tokens: Vec<u32> = (0..256 * block_count).collect();
        Sample {
            chain: KeyChain::of(&namespace, &tokens),
            block: RecordShape::block(&schema, 256).expect("a known block length"),
            checkpoint: RecordShape::checkpoint(&schema, 256, 512).expect("a boundary"),
            namespace,
            schema,
        }
    }

    /// Blocks of the sequence.
    pub fn block_count(&self) -> u32 {
        self.chain.keys().len() as u32
    }

    /// The cache.
    pub fn schema(&self) -> &CacheSchema {
        &self.schema
    }

    /// Its namespace.
    pub fn namespace(&self) -> &Namespace {
        &self.namespace
    }

    /// The name of block `k`, or of the checkpoint behind it.
    pub fn id(&self, kind: RecordKind, k: u32) -> RecordId {
        let key = self.chain.keys()[k as usize];
        RecordId { kind, key }
    }

    /// The shape of records of that kind.
    pub fn shape(&self, kind: RecordKind) -> &RecordShape {
        match kind {
            RecordKind::Block => &self.block,
            RecordKind::Checkpoint => &self.checkpoint,
        }
    }

    /// What a reader of block `k`, or of the checkpoint behind it, asks for.
    pub fn wanted(&self, kind: RecordKind, k: u32) -> Wanted<'_> {
        let parent = match k {
            0 => self.namespace.root(),
            _ => self.chain.keys()[k as usize - 1],
        };
        Wanted {
            namespace: self.namespace.digest(),
            id: self.id(kind, k),
            parent,
            position: match kind {
                RecordKind::Block => u64::from(k) * 256,
                RecordKind::Checkpoint => u64::from(k + 1) * 256,
            },
            shape: self.shape(kind),
        }
    }

    /// The payload of that record: it follows from the name alone.
    pub fn payload(&self, kind: RecordKind, k: u32) -> Vec<u8> {
        let wanted = self.wanted(kind, k);
        let shape = wanted.shape;
        let key = wanted.id.key.0;
        let mut payload = vec![0; shape.payload_bytes() as usize];
        for part in shape.parts() {
            for (at, byte) in payload[part.range()].iter_mut().enumerate() {
                *byte = key[at % 32] ^ (at / 32) as u8 ^ part.layer.0 as u8 ^ kind as u8;
            }
        }
        payload
    }

    /// That record, with this payload.
    pub fn record<'a>(&'a self, kind: RecordKind, k: u32, payload: &'a [u8]) -> Record<'a> {
        let wanted = self.wanted(kind, k);
        Record {
            namespace: wanted.namespace,
            id: wanted.id,
            parent: wanted.parent,
            position: wanted.position,
            shape: wanted.shape,
            payload,
        }
    }

    /// Runs `work` with that record.
    pub fn with_record<T>(
        &self,
        kind: RecordKind,
        k: u32,
        work: impl FnOnce(&Record<'_>) -> T,
    ) -> T {
        work(&self.record(kind, k, &self.payload(kind, k)))
    }

    /// Reads that record with `read` and compares what a hit gave.
    ///
    /// # Errors
    /// The miss.
    ///
    /// # Panics
    /// If a hit gave a wrong byte.
    pub fn check_read(
        &self,
        kind: RecordKind,
        k: u32,
        read: impl for<'b> FnOnce(Wanted<'_>, &'b mut [u8]) -> Result<Verified<'b>, Miss>,
    ) -> Result<(), Miss> {
        let wanted = self.wanted(kind, k);
        let mut into = vec![0xEE; wanted.shape.payload_bytes() as usize];
        let verified = read(wanted, &mut into)?;
        assert_eq!(verified.id(), wanted.id, "the proof of another record");
        assert!(
            verified.payload() == self.payload(kind, k),
            "wrong bytes in a hit of {}",
            wanted.id
        );
        Ok(())
    }
}
