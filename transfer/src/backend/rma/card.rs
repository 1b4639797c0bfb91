//! What two sides of a one-sided transport tell each other once the handshake of the control channel is
//! done, each as the body of a message frame:
//!
//! ```text
//! both        greeting: which transport          another one, or none, ends it here
//! connector   card: address, keys; then listener one after the other, so that nobody writes unread
//! connector   ready; then listener               its endpoint has reached the other one
//! ```

use bytes::Bytes;

use super::super::handshake::HandshakeError;
use super::super::reader::FrameReader;
use super::super::socket::{Bounds, Socket};
use crate::agent::auth::Side;
use crate::agent::fields::Fields;
use crate::agent::metadata::REGION_LIMIT;
use crate::agent::wire::{self, Frame, Refusal, WireError};
use crate::backend::BackendKind;
use crate::ids::RegionId;

/// Version of greeting and card.
const VERSION: u16 = 1;
/// First bytes of a greeting.
const MAGIC: &[u8; 10] = b"kvgate-rma";
/// Last word of both sides.
const READY: &[u8] = b"ready";
/// Longest address of an endpoint.
const ADDRESS_LIMIT_BYTES: usize = 64 * 1024;
/// Longest key of a region.
const KEY_LIMIT_BYTES: usize = 16 * 1024;
/// Bytes of a key without the key.
const KEY_HEAD_BYTES: usize = 20;
/// Code of a refusal on this level.
const REFUSED: u16 = 4;

/// What a peer needs to reach one region of this side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Key {
    pub(crate) region: RegionId,
    pub(crate) generation: u32,
    /// Remote address of the region's first byte.
    pub(crate) base: u64,
    /// The provider's own words.
    pub(crate) key: Bytes,
}

/// How to reach one side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Card {
    /// The provider's own words.
    pub(crate) address: Bytes,
    /// One for each region of the metadata, in its order.
    pub(crate) keys: Vec<Key>,
}

impl Card {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend_from_slice(&VERSION.to_le_bytes());
        put(&mut out, &self.address);
        out.extend_from_slice(&length(self.keys.len()));
        for key in &self.keys {
            out.extend_from_slice(&key.region.0.to_le_bytes());
            out.extend_from_slice(&key.generation.to_le_bytes());
            out.extend_from_slice(&key.base.to_le_bytes());
            put(&mut out, &key.key);
        }
        out
    }

    pub(crate) fn decode(bytes: Bytes) -> Result<Self, WireError> {
        let mut fields = Fields::new(bytes);
        let theirs = fields.u16("card.version")?;
        if theirs != VERSION {
            return Err(WireError::Version {
                ours: VERSION,
                theirs,
            });
        }
        let address_bytes = fields.count(ADDRESS_LIMIT_BYTES, 1, "address_bytes")?;
        let address = fields.take(address_bytes, "address")?;
        let count = fields.count(REGION_LIMIT, KEY_HEAD_BYTES, "key_count")?;
        let mut keys = Vec::with_capacity(count);
        for _ in 0..count {
            let region = RegionId(fields.u32("key.region")?);
            let generation = fields.u32("key.generation")?;
            let base = fields.u64("key.base")?;
            let key_bytes = fields.count(KEY_LIMIT_BYTES, 1, "key_bytes")?;
            let key = fields.take(key_bytes, "key")?;
            keys.push(Key {
                region,
                generation,
                base,
                key,
            });
        }
        fields.finish()?;
        Ok(Self { address, keys })
    }
}

fn length(count: usize) -> [u8; 4] {
    u32::try_from(count).unwrap_or(u32::MAX).to_le_bytes()
}

fn put(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(&length(bytes.len()));
    out.extend_from_slice(bytes);
}

/// The conversation, over a socket whose handshake is done.
pub(crate) struct Exchange<'a> {
    pub(crate) socket: &'a Socket,
    pub(crate) reader: &'a mut FrameReader,
    pub(crate) side: Side,
    pub(crate) kind: BackendKind,
    pub(crate) bounds: Bounds<'a>,
}

