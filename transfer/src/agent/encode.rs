//! Frames of a link as bytes; `wire.rs` has the layout and reads them.

use super::wire::{
    HEADER_BYTES, Kind, MAGIC, MESSAGE_LIMIT_BYTES, NOTE_LIMIT_BYTES, REASON_LIMIT_BYTES,
    RUN_BYTES, Refusal, SessionWords, TICKET_LIMIT, VERSION,
};
use crate::Arrival;
use crate::backend::RemoteRun;
use crate::error::{Error, ErrorKind};
use crate::ids::RegionId;
use crate::visibility::Visibility;

/// Whether an arrival fits a frame of this protocol.
pub(crate) fn check_arrival(arrival: &Arrival) -> Result<(), Error> {
    let (what, bytes, limit_bytes) = if arrival.note.len() > NOTE_LIMIT_BYTES {
        ("note of an arrival", arrival.note.len(), NOTE_LIMIT_BYTES)
    } else if arrival.tickets.len() > TICKET_LIMIT {
        (
            "ticket list of an arrival",
            4 * arrival.tickets.len(),
            4 * TICKET_LIMIT,
        )
    } else {
        return Ok(());
    };
    Err(too_long(what, bytes, limit_bytes))
}

/// Whether a message fits a frame of this protocol.
pub(crate) fn check_message(message: &[u8]) -> Result<(), Error> {
    if message.len() > MESSAGE_LIMIT_BYTES {
        return Err(too_long("message", message.len(), MESSAGE_LIMIT_BYTES));
    }
    Ok(())
}

fn too_long(what: &'static str, bytes: usize, limit_bytes: usize) -> Error {
    ErrorKind::TooLong {
        what,
        bytes: bytes as u64,
        limit_bytes: limit_bytes as u64,
    }
    .into()
}

/// Appends one frame to `out`; `body` appends the body.
fn append(out: &mut Vec<u8>, kind: Kind, body: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&(kind as u16).to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    let body_start = out.len();
    body(out);
    // The limits of the kinds are far below u32::MAX; a longer body is refused by every receiver.
    let body_bytes = u32::try_from(out.len() - body_start).unwrap_or(u32::MAX);
    out[body_start - 4..body_start].copy_from_slice(&body_bytes.to_le_bytes());
    let crc = crc32c::crc32c(&out[start..]);
    out.extend_from_slice(&crc.to_le_bytes());
}

pub(crate) fn append_hello(out: &mut Vec<u8>, nonce: &[u8; 32], has_auth_token: bool) {
    append(out, Kind::Hello, |out| {
        out.extend_from_slice(nonce);
        out.push(u8::from(has_auth_token));
    });
}

pub(crate) fn append_proof(out: &mut Vec<u8>, mac: &[u8; 32]) {
    append(out, Kind::Proof, |out| out.extend_from_slice(mac));
}

pub(crate) fn append_metadata(out: &mut Vec<u8>, metadata: &[u8]) {
    append(out, Kind::Metadata, |out| out.extend_from_slice(metadata));
}

pub(crate) fn append_memory(
    out: &mut Vec<u8>,
    region: RegionId,
    generation: u32,
    mapped_bytes: u64,
) {
    append(out, Kind::Memory, |out| {
        out.extend_from_slice(&region.0.to_le_bytes());
        out.extend_from_slice(&generation.to_le_bytes());
        out.extend_from_slice(&mapped_bytes.to_le_bytes());
    });
}

pub(crate) fn append_place(out: &mut Vec<u8>, region: RegionId, generation: u32, address: u64) {
    append(out, Kind::Place, |out| {
        out.extend_from_slice(&region.0.to_le_bytes());
        out.extend_from_slice(&generation.to_le_bytes());
        out.extend_from_slice(&address.to_le_bytes());
    });
}

pub(crate) fn append_probe(out: &mut Vec<u8>, address: u64, nonce: &[u8; 32]) {
    append(out, Kind::Probe, |out| {
        out.extend_from_slice(&address.to_le_bytes());
        out.extend_from_slice(nonce);
    });
}

pub(crate) fn append_ring(out: &mut Vec<u8>, len_bytes: u64) {
    append(out, Kind::Ring, |out| {
        out.extend_from_slice(&len_bytes.to_le_bytes());
    });
}

pub(crate) fn append_ready(out: &mut Vec<u8>, session: Option<&SessionWords>) {
    append(out, Kind::Ready, |out| {
        let Some(words) = session else { return };
        out.push(u8::from(words.is_resumed));
        out.extend_from_slice(&words.session.to_le_bytes());
        out.extend_from_slice(&words.received.to_le_bytes());
        out.extend_from_slice(&words.window_ms.to_le_bytes());
        out.extend_from_slice(&words.every_items.to_le_bytes());
        out.extend_from_slice(&words.every_bytes.to_le_bytes());
        out.extend_from_slice(&words.most_items.to_le_bytes());
    });
}

pub(crate) fn append_refuse(out: &mut Vec<u8>, refusal: &Refusal) {
    append(out, Kind::Refuse, |out| put_refusal(out, refusal));
}

