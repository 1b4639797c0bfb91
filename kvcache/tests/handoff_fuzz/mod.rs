//! What a fuzzer throws at the messages of the hand-off: reading never panics, and what is read is written
//! again as the same bytes. The target is in `fuzz/`, the inputs that every test run repeats in
//! `tests/seeds/handoff`.

use kvgate_kvcache::handoff::Envelope;

const HEAD_BYTES: usize = 48;
const CRC_BYTES: usize = 4;

/// Reads `bytes` as one message, as they are and with the frame around them made right. Answers whether one
/// of the two was a message.
pub(crate) fn message(bytes: &[u8]) -> bool {
    let is_message = is_read_and_written_again(bytes);
    // A fuzzer does not find check sums.
    match bytes.len() < HEAD_BYTES + CRC_BYTES {
        true => is_message,
        false => is_read_and_written_again(&resealed(bytes.to_vec())) || is_message,
    }
}

fn is_read_and_written_again(bytes: &[u8]) -> bool {
    match Envelope::decode(bytes) {
        Ok(envelope) => {
            assert_eq!(envelope.encode(), bytes, "{envelope:?}");
            true
        }
        Err(error) => {
            assert!(!error.to_string().is_empty());
            false
        }
    }
}

/// Magic, version, length and check sum made right, so that the fields behind them are reached.
fn resealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let end = bytes.len() - CRC_BYTES;
    let body_bytes = (end - HEAD_BYTES) as u32;
    bytes[..6].copy_from_slice(b"KVGH\x01\x00");
    bytes[8..12].copy_from_slice(&body_bytes.to_le_bytes());
    let crc = crc32c::crc32c(&bytes[..end]);
    bytes[end..].copy_from_slice(&crc.to_le_bytes());
    bytes
}
