//! Offers: where the rows of a flight go, as bytes between two processes.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic `KVGO` |
//! | 4 | 2 | version |
//! | 6 | 2 | flags: 1 = the receiver verifies |
//! | 8 | 4 | number of pools p |
//! | 12 | 4 | length of the `Hello` message h |
//! | 16 | 4 p | the receiver's pools, in the order of the schema |
//! | 16 + 4 p | h | the `Hello` message of the hand-off protocol |
//! | … | n | its `Offer` message |
//! | … | 4 | CRC-32C over everything before |
//!
//! Little-endian. Both messages are those of `docs/wire.md`.

use std::sync::Arc;

use kvgate_kvcache::handoff::wire::{Envelope, Identity, Message};
use kvgate_kvcache::{Attempt, BlockTable, CacheSchema, InFlight, Room, TransferPlan};
use kvgate_transfer::{Epoch, Incarnation, PoolId, WriterRank};

use crate::arg::{self, Versioned, kv_incarnation};
use crate::cache::plan::{PlanObject, kv_plan, kv_writer_layers, writers_of};
use crate::cache::receive::CacheSide;
use crate::cache::schema::kv_schema;
use crate::handle::{Handle, handle};
use crate::status::{Failure, Outcome, guard, kv_status};

const MAGIC: [u8; 4] = *b"KVGO";
const VERSION: u16 = 1;
const VERIFIED: u16 = 1;
const HEAD_BYTES: usize = 16;
const CRC_BYTES: usize = 4;

/// What a receiver has offered: where the rows of one flight go.
pub struct kv_offer {
    _opaque: (),
}

pub(crate) struct OfferObject {
    pub(crate) incarnation: Incarnation,
    pub(crate) room: Room,
    pub(crate) epoch: Epoch,
    pub(crate) pools: Vec<PoolId>,
    pub(crate) table: BlockTable,
    pub(crate) is_verified: bool,
    prompt_tokens: u32,
    segment_ends: Vec<u32>,
    schema: Arc<CacheSchema>,
}

handle!(kv_offer => OfferObject, "offer");

/// An offer in numbers.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_offer_info {
    /// `sizeof(struct kv_offer_info)`; set it before the call.
    pub struct_bytes: u32,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// The receiver's number of the request.
    pub room: u64,
    /// The receiver's number of the flight.
    pub epoch: u64,
    /// Segments that the prompt is sent in.
    pub segment_count: u32,
    /// 1 when the receiver verifies what arrives.
    pub is_verified: u32,
    /// Which life of the receiver it is of.
    pub incarnation: kv_incarnation,
}

// SAFETY: `repr(C)`, numbers, `struct_bytes` first.
unsafe impl Versioned for kv_offer_info {
    const NAME: &'static str = "kv_offer_info";
}

/// Reads an offer. `schema` is that of the cache here.
///
/// `KV_STATUS_REFUSED` when the caches differ; the message names the field and both values.
/// `KV_STATUS_INVALID_ARGUMENT` for bytes that are no offer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_offer_parse(
    schema: *const kv_schema,
    bytes: *const u8,
    length_bytes: usize,
    offer: *mut *mut kv_offer,
) -> kv_status {
    guard(|| {
        let schema = kv_schema::open(schema)?;
        // SAFETY: the contract of the header.
        let (bytes, out) = unsafe {
            let bytes = arg::slice(bytes, length_bytes, "bytes")?;
            (bytes, arg::out(offer, "offer")?)
        };
        out.set(kv_offer::create(decode(&schema, bytes)?));
        Ok(())
    })
}

/// What an offer says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_offer_describe(
    offer: *const kv_offer,
    info: *mut kv_offer_info,
) -> kv_status {
    guard(|| {
        let offer = kv_offer::open(offer)?;
        // SAFETY: the contract of the header.
        let out = unsafe { arg::versioned_out(info)? };
        out.set(kv_offer_info {
            struct_bytes: size_of::<kv_offer_info>() as u32,
            prompt_tokens: offer.prompt_tokens,
            room: offer.room.0,
            epoch: offer.epoch.0,
            segment_count: offer.segment_ends.len() as u32,
            is_verified: u32::from(offer.is_verified),
            incarnation: offer.incarnation.into(),
        });
        Ok(())
    })
}

/// Makes the plan of an offer, with its prompt and its segments. `writers` are those of the receiver's plan.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_offer_plan(
    offer: *const kv_offer,
    writers: *const kv_writer_layers,
    writer_count: usize,
    plan: *mut *mut kv_plan,
) -> kv_status {
    guard(|| {
        let offer = kv_offer::open(offer)?;
        // SAFETY: the contract of the header.
        let (writers, out) = unsafe {
            let writers = arg::slice(writers, writer_count, "writers")?;
            (writers, arg::out(plan, "plan")?)
        };
        let (tokens, ends) = (offer.prompt_tokens, offer.segment_ends.clone());
        let schema = Arc::clone(&offer.schema);
        let made = PlanObject::compile(schema, tokens, ends, writers_of(writers)?)?;
        out.set(kv_plan::create(made));
        Ok(())
    })
}

/// Ends the handle; NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_offer_release(offer: *mut kv_offer) -> kv_status {
    guard(|| kv_offer::release(offer))
}

