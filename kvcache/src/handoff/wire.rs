//! Hand-off messages as bytes: one envelope per message, little-endian, checked by a CRC-32C.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic `KVGH` |
//! | 4 | 2 | version of the wire |
//! | 6 | 2 | kind |
//! | 8 | 4 | length of the body |
//! | 12 | 16 | incarnation of the sender |
//! | 28 | 8 | room |
//! | 36 | 4 | attempt |
//! | 40 | 8 | epoch |
//! | 48 | n | body |
//! | 48 + n | 4 | CRC-32C over everything before |
//!
//! Another version is refused by name before anything else is looked at. Lists carry their count; a count
//! that the rest of the message cannot hold is refused before memory is taken for it.

use std::fmt;

use kvgate_transfer::{Epoch, Incarnation, WriterRank};

use crate::fingerprint::Fingerprint;
use crate::ids::{Attempt, PageId, Room};

mod codec;

use codec::{Reader, Writer};

/// Version of the messages.
pub const WIRE_VERSION: u16 = 1;
/// Longest body that is read, in bytes: the ids of a prompt of 4,194,304 tokens.
pub const BODY_LIMIT_BYTES: u32 = 1 << 24;

const MAGIC: [u8; 4] = *b"KVGH";
const HEAD_BYTES: usize = 48;
const CRC_BYTES: usize = 4;

/// Which flight of which process a message is about. A message of another one has no effect (I-14).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity {
    /// The life of the process that sends it.
    pub incarnation: Incarnation,
    /// The request.
    pub room: Room,
    /// The try.
    pub attempt: Attempt,
    /// The flight; 0 where there is none yet.
    pub epoch: Epoch,
}

/// A message with what it is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// What it is about.
    pub identity: Identity,
    /// What it says.
    pub message: Message,
}

/// What a side says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Both sides, first: what the sender's cache looks like, and what it delivers.
    Hello {
        /// Hash over the fields.
        fingerprint: Fingerprint,
        /// Fields of the schema, in the order differences are reported.
        fields: Vec<(String, String)>,
        /// The sender among the writers of a request; 0 for a receiver.
        writer: WriterRank,
        /// Writers of a request.
        writer_count: u16,
        /// First layer that it delivers.
        first_layer: u16,
        /// Layer behind the last one that it delivers.
        end_layer: u16,
    },
    /// The schemas differ.
    HelloRefused {
        /// The field.
        field: String,
        /// The value of the side that refuses.
        ours: String,
        /// The value of the side that is refused.
        theirs: String,
    },
    /// A prefill side has a prompt.
    Submit {
        /// Prompt and output tokens that the cache must hold.
        total_tokens: u32,
        /// Tokens to be decoded.
        steps: u32,
        /// The prompt.
        prompt: Vec<u32>,
    },
    /// Where the rows go. The barrier behind it is armed.
    Offer {
        /// The prompt length.
        prompt_tokens: u32,
        /// Ends of the segments in tokens.
        segment_ends: Vec<u32>,
        /// Logical pages with their generations.
        pages: Vec<PageId>,
        /// The ring of window slots.
        windows: Vec<PageId>,
        /// The request slot.
        request: PageId,
    },
    /// As an Offer, from a side that has the pages of a prefix of the prompt ready and keeps them: they do not
    /// cross, and nothing may be written to them.
    OfferBehind {
        /// Tokens of that prefix, a multiple of 256; its pages come first.
        start_tokens: u32,
        /// The prompt length.
        prompt_tokens: u32,
        /// Ends of the segments in tokens, behind the prefix.
        segment_ends: Vec<u32>,
        /// Logical pages with their generations, those of the prefix included.
        pages: Vec<PageId>,
        /// The ring of window slots.
        windows: Vec<PageId>,
        /// The request slot.
        request: PageId,
    },
    /// The request cannot be received.
    OfferRefused {
        /// Why.
        reason: String,
    },
    /// Request metadata, from the one writer that has it.
    Aux {
        /// The prompt length.
        prompt_tokens: u32,
        /// The token drawn from the last logits of the prompt.
        first_token: u32,
    },
    /// Every layer has landed and the first token is there.
    Done,
    /// The flight is given up.
    Abort {
        /// Why.
        cause: String,
    },
    /// Nothing of the flight is under way any more on the sender's side.
    AbortAck {
        /// Which writer says so.
        writer: WriterRank,
    },
    /// The run is over.
    Finish {
        /// Exit code of the side that sends it.
        code: u32,
        /// Its last line.
        text: String,
    },
}

