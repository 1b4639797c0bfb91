//! Events as msgpack: a batch is an array, an event a map with its name under `type`.

use kvgate_kvcache::identity::BlockKey;
use rmp::encode::{
    ByteBuf, ValueWriteError, write_array_len, write_bin, write_f64, write_map_len, write_nil,
    write_sint, write_str, write_uint,
};

use super::{Dialect, Event, Medium};

type Written = Result<(), ValueWriteError<std::convert::Infallible>>;

/// The bytes of a batch: `[time, events, rank]`.
pub(super) fn batch(
    at_seconds: f64,
    events: &[Event],
    dialect: Dialect,
    rank: Option<u32>,
) -> Vec<u8> {
    let mut writer = Writer {
        out: ByteBuf::new(),
        dialect,
    };
    match writer.batch(at_seconds, events, rank) {
        Ok(()) => writer.out.into_vec(),
        Err(never) => match never {
            ValueWriteError::InvalidMarkerWrite(never)
            | ValueWriteError::InvalidDataWrite(never) => match never {},
        },
    }
}

struct Writer {
    out: ByteBuf,
    dialect: Dialect,
}

impl Writer {
    fn batch(&mut self, at_seconds: f64, events: &[Event], rank: Option<u32>) -> Written {
        write_array_len(&mut self.out, 3)?;
        write_f64(&mut self.out, at_seconds)?;
        write_array_len(&mut self.out, events.len() as u32)?;
        for event in events {
            self.event(event)?;
        }
        match rank {
            Some(rank) => write_uint(&mut self.out, rank.into()).map(drop),
            None => self.nil(),
        }
    }

    fn event(&mut self, event: &Event) -> Written {
        match event {
            Event::Stored {
                key,
                parent,
                tokens,
                block_tokens,
                medium,
            } => {
                self.begin(8, "BlockStored")?;
                self.hashes(key)?;
                write_str(&mut self.out, "parent_block_hash")?;
                match parent {
                    Some(parent) => self.hash(parent)?,
                    None => self.nil()?,
                }
                write_str(&mut self.out, "token_ids")?;
                write_array_len(&mut self.out, tokens.len() as u32)?;
                for token in tokens {
                    write_uint(&mut self.out, (*token).into())?;
                }
                write_str(&mut self.out, "block_size")?;
                write_uint(&mut self.out, (*block_tokens).into())?;
                // Adapters are part of the hashes.
                for name in ["lora_id", "lora_name"] {
                    write_str(&mut self.out, name)?;
                    self.nil()?;
                }
                self.medium(*medium)
            }
            Event::Removed { key, medium } => {
                self.begin(3, "BlockRemoved")?;
                self.hashes(key)?;
                self.medium(*medium)
            }
            Event::Cleared => self.begin(1, "AllBlocksCleared"),
        }
    }

    fn begin(&mut self, fields: u32, name: &str) -> Written {
        write_map_len(&mut self.out, fields)?;
        write_str(&mut self.out, "type")?;
        write_str(&mut self.out, name)
    }

    fn hashes(&mut self, key: &BlockKey) -> Written {
        write_str(&mut self.out, "block_hashes")?;
        write_array_len(&mut self.out, 1)?;
        self.hash(key)
    }

    fn hash(&mut self, key: &BlockKey) -> Written {
        match self.dialect {
            Dialect::Vllm => write_bin(&mut self.out, &key.0),
            Dialect::Sglang => {
                let first = std::array::from_fn(|byte| key.0[byte]);
                write_sint(&mut self.out, i64::from_be_bytes(first)).map(drop)
            }
        }
    }

    fn medium(&mut self, medium: Medium) -> Written {
        write_str(&mut self.out, "medium")?;
        write_str(&mut self.out, medium.name(self.dialect))
    }

    fn nil(&mut self) -> Written {
        write_nil(&mut self.out).map_err(ValueWriteError::InvalidMarkerWrite)
    }
}