impl OfferObject {
    /// Whether rows of a cache of this schema may go there, by this plan.
    pub(crate) fn check(&self, schema: &Arc<CacheSchema>, plan: &TransferPlan) -> Outcome<()> {
        let same = Arc::ptr_eq(schema, &self.schema);
        if !same && schema.fingerprint() != self.schema.fingerprint() {
            let message = "the offer was read with the schema of another cache";
            return Err(Failure::new(kv_status::Refused, message));
        }
        let is_of_plan =
            plan.prompt_tokens() == self.prompt_tokens && plan.segment_ends() == self.segment_ends;
        match is_of_plan {
            true => Ok(()),
            false => Err(Failure::argument("the plan is not that of the offer")),
        }
    }
}

/// The offer of an armed flight.
pub(crate) fn encode(cache: &CacheSide, flight: &InFlight) -> Outcome<Vec<u8>> {
    if !cache.is_armed() {
        return Err(Failure::state(
            "the flight is not armed: nobody may be told of it",
        ));
    }
    // Beside the incarnation of an agent stand the names that this agent gave.
    let pools = cache.pools.set.pool_ids_of(&cache.agent)?;
    let (schema, table) = (cache.pools.set.schema(), flight.block_table());
    let identity = Identity {
        incarnation: cache.agent.incarnation(),
        room: flight.room(),
        attempt: Attempt(0),
        epoch: flight.barrier().epoch(),
    };
    let hello = Message::Hello {
        fingerprint: schema.fingerprint(),
        fields: schema.fields(),
        writer: WriterRank(0),
        writer_count: 0,
        first_layer: 0,
        end_layer: schema.layer_count(),
    };
    let offer = Message::Offer {
        prompt_tokens: cache.plan.plan.prompt_tokens(),
        segment_ends: cache.plan.plan.segment_ends().to_vec(),
        pages: table.pages().to_vec(),
        windows: table.windows().to_vec(),
        request: table.request(),
    };
    let bytes = |message| Envelope { identity, message }.encode();
    let (hello, offer) = (bytes(hello), bytes(offer));
    let mut out = MAGIC.to_vec();
    out.extend(VERSION.to_le_bytes());
    out.extend((if cache.is_verified() { VERIFIED } else { 0 }).to_le_bytes());
    out.extend((pools.len() as u32).to_le_bytes());
    out.extend((hello.len() as u32).to_le_bytes());
    out.extend(pools.iter().flat_map(|pool| pool.0.to_le_bytes()));
    out.extend(hello);
    out.extend(offer);
    let crc = crc32c::crc32c(&out);
    out.extend(crc.to_le_bytes());
    Ok(out)
}

fn decode(schema: &Arc<CacheSchema>, bytes: &[u8]) -> Outcome<OfferObject> {
    let parts = split(bytes)?;
    let hello = message_of(parts.hello)?;
    let offer = message_of(parts.offer)?;
    if let Message::Hello { fields, .. } = &hello.message
        && let Some(difference) = schema.first_difference(fields)
    {
        let message = format!(
            "{} is {} here and {} at the receiver",
            difference.field, difference.ours, difference.theirs
        );
        return Err(Failure::new(kv_status::Refused, message));
    }
    match (hello.message, offer.message) {
        (
            Message::Hello { .. },
            Message::Offer {
                prompt_tokens,
                segment_ends,
                pages,
                windows,
                request,
            },
        ) => Ok(OfferObject {
            incarnation: offer.identity.incarnation,
            room: offer.identity.room,
            epoch: offer.identity.epoch,
            pools: parts.pools,
            table: BlockTable::new(schema, prompt_tokens, pages, windows, request),
            is_verified: parts.flags & VERIFIED != 0,
            prompt_tokens,
            segment_ends,
            schema: Arc::clone(schema),
        }),
        (hello, offer) => Err(no_offer(&format!("{} and {}", hello.name(), offer.name()))),
    }
}

struct Parts<'a> {
    flags: u16,
    pools: Vec<PoolId>,
    hello: &'a [u8],
    offer: &'a [u8],
}

fn split(bytes: &[u8]) -> Outcome<Parts<'_>> {
    let short = || no_offer(&format!("{} bytes", bytes.len()));
    if bytes.len() < HEAD_BYTES + CRC_BYTES || bytes[..4] != MAGIC {
        return Err(short());
    }
    let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
    let u32_at = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
    if u16_at(4) != VERSION {
        let message = format!(
            "an offer of version {}, this build reads {VERSION}",
            u16_at(4)
        );
        return Err(Failure::new(kv_status::Refused, message));
    }
    let end = bytes.len() - CRC_BYTES;
    let (found, expected) = (crc32c::crc32c(&bytes[..end]), u32_at(end));
    if found != expected {
        return Err(no_offer(&format!(
            "checksum {found:08x}, it says {expected:08x}"
        )));
    }
    let (pool_count, hello_bytes) = (u32_at(8) as usize, u32_at(12) as usize);
    let pools = HEAD_BYTES..pool_count.saturating_mul(4).saturating_add(HEAD_BYTES);
    let hello = pools.end..pools.end.saturating_add(hello_bytes);
    let (Some(pools), Some(hello), Some(offer)) = (
        bytes[..end].get(pools),
        bytes[..end].get(hello.clone()),
        bytes[..end].get(hello.end..),
    ) else {
        return Err(short());
    };
    let pool = |four: &[u8]| PoolId(u32::from_le_bytes(std::array::from_fn(|index| four[index])));
    Ok(Parts {
        flags: u16_at(6),
        pools: pools.chunks_exact(4).map(pool).collect(),
        hello,
        offer,
    })
}

fn message_of(bytes: &[u8]) -> Outcome<Envelope> {
    Envelope::decode(bytes).map_err(|error| no_offer(&error.to_string()))
}

fn no_offer(found: &str) -> Failure {
    Failure::argument(format!("not an offer: {found}"))
}