/// Bytes that are no message. The connection they came from is of no use any more.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WireError {
    /// Shorter than an envelope, or than it says.
    Truncated {
        /// Bytes that are needed.
        needed_bytes: u64,
        /// Bytes that are there.
        found_bytes: u64,
    },
    /// Longer than it says.
    Trailing {
        /// Bytes that nothing accounts for.
        extra_bytes: u64,
    },
    /// Not a hand-off message.
    Magic {
        /// The first four bytes.
        found: [u8; 4],
    },
    /// Another version of the wire.
    Version {
        /// The version of the message.
        found: u16,
    },
    /// A kind that this version does not have.
    Kind {
        /// The kind.
        found: u16,
    },
    /// A body that is longer than any message.
    TooLong {
        /// Its length.
        body_bytes: u32,
    },
    /// The bytes changed on the way.
    Crc {
        /// What the message says.
        expected: u32,
        /// What its bytes give.
        found: u32,
    },
    /// A field of the body is not what it must be.
    Field {
        /// The field.
        field: &'static str,
        /// What is wrong with it.
        reason: &'static str,
    },
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WireError::Truncated {
                needed_bytes,
                found_bytes,
            } => {
                write!(
                    f,
                    "hand-off message of {found_bytes} bytes, {needed_bytes} needed"
                )
            }
            WireError::Trailing { extra_bytes } => {
                write!(
                    f,
                    "hand-off message with {extra_bytes} bytes behind its end"
                )
            }
            WireError::Magic { found } => {
                write!(f, "not a hand-off message: starts with {found:02x?}")
            }
            WireError::Version { found } => {
                write!(
                    f,
                    "hand-off wire version {found}, this build speaks {WIRE_VERSION}"
                )
            }
            WireError::Kind { found } => write!(f, "unknown hand-off message kind {found}"),
            WireError::TooLong { body_bytes } => {
                write!(
                    f,
                    "hand-off message body of {body_bytes} bytes, at most {BODY_LIMIT_BYTES}"
                )
            }
            WireError::Crc { expected, found } => {
                write!(
                    f,
                    "hand-off message checksum {found:08x}, it says {expected:08x}"
                )
            }
            WireError::Field { field, reason } => {
                write!(f, "hand-off message field {field}: {reason}")
            }
        }
    }
}

impl std::error::Error for WireError {}

impl Envelope {
    /// The message as bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        out.raw(&MAGIC);
        out.u16(WIRE_VERSION);
        out.u16(self.message.kind());
        out.u32(0);
        out.u128(self.identity.incarnation.0);
        out.u64(self.identity.room.0);
        out.u32(self.identity.attempt.0);
        out.u64(self.identity.epoch.0);
        self.message.write(&mut out);
        out.finish(HEAD_BYTES)
    }

    /// The message in `bytes`, which must hold exactly one.
    ///
    /// # Errors
    /// [`WireError`]; nothing of a message that is refused takes effect.
    pub fn decode(bytes: &[u8]) -> Result<Envelope, WireError> {
        let (kind, body) = open(bytes)?;
        let mut head = Reader::new(&bytes[12..HEAD_BYTES]);
        let identity = Identity {
            incarnation: Incarnation(head.u128("incarnation")?),
            room: Room(head.u64("room")?),
            attempt: Attempt(head.u32("attempt")?),
            epoch: Epoch(head.u64("epoch")?),
        };
        let mut reader = Reader::new(body);
        let message = Message::read(kind, &mut reader)?;
        reader.end()?;
        Ok(Envelope { identity, message })
    }
}

/// Checks everything around the body; answers the kind and the body.
fn open(bytes: &[u8]) -> Result<(u16, &[u8]), WireError> {
    let found_bytes = bytes.len() as u64;
    let short = |needed_bytes| WireError::Truncated {
        needed_bytes,
        found_bytes,
    };
    let magic: [u8; 4] = *bytes
        .first_chunk()
        .ok_or(short((HEAD_BYTES + CRC_BYTES) as u64))?;
    if magic != MAGIC {
        return Err(WireError::Magic { found: magic });
    }
    let mut head = Reader::new(&bytes[4..]);
    let version = head.u16("version")?;
    if version != WIRE_VERSION {
        return Err(WireError::Version { found: version });
    }
    let kind = head.u16("kind")?;
    let body_bytes = head.u32("length")?;
    if body_bytes > BODY_LIMIT_BYTES {
        return Err(WireError::TooLong { body_bytes });
    }
    let needed_bytes = (HEAD_BYTES + CRC_BYTES) as u64 + u64::from(body_bytes);
    if found_bytes < needed_bytes {
        return Err(short(needed_bytes));
    }
    if found_bytes > needed_bytes {
        return Err(WireError::Trailing {
            extra_bytes: found_bytes - needed_bytes,
        });
    }
    let (checked, crc) = bytes.split_at(bytes.len() - CRC_BYTES);
    let expected = u32::from_le_bytes(std::array::from_fn(|index| crc[index]));
    let found = crc32c::crc32c(checked);
    if expected != found {
        return Err(WireError::Crc { expected, found });
    }
    Ok((kind, &checked[HEAD_BYTES..]))
}

impl Message {
    fn kind(&self) -> u16 {
        match self {
            Message::Hello { .. } => 1,
            Message::HelloRefused { .. } => 2,
            Message::Submit { .. } => 3,
            Message::Offer { .. } => 4,
            Message::OfferRefused { .. } => 5,
            Message::Aux { .. } => 6,
            Message::Done => 7,
            Message::Abort { .. } => 8,
            Message::AbortAck { .. } => 9,
            Message::Finish { .. } => 10,
            Message::OfferBehind { .. } => 11,
        }
    }

