//! A cursor over received bytes: every read is checked, no count is believed before it fits.

use bytes::Bytes;

use super::wire::WireError;

/// Cursor over a body whose check sum was right; hostile values are still possible.
pub(crate) struct Fields {
    bytes: Bytes,
}

impl Fields {
    pub(crate) fn new(bytes: Bytes) -> Self {
        Self { bytes }
    }

    /// Bytes that were not read.
    pub(crate) fn left_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// All that is left, without a copy.
    pub(crate) fn remaining(&mut self) -> Bytes {
        std::mem::take(&mut self.bytes)
    }

    /// The next `count` bytes, without a copy.
    pub(crate) fn take(&mut self, count: usize, field: &'static str) -> Result<Bytes, WireError> {
        if count > self.bytes.len() {
            return Err(WireError::Truncated { field });
        }
        Ok(self.bytes.split_to(count))
    }

    pub(crate) fn array<const N: usize>(
        &mut self,
        field: &'static str,
    ) -> Result<[u8; N], WireError> {
        let taken = self.take(N, field)?;
        taken[..]
            .try_into()
            .map_err(|_| WireError::Truncated { field })
    }

    pub(crate) fn u8(&mut self, field: &'static str) -> Result<u8, WireError> {
        Ok(u8::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u16(&mut self, field: &'static str) -> Result<u16, WireError> {
        Ok(u16::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u32(&mut self, field: &'static str) -> Result<u32, WireError> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u64(&mut self, field: &'static str) -> Result<u64, WireError> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn u128(&mut self, field: &'static str) -> Result<u128, WireError> {
        Ok(u128::from_le_bytes(self.array(field)?))
    }

    pub(crate) fn bool(&mut self, field: &'static str) -> Result<bool, WireError> {
        match self.u8(field)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(WireError::BadValue {
                field,
                value: u64::from(other),
            }),
        }
    }

    /// A count of elements of `element_bytes` bytes each: at most `limit`, and no more than the
    /// bytes that are really there, so that it may size an allocation.
    pub(crate) fn count(
        &mut self,
        limit: usize,
        element_bytes: usize,
        field: &'static str,
    ) -> Result<usize, WireError> {
        let count = self.u32(field)? as usize;
        if count > limit {
            return Err(WireError::BadValue {
                field,
                value: count as u64,
            });
        }
        if count.saturating_mul(element_bytes) > self.bytes.len() {
            return Err(WireError::Truncated { field });
        }
        Ok(count)
    }

    /// UTF-8 text of `count` bytes.
    pub(crate) fn text(&mut self, count: usize, field: &'static str) -> Result<String, WireError> {
        let bytes = self.take(count, field)?;
        String::from_utf8(bytes.to_vec()).map_err(|error| WireError::BadValue {
            field,
            value: error.utf8_error().valid_up_to() as u64,
        })
    }

    pub(crate) fn finish(&self) -> Result<(), WireError> {
        match self.bytes.len() {
            0 => Ok(()),
            extra_bytes => Err(WireError::Trailing { extra_bytes }),
        }
    }
}
