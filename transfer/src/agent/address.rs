//! [`Address`]: where an agent listens.

use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

use crate::error::{Error, ErrorKind};

/// Longest name of an abstract Unix socket.
const SHM_NAME_LIMIT_BYTES: usize = 100;

/// Where an agent listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Address {
    /// A TCP socket. Port 0 lets the system choose.
    Tcp(SocketAddr),
    /// The name of an abstract Unix socket: same host, same network namespace, no file.
    Shm(String),
}

impl Address {
    /// `HOST:PORT` with a host name, an IPv4 or a bracketed IPv6 address. Asks the system's resolver,
    /// so it may block; every address that the name has comes back, in the resolver's order.
    ///
    /// # Errors
    /// [`ErrorKind::Unreachable`] with the text when it has no port or no address.
    pub fn resolve_tcp(host_and_port: &str) -> Result<Vec<Self>, Error> {
        let unreachable = |reason: String| ErrorKind::Unreachable {
            address: host_and_port.to_string(),
            reason,
        };
        let found = host_and_port.to_socket_addrs();
        let found: Vec<Self> = found
            .map_err(|error| unreachable(error.to_string()))?
            .map(Self::Tcp)
            .collect();
        if found.is_empty() {
            return Err(unreachable("the name has no address".into()).into());
        }
        Ok(found)
    }

    /// Whether only processes of this host can reach it.
    pub fn is_local(&self) -> bool {
        match self {
            Self::Shm(_) => true,
            Self::Tcp(address) => match address.ip() {
                IpAddr::V4(ip) => ip.is_loopback(),
                IpAddr::V6(ip) => ip.to_canonical().is_loopback(),
            },
        }
    }

    /// Checks the name of a Unix socket.
    pub(crate) fn check(&self) -> Result<(), Error> {
        match self {
            Self::Shm(name)
                if name.is_empty() || name.len() > SHM_NAME_LIMIT_BYTES || name.contains('\0') =>
            {
                Err(ErrorKind::InvalidArgument {
                    what: "name of a shm address",
                    value: format!("{name:?}"),
                }
                .into())
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "tcp:{address}"),
            Self::Shm(name) => write!(f, "shm:{name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_both_families_are_resolved() {
        assert_eq!(
            Address::resolve_tcp("127.0.0.1:80").unwrap(),
            [Address::Tcp(([127, 0, 0, 1], 80).into())]
        );
        let v6 = Address::resolve_tcp("[::1]:80").unwrap();
        assert!(v6[0].is_local());
        assert_eq!(v6[0].to_string(), "tcp:[::1]:80");
        assert!(
            Address::resolve_tcp("localhost:80")
                .unwrap()
                .iter()
                .all(Address::is_local)
        );
        for wrong in ["localhost", "localhost:x", "127.0.0.1:70000", ""] {
            let error = Address::resolve_tcp(wrong).unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::Unreachable { address, .. } if address == wrong)
            );
        }
    }

    #[test]
    fn only_loopback_is_local() {
        let is_local = |text: &str| Address::Tcp(text.parse().unwrap()).is_local();
        assert!(is_local("127.8.9.1:1"));
        assert!(is_local("[::ffff:127.0.0.1]:1"));
        assert!(!is_local("0.0.0.0:1"));
        assert!(!is_local("[::]:1"));
        assert!(!is_local("10.0.0.1:1"));
    }

    #[test]
    fn shm_names_are_checked() {
        assert!(Address::Shm("x".into()).check().is_ok());
        for wrong in [String::new(), "a\0b".into(), "x".repeat(101)] {
            assert!(Address::Shm(wrong).check().is_err());
        }
    }
}