    /// Name of the message, for errors and logs.
    pub fn name(&self) -> &'static str {
        match self {
            Message::Hello { .. } => "hello",
            Message::HelloRefused { .. } => "hello-refused",
            Message::Submit { .. } => "submit",
            Message::Offer { .. } => "offer",
            Message::OfferBehind { .. } => "offer-behind",
            Message::OfferRefused { .. } => "offer-refused",
            Message::Aux { .. } => "aux",
            Message::Done => "done",
            Message::Abort { .. } => "abort",
            Message::AbortAck { .. } => "abort-ack",
            Message::Finish { .. } => "finish",
        }
    }

    fn write(&self, out: &mut Writer) {
        match self {
            Message::Hello {
                fingerprint,
                fields,
                writer,
                writer_count,
                first_layer,
                end_layer,
            } => {
                out.raw(fingerprint);
                for number in [writer.0, *writer_count, *first_layer, *end_layer] {
                    out.u16(number);
                }
                out.list(fields, |out, (name, value)| {
                    out.text(name);
                    out.text(value);
                });
            }
            Message::HelloRefused {
                field,
                ours,
                theirs,
            } => {
                [field, ours, theirs]
                    .into_iter()
                    .for_each(|text| out.text(text));
            }
            Message::Submit {
                total_tokens,
                steps,
                prompt,
            } => {
                out.u32(*total_tokens);
                out.u32(*steps);
                out.list(prompt, |out, id| out.u32(*id));
            }
            Message::Offer {
                prompt_tokens,
                segment_ends,
                pages,
                windows,
                request,
            } => {
                out.u32(*prompt_tokens);
                out.list(segment_ends, |out, end| out.u32(*end));
                out.list(pages, Writer::page);
                out.list(windows, Writer::page);
                out.page(request);
            }
            Message::OfferBehind {
                start_tokens,
                prompt_tokens,
                segment_ends,
                pages,
                windows,
                request,
            } => {
                out.u32(*start_tokens);
                out.u32(*prompt_tokens);
                out.list(segment_ends, |out, end| out.u32(*end));
                out.list(pages, Writer::page);
                out.list(windows, Writer::page);
                out.page(request);
            }
            Message::OfferRefused { reason: text } | Message::Abort { cause: text } => {
                out.text(text)
            }
            Message::Aux {
                prompt_tokens,
                first_token,
            } => {
                out.u32(*prompt_tokens);
                out.u32(*first_token);
            }
            Message::Done => {}
            Message::AbortAck { writer } => out.u16(writer.0),
            Message::Finish { code, text } => {
                out.u32(*code);
                out.text(text);
            }
        }
    }

    fn read(kind: u16, body: &mut Reader<'_>) -> Result<Message, WireError> {
        Ok(match kind {
            1 => Message::Hello {
                fingerprint: body.array("fingerprint")?,
                writer: WriterRank(body.u16("writer")?),
                writer_count: body.u16("writer_count")?,
                first_layer: body.u16("first_layer")?,
                end_layer: body.u16("end_layer")?,
                fields: body.list("fields", 8, |body| {
                    Ok((body.text("field")?, body.text("value")?))
                })?,
            },
            2 => Message::HelloRefused {
                field: body.text("field")?,
                ours: body.text("ours")?,
                theirs: body.text("theirs")?,
            },
            3 => Message::Submit {
                total_tokens: body.u32("total_tokens")?,
                steps: body.u32("steps")?,
                prompt: body.list("prompt", 4, |body| body.u32("prompt"))?,
            },
            4 => Message::Offer {
                prompt_tokens: body.u32("prompt_tokens")?,
                segment_ends: body.list("segment_ends", 4, |body| body.u32("segment_ends"))?,
                pages: body.list("pages", 8, |body| body.page("pages"))?,
                windows: body.list("windows", 8, |body| body.page("windows"))?,
                request: body.page("request")?,
            },
            5 => Message::OfferRefused {
                reason: body.text("reason")?,
            },
            6 => Message::Aux {
                prompt_tokens: body.u32("prompt_tokens")?,
                first_token: body.u32("first_token")?,
            },
            7 => Message::Done,
            8 => Message::Abort {
                cause: body.text("cause")?,
            },
            9 => Message::AbortAck {
                writer: WriterRank(body.u16("writer")?),
            },
            10 => Message::Finish {
                code: body.u32("code")?,
                text: body.text("text")?,
            },
            11 => Message::OfferBehind {
                start_tokens: body.u32("start_tokens")?,
                prompt_tokens: body.u32("prompt_tokens")?,
                segment_ends: body.list("segment_ends", 4, |body| body.u32("segment_ends"))?,
                pages: body.list("pages", 8, |body| body.page("pages"))?,
                windows: body.list("windows", 8, |body| body.page("windows"))?,
                request: body.page("request")?,
            },
            found => return Err(WireError::Kind { found }),
        })
    }
}
