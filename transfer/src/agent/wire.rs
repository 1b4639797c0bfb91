//! Frames of a link: the bytes between two agents, on TCP and on the control socket of shared memory.
//!
//! ```text
//! magic "KVGL" | version u16 | kind u16 | body_bytes u32 | body | CRC-32C u32 over all before it
//! ```
//! Little-endian. The payload of a `Write` or `Data` follows its frame and is not part of it. Reading a frame
//! takes two steps, so that nothing is allocated or trusted before it was checked: [`Header::parse`]
//! on twelve bytes, then [`Frame::decode`] on the rest. Another version is refused by name before
//! anything else of the frame is looked at; `docs/wire.md` has the bytes of each kind.

use bytes::Bytes;

#[cfg_attr(kv_loom, allow(unused_imports))] // For backends.
pub(crate) use super::encode::{
    append_ack, append_arrival, append_bye, append_data, append_hello, append_landed,
    append_memory, append_message, append_metadata, append_nack, append_no_data, append_numbered,
    append_place, append_probe, append_progress, append_proof, append_read, append_ready,
    append_refuse, append_ring, append_write, check_arrival, check_message,
};
use super::fields::Fields;
pub(crate) use super::fields::WireError;
use crate::Arrival;
use crate::backend::{ReadRequest, RemoteRun};
use crate::ids::{ChunkId, Epoch, PoolId, RegionId, StageId};
use crate::visibility::Visibility;

/// First bytes of every frame.
pub(crate) const MAGIC: [u8; 4] = *b"KVGL";
/// Version of this build. A peer with another one is refused.
pub(crate) const VERSION: u16 = 1;
/// Magic, version, kind and body length.
pub(crate) const HEADER_BYTES: usize = 12;
/// The check sum behind the body.
pub(crate) const CRC_BYTES: usize = 4;
/// Longest note of an arrival.
pub(crate) const NOTE_LIMIT_BYTES: usize = 1 << 20;
/// Longest message.
pub(crate) const MESSAGE_LIMIT_BYTES: usize = 16 << 20;
/// Most tickets in one arrival.
pub(crate) const TICKET_LIMIT: usize = 1 << 16;
/// Most runs in one write frame; a longer transfer is sent in parts.
pub(crate) const RUN_LIMIT: usize = 1 << 16;
/// Longest encoded metadata.
pub(crate) const METADATA_LIMIT_BYTES: usize = 4 << 20;
/// Longest reason of a refusal.
pub(crate) const REASON_LIMIT_BYTES: usize = 1024;

const ARRIVAL_LIMIT_BYTES: usize = 16 + 4 * TICKET_LIMIT + NOTE_LIMIT_BYTES;

/// What a frame is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub(crate) enum Kind {
    Hello = 1,
    Proof = 2,
    Metadata = 3,
    Memory = 4,
    Ready = 5,
    Refuse = 6,
    Place = 7,
    Probe = 8,
    Ring = 9,
    Write = 16,
    Ack = 17,
    Nack = 18,
    Arrival = 19,
    Message = 20,
    Progress = 21,
    Bye = 22,
    Read = 23,
    Data = 24,
    NoData = 25,
    Landed = 26,
    Numbered = 27,
}

impl Kind {
    fn from_u16(value: u16) -> Option<Self> {
        Some(match value {
            1 => Self::Hello,
            2 => Self::Proof,
            3 => Self::Metadata,
            4 => Self::Memory,
            5 => Self::Ready,
            6 => Self::Refuse,
            7 => Self::Place,
            8 => Self::Probe,
            9 => Self::Ring,
            16 => Self::Write,
            17 => Self::Ack,
            18 => Self::Nack,
            19 => Self::Arrival,
            20 => Self::Message,
            21 => Self::Progress,
            22 => Self::Bye,
            23 => Self::Read,
            24 => Self::Data,
            25 => Self::NoData,
            26 => Self::Landed,
            27 => Self::Numbered,
            _ => return None,
        })
    }

