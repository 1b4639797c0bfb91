//! Which host a process runs on, as far as its memory and its sockets reach.

use std::fmt;
use std::os::unix::fs::MetadataExt;

use sha2::{Digest, Sha256};

/// A running kernel together with a network namespace. Two processes with the same one reach each other by
/// abstract Unix sockets, and so each other's memory.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub [u8; 16]);

impl HostId {
    /// The host of this process; `None` where the kernel does not tell. Such a host is like no other, not
    /// even like itself.
    pub fn here() -> Option<Self> {
        let boot = std::fs::read("/proc/sys/kernel/random/boot_id").ok()?;
        let namespace = std::fs::metadata("/proc/self/ns/net").ok()?;
        let mut digest = Sha256::new();
        digest.update(boot.trim_ascii());
        digest.update(namespace.dev().to_le_bytes());
        digest.update(namespace.ino().to_le_bytes());
        digest.finalize().first_chunk().copied().map(Self)
    }

    /// What [`fmt::Display`] has written.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let number = parse_hex(text)?;
        Some(Self(number.to_be_bytes()))
    }
}

/// 32 hexadecimal digits.
pub(crate) fn parse_hex(text: &str) -> Option<u128> {
    let is_hex = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hex.then(|| u128::from_str_radix(text, 16).ok())?
}

impl fmt::Display for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "host {self}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_of_a_process_stays_and_comes_back_from_its_text() {
        let here = HostId::here().unwrap();
        assert_eq!(HostId::here(), Some(here));
        assert_eq!(HostId::parse(&here.to_string()), Some(here));
        for wrong in [
            "",
            "0",
            &here.to_string()[1..],
            &format!("+{}", &here.to_string()[1..]),
        ] {
            assert_eq!(HostId::parse(wrong), None, "{wrong}");
        }
    }
}
