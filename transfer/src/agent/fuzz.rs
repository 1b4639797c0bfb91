//! What a fuzzer throws at the codec, and what has to hold for any bytes: reading never panics, and what is
//! read is written again as the same bytes. The targets are in `fuzz/`, the inputs that every test run
//! repeats in `tests/seeds/`.

use super::metadata::AgentMetadata;
use super::wire::*;

/// Reads `bytes` as one frame, as they are and with the frame around them made right. Answers whether one of
/// the two was a frame.
pub fn frame(bytes: &[u8]) -> bool {
    let is_frame = is_read_and_written_again(bytes);
    // A fuzzer does not find check sums.
    match bytes.len() < HEADER_BYTES + CRC_BYTES {
        true => is_frame,
        false => is_read_and_written_again(&resealed(bytes.to_vec())) || is_frame,
    }
}

fn is_read_and_written_again(bytes: &[u8]) -> bool {
    match decode(bytes) {
        Ok(frame) => {
            assert_eq!(encode(&frame), bytes, "{frame:?}");
            if let Frame::Metadata(blob) = &frame {
                metadata(blob);
            }
            true
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
    }
}

/// Reads `bytes` as the metadata of an agent. Answers whether they are.
pub fn metadata(bytes: &[u8]) -> bool {
    match AgentMetadata::decode(bytes.to_vec().into()) {
        Ok(metadata) => {
            assert_eq!(metadata.encode(), bytes, "{metadata:?}");
            let inside = |pool: &super::metadata::PoolInfo| {
                let end_bytes = pool.geometry.end_bytes();
                let region = metadata.region(pool.region);
                end_bytes
                    .zip(region)
                    .is_some_and(|(end, region)| end <= region.len_bytes)
            };
            assert!(metadata.pools.iter().all(inside), "{metadata:?}");
            true
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
    }
}

/// A frame as bytes.
pub(crate) fn encode(frame: &Frame) -> Vec<u8> {
    let mut out = Vec::new();
    match frame {
        Frame::Hello {
            nonce,
            has_auth_token,
        } => append_hello(&mut out, nonce, *has_auth_token),
        Frame::Proof { mac } => append_proof(&mut out, mac),
        Frame::Metadata(blob) => append_metadata(&mut out, blob),
        Frame::Memory {
            region,
            generation,
            mapped_bytes,
        } => append_memory(&mut out, *region, *generation, *mapped_bytes),
        Frame::Ready(session) => append_ready(&mut out, session.as_ref()),
        Frame::Refuse(refusal) => append_refuse(&mut out, refusal),
        Frame::Place {
            region,
            generation,
            address,
        } => append_place(&mut out, *region, *generation, *address),
        Frame::Probe { address, nonce } => append_probe(&mut out, *address, nonce),
        Frame::Ring { len_bytes } => append_ring(&mut out, *len_bytes),
        Frame::Write(head) => append_write(
            &mut out,
            head.number,
            head.is_last,
            head.payload_bytes,
            &head.runs,
            head.arrival.as_ref(),
        ),
        Frame::Ack { through, level } => append_ack(&mut out, *through, *level),
        Frame::Landed { number, slot_count } => append_landed(&mut out, *number, *slot_count),
        Frame::Nack { number, refusal } => append_nack(&mut out, *number, refusal),
        Frame::Arrival { level, arrival } => append_arrival(&mut out, *level, arrival),
        Frame::Message(message) => append_message(&mut out, message),
        Frame::Numbered { number, message } => append_numbered(&mut out, *number, message),
        Frame::Progress { counter } => append_progress(&mut out, *counter),
        Frame::Bye => append_bye(&mut out),
        Frame::Read(request) => {
            append_read(&mut out, request.id, request.payload_bytes, &request.runs);
        }
        Frame::Data {
            request,
            payload_bytes,
        } => append_data(&mut out, *request, *payload_bytes),
        Frame::NoData { request, refusal } => append_no_data(&mut out, *request, refusal),
    }
    out
}

/// The one frame in `bytes`.
pub(crate) fn decode(bytes: &[u8]) -> Result<Frame, WireError> {
    let (header_bytes, rest) = bytes
        .split_first_chunk::<HEADER_BYTES>()
        .ok_or(WireError::Truncated { field: "header" })?;
    let header = Header::parse(header_bytes)?;
    let (body, crc) = rest
        .split_last_chunk()
        .ok_or(WireError::Truncated { field: "body" })?;
    Frame::decode(header_bytes, header, body.to_vec().into(), *crc)
}

/// Magic, version, length and check sum made right, so that the fields behind them are reached.
pub(crate) fn resealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let end = bytes.len() - CRC_BYTES;
    let body_bytes = (end - HEADER_BYTES) as u32;
    bytes[..4].copy_from_slice(&MAGIC);
    bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
    bytes[8..12].copy_from_slice(&body_bytes.to_le_bytes());
    let crc = crc32c::crc32c(&bytes[..end]);
    bytes[end..].copy_from_slice(&crc.to_le_bytes());
    bytes
}