impl Exchange<'_> {
    /// Both sides want the same transport.
    pub(crate) fn greet(&mut self) -> Result<(), HandshakeError> {
        let mut ours = MAGIC.to_vec();
        ours.extend_from_slice(&VERSION.to_le_bytes());
        ours.extend_from_slice(self.kind.to_string().as_bytes());
        self.send(&ours)?;
        let theirs = self.next()?;
        if theirs == ours {
            return Ok(());
        }
        let reason = format!(
            "this side speaks {} over this connection, the peer {}",
            self.kind,
            describe(&theirs)
        );
        Err(self.refuse(reason))
    }

    /// Hands `ours` over and takes the peer's.
    pub(crate) fn trade(&mut self, ours: &Card) -> Result<Card, HandshakeError> {
        let words = ours.encode();
        let theirs = match self.side {
            Side::Connector => {
                self.send(&words)?;
                self.next()?
            }
            Side::Listener => {
                let theirs = self.next()?;
                self.send(&words)?;
                theirs
            }
        };
        Card::decode(theirs).map_err(|error| self.refuse(format!("card: {error}")))
    }

    /// The endpoint of this side has reached the peer's.
    pub(crate) fn say_ready(&mut self) -> Result<(), HandshakeError> {
        self.send(READY)
    }

    /// The peer's endpoint has reached this one.
    pub(crate) fn await_ready(&mut self) -> Result<(), HandshakeError> {
        match self.next()? {
            answer if answer == READY => Ok(()),
            _ => Err(self.refuse("something else instead of the last word".into())),
        }
    }

    /// Tells the peer why, and gives the error for this side.
    pub(crate) fn refuse(&mut self, reason: String) -> HandshakeError {
        let mut words = Vec::new();
        let refusal = Refusal {
            code: REFUSED,
            reason,
        };
        wire::append_refuse(&mut words, &refusal);
        if self.socket.send_all(&words, self.bounds).is_ok() {
            self.socket.shutdown_send();
        }
        HandshakeError::ByUs(refusal.reason)
    }

    fn send(&mut self, body: &[u8]) -> Result<(), HandshakeError> {
        let mut words = Vec::new();
        wire::append_message(&mut words, body);
        Ok(self.socket.send_all(&words, self.bounds)?)
    }

    fn next(&mut self) -> Result<Bytes, HandshakeError> {
        match self.reader.next(self.socket, self.bounds)? {
            Frame::Message(bytes) => Ok(bytes),
            Frame::Refuse(refusal) => Err(HandshakeError::ByPeer(refusal.reason)),
            Frame::Bye => Err(HandshakeError::ByPeer(format!(
                "it has closed the connection, and may not speak {}",
                self.kind
            ))),
            frame => Err(self.refuse(format!("{:?} frame instead of a greeting", frame.kind()))),
        }
    }
}

/// A greeting, for messages.
fn describe(greeting: &[u8]) -> String {
    let Some(rest) = greeting.strip_prefix(MAGIC) else {
        return "another transport".into();
    };
    match rest.split_first_chunk::<2>() {
        Some((version, name)) => format!(
            "{} of version {}",
            String::from_utf8_lossy(&name[..name.len().min(32)]),
            u16::from_le_bytes(*version)
        ),
        None => "a cut greeting".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card() -> Card {
        let key = |region, key: &'static [u8]| Key {
            region: RegionId(region),
            generation: region + 1,
            base: 1 << 40,
            key: Bytes::from_static(key),
        };
        Card {
            address: Bytes::from_static(b"where"),
            keys: vec![key(1, b"first"), key(9, b"")],
        }
    }

    #[test]
    fn a_card_comes_back_as_it_went() {
        assert_eq!(Card::decode(card().encode().into()).unwrap(), card());
    }

    #[test]
    fn every_cut_and_every_wrong_count_is_refused() {
        let whole = card().encode();
        for end in 0..whole.len() {
            assert!(Card::decode(Bytes::copy_from_slice(&whole[..end])).is_err());
        }
        let mut longer = whole.clone();
        longer.push(0);
        let trailing = Err(WireError::Trailing { extra_bytes: 1 });
        assert_eq!(Card::decode(longer.into()), trailing);
        let mut many = whole.clone();
        many[11..15].copy_from_slice(&u32::MAX.to_le_bytes());
        let error = Card::decode(many.into()).unwrap_err();
        let field = "key_count";
        let value = u64::from(u32::MAX);
        assert_eq!(error, WireError::BadValue { field, value });
        let mut newer = whole;
        newer[0] = 9;
        let version = Err(WireError::Version { ours: 1, theirs: 9 });
        assert_eq!(Card::decode(newer.into()), version);
    }

    #[test]
    fn a_greeting_says_what_it_is() {
        assert_eq!(describe(b"kvgate-rma\x02\x00ucx"), "ucx of version 2");
        assert_eq!(describe(b"kvgate-rma"), "a cut greeting");
        assert_eq!(describe(b"\x00hello"), "another transport");
    }
}
