//! CRC-32C, alone and in one pass with a copy.

use crc_fast::{CrcAlgorithm, Digest, checksum};

/// A copy goes in pieces of this length, so that the checksum finds its bytes in the cache.
pub const PIECE_BYTES: usize = 16 << 10;

/// CRC-32C of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// Copies `from` over `to` and answers the CRC-32C of what was copied, in one pass.
///
/// # Panics
/// If the lengths differ.
pub fn copy_crc32c(to: &mut [u8], from: &[u8]) -> u32 {
    assert_eq!(to.len(), from.len(), "a copy between two lengths");
    let mut crc = Crc32c::new();
    for (to, from) in to.chunks_mut(PIECE_BYTES).zip(from.chunks(PIECE_BYTES)) {
        to.copy_from_slice(from);
        crc.update(to);
    }
    crc.value()
}

/// A CRC-32C that grows.
#[derive(Clone, Debug)]
pub struct Crc32c(Digest);

impl Crc32c {
    /// Of no bytes.
    pub fn new() -> Crc32c {
        Crc32c(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    /// Appends bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of all bytes so far.
    pub fn value(&self) -> u32 {
        self.0.finalize() as u32
    }
}

impl Default for Crc32c {
    fn default() -> Crc32c {
        Crc32c::new()
    }
}

/// Position of the first byte that is not zero.
pub(crate) fn first_nonzero(bytes: &[u8]) -> Option<usize> {
    const LINE: usize = 512;
    // Whole lines first, without a branch for each byte: nearly always all of them are zero.
    let is_zero = |line: &[u8]| line.iter().fold(0, |all, byte| all | byte) == 0;
    let zeros = bytes.chunks(LINE).take_while(|line| is_zero(line)).count() * LINE;
    let rest = bytes.get(zeros..)?;
    Some(zeros + rest.iter().position(|byte| *byte != 0)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_byte_that_is_not_zero_is_found_everywhere() {
        assert_eq!(first_nonzero(&[]), None);
        for length in [1, 511, 512, 513, 1_600] {
            let mut bytes = vec![0; length];
            assert_eq!(first_nonzero(&bytes), None);
            for at in (0..length).rev() {
                bytes[at] = 1;
                assert_eq!(first_nonzero(&bytes), Some(at), "of {length}");
            }
        }
    }

    #[test]
    fn known_values_and_every_split() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
        let bytes: Vec<u8> = (0..3 * PIECE_BYTES + 77).map(|i| (i * 31) as u8).collect();
        let mut copy = vec![0; bytes.len()];
        assert_eq!(copy_crc32c(&mut copy, &bytes), crc32c(&bytes));
        assert_eq!(copy, bytes);
        for at in [0, 1, 63, 64, 4096, bytes.len()] {
            let mut crc = Crc32c::new();
            crc.update(&bytes[..at]);
            crc.update(&bytes[at..]);
            assert_eq!(crc.value(), crc32c(&bytes), "split at {at}");
        }
    }
}