    /// Longest body of this kind.
    pub(crate) fn limit_bytes(self) -> usize {
        match self {
            Self::Hello | Self::Proof | Self::Memory | Self::Ready => 64,
            Self::Place | Self::Probe | Self::Ring => 64,
            Self::Ack | Self::Landed | Self::Progress | Self::Bye | Self::Data => 64,
            Self::Refuse => 2 + REASON_LIMIT_BYTES,
            Self::Nack | Self::NoData => 8 + 2 + REASON_LIMIT_BYTES,
            Self::Metadata => METADATA_LIMIT_BYTES,
            Self::Write => 32 + RUN_LIMIT * RUN_BYTES + ARRIVAL_LIMIT_BYTES,
            Self::Read => 32 + RUN_LIMIT * RUN_BYTES,
            Self::Arrival => 1 + ARRIVAL_LIMIT_BYTES,
            Self::Message => MESSAGE_LIMIT_BYTES,
            Self::Numbered => 8 + MESSAGE_LIMIT_BYTES,
        }
    }
}

/// The checked first twelve bytes of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) body_bytes: usize,
}

impl Header {
    /// Checks magic, version, kind and length, in this order.
    pub(crate) fn parse(bytes: &[u8; HEADER_BYTES]) -> Result<Self, WireError> {
        let [m0, m1, m2, m3, v0, v1, k0, k1, l0, l1, l2, l3] = *bytes;
        let magic = [m0, m1, m2, m3];
        if magic != MAGIC {
            return Err(WireError::BadMagic(magic));
        }
        let theirs = u16::from_le_bytes([v0, v1]);
        if theirs != VERSION {
            return Err(WireError::Version {
                ours: VERSION,
                theirs,
            });
        }
        let kind = u16::from_le_bytes([k0, k1]);
        let kind = Kind::from_u16(kind).ok_or(WireError::UnknownKind(kind))?;
        let body_bytes = u32::from_le_bytes([l0, l1, l2, l3]);
        let limit_bytes = kind.limit_bytes();
        if body_bytes as usize > limit_bytes {
            return Err(WireError::TooLong {
                kind,
                body_bytes,
                limit_bytes,
            });
        }
        Ok(Self {
            kind,
            body_bytes: body_bytes as usize,
        })
    }
}

/// Bytes of a run.
pub(super) const RUN_BYTES: usize = 16;

impl Header {
    /// The refusal of a body that is longer than the place allows.
    pub(crate) fn too_long(&self, limit_bytes: usize) -> WireError {
        WireError::TooLong {
            kind: self.kind,
            body_bytes: self.body_bytes as u32,
            limit_bytes,
        }
    }
}

/// Head of a write: what the receiver checks before it reads one byte of payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WriteHead {
    /// Of the item among all that its sender has sent in this session.
    pub(crate) number: u64,
    /// No: more parts of this operation follow, and only the last one is answered.
    pub(crate) is_last: bool,
    pub(crate) payload_bytes: u64,
    pub(crate) runs: Vec<RemoteRun>,
    pub(crate) arrival: Option<Arrival>,
}

/// What a side of a stream says of the session that the connection belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct SessionWords {
    /// The connector: this one has had a connection before. The listener: it goes on.
    pub(crate) is_resumed: bool,
    /// Drawn by the listener; nothing in the first word of a connector.
    pub(crate) session: u128,
    /// The last item of the other side that was handled here.
    pub(crate) received: u64,
    /// How long this side keeps a session without a connection.
    pub(crate) window_ms: u32,
    /// The other side acknowledges at least once for so many items.
    pub(crate) every_items: u32,
    /// The same, for so many bytes of messages.
    pub(crate) every_bytes: u32,
    /// Most items of this side that are not answered.
    pub(crate) most_items: u32,
}

/// Why a peer was refused or a write not applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) code: u16,
    pub(crate) reason: String,
}