/// A write frame; `payload_bytes` of payload must follow on the socket.
pub(crate) fn append_write(
    out: &mut Vec<u8>,
    number: u64,
    is_last: bool,
    payload_bytes: u64,
    runs: &[RemoteRun],
    arrival: Option<&Arrival>,
) {
    out.reserve(HEADER_BYTES + 64 + runs.len() * RUN_BYTES);
    append(out, Kind::Write, |out| {
        out.extend_from_slice(&number.to_le_bytes());
        out.push(u8::from(is_last));
        out.push(u8::from(arrival.is_some()));
        out.extend_from_slice(&payload_bytes.to_le_bytes());
        put_runs(out, runs);
        if let Some(arrival) = arrival {
            put_arrival(out, arrival);
        }
    });
}

pub(crate) fn append_ack(out: &mut Vec<u8>, through: u64, level: Visibility) {
    append(out, Kind::Ack, |out| {
        out.extend_from_slice(&through.to_le_bytes());
        out.push(level_code(level));
    });
}

/// The first `slot_count` slots of a write have landed; more of it is to come.
pub(crate) fn append_landed(out: &mut Vec<u8>, number: u64, slot_count: u64) {
    append(out, Kind::Landed, |out| {
        out.extend_from_slice(&number.to_le_bytes());
        out.extend_from_slice(&slot_count.to_le_bytes());
    });
}

pub(crate) fn append_nack(out: &mut Vec<u8>, number: u64, refusal: &Refusal) {
    append(out, Kind::Nack, |out| {
        out.extend_from_slice(&number.to_le_bytes());
        put_refusal(out, refusal);
    });
}

/// A request for the bytes of `runs`, in their order.
pub(crate) fn append_read(out: &mut Vec<u8>, id: u64, payload_bytes: u64, runs: &[RemoteRun]) {
    out.reserve(HEADER_BYTES + 64 + runs.len() * RUN_BYTES);
    append(out, Kind::Read, |out| {
        out.extend_from_slice(&id.to_le_bytes());
        out.extend_from_slice(&payload_bytes.to_le_bytes());
        put_runs(out, runs);
    });
}

/// The answer to a request; `payload_bytes` of payload must follow on the socket.
pub(crate) fn append_data(out: &mut Vec<u8>, request: u64, payload_bytes: u64) {
    append(out, Kind::Data, |out| {
        out.extend_from_slice(&request.to_le_bytes());
        out.extend_from_slice(&payload_bytes.to_le_bytes());
    });
}

pub(crate) fn append_no_data(out: &mut Vec<u8>, request: u64, refusal: &Refusal) {
    append(out, Kind::NoData, |out| {
        out.extend_from_slice(&request.to_le_bytes());
        put_refusal(out, refusal);
    });
}

pub(crate) fn append_arrival(out: &mut Vec<u8>, level: Visibility, arrival: &Arrival) {
    append(out, Kind::Arrival, |out| {
        out.push(level_code(level));
        put_arrival(out, arrival);
    });
}

pub(crate) fn append_message(out: &mut Vec<u8>, message: &[u8]) {
    append(out, Kind::Message, |out| out.extend_from_slice(message));
}

/// A message that is item `number` of a session.
pub(crate) fn append_numbered(out: &mut Vec<u8>, number: u64, message: &[u8]) {
    append(out, Kind::Numbered, |out| {
        out.extend_from_slice(&number.to_le_bytes());
        out.extend_from_slice(message);
    });
}

pub(crate) fn append_progress(out: &mut Vec<u8>, counter: u64) {
    append(out, Kind::Progress, |out| {
        out.extend_from_slice(&counter.to_le_bytes());
    });
}

pub(crate) fn append_bye(out: &mut Vec<u8>) {
    append(out, Kind::Bye, |_| {});
}

fn put_count(out: &mut Vec<u8>, count: usize) {
    out.extend_from_slice(&u32::try_from(count).unwrap_or(u32::MAX).to_le_bytes());
}

fn put_runs(out: &mut Vec<u8>, runs: &[RemoteRun]) {
    put_count(out, runs.len());
    for run in runs {
        out.extend_from_slice(&run.pool.0.to_le_bytes());
        out.extend_from_slice(&run.generation.to_le_bytes());
        out.extend_from_slice(&run.slot.to_le_bytes());
        out.extend_from_slice(&run.slot_count.to_le_bytes());
    }
}

fn put_arrival(out: &mut Vec<u8>, arrival: &Arrival) {
    out.extend_from_slice(&arrival.epoch.0.to_le_bytes());
    put_count(out, arrival.tickets.len());
    for (stage, chunk) in &arrival.tickets {
        out.extend_from_slice(&stage.0.to_le_bytes());
        out.extend_from_slice(&chunk.0.to_le_bytes());
    }
    put_count(out, arrival.note.len());
    out.extend_from_slice(&arrival.note);
}

fn put_refusal(out: &mut Vec<u8>, refusal: &Refusal) {
    out.extend_from_slice(&refusal.code.to_le_bytes());
    let mut end = refusal.reason.len().min(REASON_LIMIT_BYTES);
    while !refusal.reason.is_char_boundary(end) {
        end -= 1;
    }
    out.extend_from_slice(&refusal.reason.as_bytes()[..end]);
}

fn level_code(level: Visibility) -> u8 {
    match level {
        Visibility::LocalDone => 0,
        Visibility::RemoteDelivered => 1,
        Visibility::RemoteVisible => 2,
    }
}
