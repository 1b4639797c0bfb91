//! [`Address`]: where an agent listens.

use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

use crate::backend::BackendKind;
use crate::error::{Error, ErrorKind};

/// Longest name of an abstract Unix socket.
const NAME_LIMIT_BYTES: usize = 100;

/// Where an agent listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Address {
    /// A TCP socket. Port 0 lets the system choose.
    Tcp(SocketAddr),
    /// The name of an abstract Unix socket: same host, same network namespace, no file. Both sides map
    /// the other's memory, which has to be [`crate::Memory::shared`].
    Shm(String),
    /// The same, for memory of any kind: the kernel copies between the processes (`process_vm_writev`,
    /// `process_vm_readv`). Where it does not let them, the connection is refused with the reason
    /// ([`ErrorKind::ProbeFailed`]).
    ///
    /// Under the Yama setting `ptrace_scope` 1 each side allows the other's process to do this, by
    /// `PR_SET_PTRACER`; a process that has several such peers has to allow it to every process of its user.
    Cma(String),
    /// A TCP socket for everything but the payload, which UCX moves. Needs the feature `ucx` and the
    /// library ([`crate::ErrorKind::BackendUnavailable`]).
    ///
    /// UCX neither authenticates nor encrypts: whoever reaches its ports and guesses a key writes memory.
    /// On a loopback address it listens on the loopback interface only, otherwise on all of them.
    Ucx(SocketAddr),
    /// A TCP socket for everything but the payload, which libfabric moves. Needs the feature `libfabric`
    /// and the library ([`crate::ErrorKind::BackendUnavailable`]). As to safety, see [`Address::Ucx`].
    Libfabric(SocketAddr),
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

    /// An address with the name of its backend before it, as [`fmt::Display`] writes it: `tcp:HOST:PORT`,
    /// `ucx:HOST:PORT`, `libfabric:HOST:PORT`, `shm:NAME`, `cma:NAME`. Blocks as [`Address::resolve_tcp`].
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for another name, otherwise as [`Address::resolve_tcp`].
    pub fn resolve(text: &str) -> Result<Vec<Self>, Error> {
        let invalid = || ErrorKind::InvalidArgument {
            what: "address",
            value: text.to_owned(),
        };
        let (backend, rest) = text.split_once(':').ok_or_else(invalid)?;
        let any = SocketAddr::from(([0, 0, 0, 0], 0));
        let kind = match backend {
            "shm" => return Ok(vec![Self::Shm(rest.to_owned())]),
            "cma" => return Ok(vec![Self::Cma(rest.to_owned())]),
            "tcp" => Self::Tcp(any),
            "ucx" => Self::Ucx(any),
            "libfabric" => Self::Libfabric(any),
            _ => return Err(invalid().into()),
        };
        let found = Self::resolve_tcp(rest)?.into_iter();
        Ok(found
            .map(|one| match one {
                Self::Tcp(socket) => kind.at(socket),
                other => other,
            })
            .collect())
    }

    /// An address as [`fmt::Display`] writes it, with a number for the host: no resolver is asked.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (backend, rest) = text.split_once(':')?;
        let address = match backend {
            "shm" => Self::Shm(rest.to_owned()),
            "cma" => Self::Cma(rest.to_owned()),
            "tcp" => Self::Tcp(rest.parse().ok()?),
            "ucx" => Self::Ucx(rest.parse().ok()?),
            "libfabric" => Self::Libfabric(rest.parse().ok()?),
            _ => return None,
        };
        address.check().ok()?;
        Some(address)
    }

    /// Host and port, where it has them.
    pub(crate) fn socket(&self) -> Option<SocketAddr> {
        match self {
            Self::Shm(_) | Self::Cma(_) => None,
            Self::Tcp(socket) | Self::Ucx(socket) | Self::Libfabric(socket) => Some(*socket),
        }
    }

    /// Whether only processes of this host can reach it.
    pub fn is_local(&self) -> bool {
        match self.socket().map(|socket| socket.ip()) {
            None => true,
            Some(IpAddr::V4(ip)) => ip.is_loopback(),
            Some(IpAddr::V6(ip)) => ip.to_canonical().is_loopback(),
        }
    }

    /// The same way of transfer at another place.
    pub(crate) fn at(&self, socket: SocketAddr) -> Self {
        match self {
            Self::Shm(name) => Self::Shm(name.clone()),
            Self::Cma(name) => Self::Cma(name.clone()),
            Self::Tcp(_) => Self::Tcp(socket),
            Self::Ucx(_) => Self::Ucx(socket),
            Self::Libfabric(_) => Self::Libfabric(socket),
        }
    }

    /// The backend that carries the payload.
    pub(crate) fn backend(&self) -> BackendKind {
        match self {
            Self::Shm(_) => BackendKind::Shm,
            Self::Cma(_) => BackendKind::Cma,
            Self::Tcp(_) => BackendKind::Tcp,
            Self::Ucx(_) => BackendKind::Ucx,
            Self::Libfabric(_) => BackendKind::Libfabric,
        }
    }

    /// Checks the name of a Unix socket.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let (what, name) = match self {
            Self::Tcp(_) | Self::Ucx(_) | Self::Libfabric(_) => return Ok(()),
            Self::Shm(name) => ("name of a shm address", name),
            Self::Cma(name) => ("name of a cma address", name),
        };
        if name.is_empty() || name.len() > NAME_LIMIT_BYTES || name.contains('\0') {
            let value = format!("{name:?}");
            return Err(ErrorKind::InvalidArgument { what, value }.into());
        }
        Ok(())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "tcp:{address}"),
            Self::Shm(name) => write!(f, "shm:{name}"),
            Self::Cma(name) => write!(f, "cma:{name}"),
            Self::Ucx(address) => write!(f, "ucx:{address}"),
            Self::Libfabric(address) => write!(f, "libfabric:{address}"),
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
    fn a_written_address_comes_back() {
        for text in [
            "tcp:127.0.0.1:1",
            "ucx:127.0.0.1:2",
            "libfabric:[::1]:3",
            "shm:a:b",
            "cma:a:b",
        ] {
            let found = Address::resolve(text).unwrap();
            assert_eq!(found[0].to_string(), text);
            assert_eq!(Address::parse(text).as_ref(), found.first());
            assert!(found[0].is_local());
        }
        for wrong in ["", "tcp", "rdma:127.0.0.1:1", "127.0.0.1:80"] {
            let error = Address::resolve(wrong).unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::InvalidArgument { value, .. } if value == wrong)
            );
        }
        assert!(Address::resolve("ucx:127.0.0.1").is_err());
        for wrong in [
            "tcp:localhost:1",
            "tcp:1.2.3.4",
            "shm:",
            "1.2.3.4:1",
            "gpu:0",
        ] {
            assert_eq!(Address::parse(wrong), None, "{wrong}");
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
        assert!(Address::Cma("x".into()).check().is_ok());
        for wrong in [String::new(), "a\0b".into(), "x".repeat(101)] {
            assert!(Address::Shm(wrong.clone()).check().is_err());
            let refused = Address::Cma(wrong).check().unwrap_err();
            assert!(refused.to_string().contains("cma"), "{refused}");
        }
    }
}