/// A parsed frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Frame {
    /// First frame in both directions.
    Hello {
        nonce: [u8; 32],
        has_auth_token: bool,
    },
    /// HMAC over both nonces.
    Proof {
        mac: [u8; 32],
    },
    /// Encoded `AgentMetadata`.
    Metadata(Bytes),
    /// One memfd travels beside this frame.
    Memory {
        region: RegionId,
        generation: u32,
        mapped_bytes: u64,
    },
    /// The sender has accepted everything it was told. On a stream whose sender keeps sessions, with its words
    /// about this one.
    Ready(Option<SessionWords>),
    Refuse(Refusal),
    /// Where a region lies in the memory of the sender.
    Place {
        region: RegionId,
        generation: u32,
        address: u64,
    },
    /// What stands at an address of the sender, for the receiver to read there.
    Probe {
        address: u64,
        nonce: [u8; 32],
    },
    /// The ring that the sender reads; one memfd travels beside this frame.
    Ring {
        len_bytes: u64,
    },
    Write(WriteHead),
    /// Every item up to this one was handled, and each write among them that was not refused has come so far.
    Ack {
        through: u64,
        level: Visibility,
    },
    /// The first slots of a write have landed; more of it is to come.
    Landed {
        number: u64,
        slot_count: u64,
    },
    /// As an `Ack` of the items before, and this write was refused.
    Nack {
        number: u64,
        refusal: Refusal,
    },
    Arrival {
        level: Visibility,
        arrival: Arrival,
    },
    Message(Bytes),
    /// A message that is an item of a session.
    Numbered {
        number: u64,
        message: Bytes,
    },
    Progress {
        counter: u64,
    },
    /// Every operation of the sender is terminal, and it posts no more.
    Bye,
    Read(ReadRequest),
    /// The answer to a request; the payload follows.
    Data {
        request: u64,
        payload_bytes: u64,
    },
    NoData {
        request: u64,
        refusal: Refusal,
    },
}

impl Frame {
    /// The kind on the wire.
    pub(crate) fn kind(&self) -> Kind {
        match self {
            Self::Hello { .. } => Kind::Hello,
            Self::Proof { .. } => Kind::Proof,
            Self::Metadata(_) => Kind::Metadata,
            Self::Memory { .. } => Kind::Memory,
            Self::Ready(_) => Kind::Ready,
            Self::Refuse(_) => Kind::Refuse,
            Self::Place { .. } => Kind::Place,
            Self::Probe { .. } => Kind::Probe,
            Self::Ring { .. } => Kind::Ring,
            Self::Write(_) => Kind::Write,
            Self::Ack { .. } => Kind::Ack,
            Self::Landed { .. } => Kind::Landed,
            Self::Nack { .. } => Kind::Nack,
            Self::Arrival { .. } => Kind::Arrival,
            Self::Message(_) => Kind::Message,
            Self::Numbered { .. } => Kind::Numbered,
            Self::Progress { .. } => Kind::Progress,
            Self::Bye => Kind::Bye,
            Self::Read(_) => Kind::Read,
            Self::Data { .. } => Kind::Data,
            Self::NoData { .. } => Kind::NoData,
        }
    }

    /// Decodes a frame whose header was parsed, with the body and the check sum behind it.
    pub(crate) fn decode(
        header_bytes: &[u8; HEADER_BYTES],
        header: Header,
        body: Bytes,
        crc: [u8; CRC_BYTES],
    ) -> Result<Self, WireError> {
        if body.len() != header.body_bytes {
            return Err(WireError::Truncated { field: "body" });
        }
        let found = u32::from_le_bytes(crc);
        let expected = crc32c::crc32c_append(crc32c::crc32c(header_bytes), &body);
        if found != expected {
            return Err(WireError::Crc { expected, found });
        }
        let mut fields = Fields::new(body);
        let frame = fields.frame(header.kind)?;
        fields.finish()?;
        Ok(frame)
    }
}

impl Fields {
    fn frame(&mut self, kind: Kind) -> Result<Frame, WireError> {
        Ok(match kind {
            Kind::Hello => Frame::Hello {
                nonce: self.array("nonce")?,
                has_auth_token: self.bool("has_auth_token")?,
            },
            Kind::Proof => Frame::Proof {
                mac: self.array("mac")?,
            },
            Kind::Metadata => Frame::Metadata(self.remaining()),
            Kind::Memory => Frame::Memory {
                region: RegionId(self.u32("region")?),
                generation: self.u32("generation")?,
                mapped_bytes: self.u64("mapped_bytes")?,
            },
            Kind::Ready => Frame::Ready(match self.left_bytes() {
                0 => None,
                _ => Some(self.session_words()?),
            }),
            Kind::Refuse => Frame::Refuse(self.refusal()?),
            Kind::Place => Frame::Place {
                region: RegionId(self.u32("region")?),
                generation: self.u32("generation")?,
                address: self.u64("address")?,
            },
            Kind::Probe => Frame::Probe {
                address: self.u64("address")?,
                nonce: self.array("nonce")?,
            },
            Kind::Ring => Frame::Ring {
                len_bytes: self.u64("len_bytes")?,
            },
            Kind::Write => Frame::Write(self.write_head()?),
            Kind::Ack => Frame::Ack {
                through: self.u64("through")?,
                level: self.level()?,
            },
            Kind::Landed => Frame::Landed {
                number: self.u64("number")?,
                slot_count: self.u64("slot_count")?,
            },
            Kind::Nack => Frame::Nack {
                number: self.u64("number")?,
                refusal: self.refusal()?,
            },
            Kind::Arrival => Frame::Arrival {
                level: self.level()?,
                arrival: self.arrival()?,
            },
            Kind::Message => Frame::Message(self.remaining()),
            Kind::Numbered => Frame::Numbered {
                number: self.u64("number")?,
                message: self.remaining(),
            },
            Kind::Progress => Frame::Progress {
                counter: self.u64("counter")?,
            },
            Kind::Bye => Frame::Bye,
            Kind::Read => Frame::Read(ReadRequest {
                connection: 0,
                id: self.u64("request")?,
                payload_bytes: self.u64("payload_bytes")?,
                runs: self.runs()?,
            }),
            Kind::Data => Frame::Data {
                request: self.u64("request")?,
                payload_bytes: self.u64("payload_bytes")?,
            },
            Kind::NoData => Frame::NoData {
                request: self.u64("request")?,
                refusal: self.refusal()?,
            },
        })
    }

    fn session_words(&mut self) -> Result<SessionWords, WireError> {
        Ok(SessionWords {
            is_resumed: self.bool("is_resumed")?,
            session: self.u128("session")?,
            received: self.u64("received")?,
            window_ms: self.u32("window_ms")?,
            every_items: self.u32("every_items")?,
            every_bytes: self.u32("every_bytes")?,
            most_items: self.u32("most_items")?,
        })
    }

    fn write_head(&mut self) -> Result<WriteHead, WireError> {
        let number = self.u64("number")?;
        let is_last = self.bool("is_last")?;
        let has_arrival = self.bool("has_arrival")?;
        let payload_bytes = self.u64("payload_bytes")?;
        let runs = self.runs()?;
        let arrival = if has_arrival {
            Some(self.arrival()?)
        } else {
            None
        };
        if has_arrival && !is_last {
            return Err(WireError::BadValue {
                field: "has_arrival",
                value: 1,
            });
        }
        Ok(WriteHead {
            number,
            is_last,
            payload_bytes,
            runs,
            arrival,
        })
    }

    fn runs(&mut self) -> Result<Vec<RemoteRun>, WireError> {
        let run_count = self.count(RUN_LIMIT, RUN_BYTES, "run_count")?;
        let mut runs = Vec::with_capacity(run_count);
        for _ in 0..run_count {
            runs.push(self.run()?);
        }
        Ok(runs)
    }

    fn run(&mut self) -> Result<RemoteRun, WireError> {
        let run = RemoteRun {
            pool: PoolId(self.u32("run.pool")?),
            generation: self.u32("run.generation")?,
            slot: self.u32("run.slot")?,
            slot_count: self.u32("run.slot_count")?,
        };
        if run.slot_count == 0 || run.slot.checked_add(run.slot_count).is_none() {
            return Err(WireError::BadValue {
                field: "run.slot_count",
                value: u64::from(run.slot_count),
            });
        }
        Ok(run)
    }

    fn arrival(&mut self) -> Result<Arrival, WireError> {
        let epoch = Epoch(self.u64("epoch")?);
        let ticket_count = self.count(TICKET_LIMIT, 4, "ticket_count")?;
        let mut tickets = Vec::with_capacity(ticket_count);
        for _ in 0..ticket_count {
            tickets.push((
                StageId(self.u16("ticket.stage")?),
                ChunkId(self.u16("ticket.chunk")?),
            ));
        }
        let note_bytes = self.count(NOTE_LIMIT_BYTES, 1, "note_bytes")?;
        Ok(Arrival {
            epoch,
            tickets,
            note: self.take(note_bytes, "note")?,
        })
    }

    fn refusal(&mut self) -> Result<Refusal, WireError> {
        Ok(Refusal {
            code: self.u16("code")?,
            reason: {
                let left = self.left_bytes();
                self.text(left, "reason")?
            },
        })
    }

    fn level(&mut self) -> Result<Visibility, WireError> {
        match self.u8("level")? {
            0 => Ok(Visibility::LocalDone),
            1 => Ok(Visibility::RemoteDelivered),
            2 => Ok(Visibility::RemoteVisible),
            other => Err(WireError::BadValue {
                field: "level",
                value: u64::from(other),
            }),
        }
    }
}
