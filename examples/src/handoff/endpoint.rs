//! Addresses as people write them, and as a launcher passes them on.
//!
//! Two hosts speak TCP, which `ucx` and `libfabric` begin with, too. `--transport shm` and `cma` work between two
//! processes of one host only; there the port is still taken as a TCP port, so that it is free, unique and
//! printable, and the sides meet at an abstract socket whose name is made of it. `auto` listens at such names
//! beside its port, and tries them first when the port is on this host.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::path::Path;

use kvgate_transfer::Address;

use super::failure::{Failure, FailureKind};
use super::options::Transport;

/// Where a decode side listens, before it does.
#[derive(Debug)]
pub struct Listening {
    /// For the agent.
    pub address: Address,
    /// Keeps the port while the sides meet at an abstract socket.
    pub reservation: Option<TcpListener>,
}

/// Where a prefill side finds its peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// The addresses of a name, to be tried in this order.
    Agent(Vec<Address>),
    /// In this very process, under this name.
    InProcess(String),
}

/// What a decode side under the same launcher printed.
pub fn private_target(transport: Transport, text: &str) -> Result<Target, Failure> {
    Ok(match transport {
        Transport::Local => Target::InProcess(text.to_owned()),
        Transport::Shm | Transport::Cma => Target::Agent(vec![named(transport, text.to_owned())]),
        Transport::Auto => Target::Agent(nearest_first(&resolve("connect", text)?)),
        Transport::Tcp | Transport::Ucx | Transport::Libfabric => {
            Target::Agent(sockets(transport, resolve("connect", text)?))
        }
    })
}

/// The place for a run of one launcher: a free loopback port, or a name that nobody else has.
#[must_use]
pub fn private(transport: Transport) -> Listening {
    let address = match transport {
        Transport::Tcp | Transport::Ucx | Transport::Libfabric | Transport::Auto => {
            socket(transport, SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
        }
        Transport::Shm | Transport::Cma | Transport::Local => named(transport, private_name()),
    };
    Listening {
        address,
        reservation: None,
    }
}

/// A name that no other process guesses by accident: the process, and the time since boot.
fn private_name() -> String {
    let draw = super::prompt::mix(u64::from(std::process::id()), super::timeline::now_us(), 0);
    format!("kvgate-pd-handoff-{}-{draw:016x}", std::process::id())
}

/// Parses `HOST:PORT` for a side that listens. An address that others can reach needs a token.
pub fn listen(text: &str, transport: Transport, has_token: bool) -> Result<Listening, Failure> {
    let address = *resolve("listen", text)?
        .first()
        .ok_or_else(|| Failure::input("listen", text, EXPECTED))?;
    if !address.ip().is_loopback() && !has_token {
        return Err(Failure::input(
            "listen",
            text,
            "a loopback address, or --auth-token-file on both sides",
        ));
    }
    match transport {
        Transport::Tcp | Transport::Ucx | Transport::Libfabric | Transport::Auto => Ok(Listening {
            address: socket(transport, address),
            reservation: None,
        }),
        Transport::Shm | Transport::Cma => {
            refuse_other_host("listen", text, address.ip(), transport)?;
            let reservation = TcpListener::bind(address).map_err(|error| in_use(text, &error))?;
            let port = reservation
                .local_addr()
                .map_err(|error| in_use(text, &error))?
                .port();
            Ok(Listening {
                address: named(transport, meeting_name(port)),
                reservation: Some(reservation),
            })
        }
        Transport::Local => Err(Failure::input(
            "transport",
            "local",
            "shm, cma, tcp, ucx, libfabric or auto for a side on its own",
        )),
    }
}

/// Parses `HOST:PORT` for a side that connects.
pub fn connect(text: &str, transport: Transport, has_token: bool) -> Result<Target, Failure> {
    let found = resolve("connect", text)?;
    let is_loopback = found.iter().all(|address| address.ip().is_loopback());
    match transport {
        Transport::Tcp | Transport::Ucx | Transport::Libfabric | Transport::Auto
            if !is_loopback && !has_token =>
        {
            Err(Failure::input(
                "connect",
                text,
                "a loopback address, or --auth-token-file on both sides",
            ))
        }
        Transport::Auto => Ok(Target::Agent(nearest_first(&found))),
        Transport::Tcp | Transport::Ucx | Transport::Libfabric => {
            Ok(Target::Agent(sockets(transport, found)))
        }
        Transport::Shm | Transport::Cma => {
            for address in &found {
                refuse_other_host("connect", text, address.ip(), transport)?;
            }
            let ports = found
                .iter()
                .map(|address| named(transport, meeting_name(address.port())));
            Ok(Target::Agent(ports.take(1).collect()))
        }
        Transport::Local => Err(Failure::input(
            "transport",
            "local",
            "shm, cma, tcp, ucx, libfabric or auto for a side on its own",
        )),
    }
}

/// An address that begins as a TCP connection.
fn socket(transport: Transport, address: SocketAddr) -> Address {
    match transport {
        Transport::Ucx => Address::Ucx(address),
        Transport::Libfabric => Address::Libfabric(address),
        _ => Address::Tcp(address),
    }
}

fn sockets(transport: Transport, found: Vec<SocketAddr>) -> Vec<Address> {
    let one = |address| socket(transport, address);
    found.into_iter().map(one).collect()
}

/// An address on this host.
fn named(transport: Transport, name: String) -> Address {
    match transport {
        Transport::Cma => Address::Cma(name),
        _ => Address::Shm(name),
    }
}

/// Where a side that listens at `bound` with `auto` listens, too: what needs fewer copies, the best first.
#[must_use]
pub fn nearer(bound: &Address) -> Vec<Address> {
    let Address::Tcp(address) = bound else {
        return Vec::new();
    };
    let name = meeting_name(address.port());
    vec![
        Address::Shm(format!("{name}-auto-shm")),
        Address::Cma(format!("{name}-auto-cma")),
    ]
}

/// The ways to a side that listens with `auto`. A name of this host says nothing of another one.
fn nearest_first(found: &[SocketAddr]) -> Vec<Address> {
    let here = found.iter().filter(|address| address.ip().is_loopback());
    here.flat_map(|address| nearer(&Address::Tcp(*address)))
        .chain(sockets(Transport::Auto, found.to_vec()))
        .collect()
}

fn meeting_name(port: u16) -> String {
    format!("kvgate-pd-handoff-port-{port}")
}

fn refuse_other_host(
    field: &str,
    text: &str,
    ip: IpAddr,
    transport: Transport,
) -> Result<(), Failure> {
    if ip.is_loopback() {
        return Ok(());
    }
    let id = transport.id();
    let expected = format!("a loopback address: --transport {id} reaches only this host");
    Err(Failure::input(field, text, &expected))
}

const EXPECTED: &str = "HOST:PORT with a host name, an IPv4 address or a bracketed IPv6 address";

fn resolve(field: &str, text: &str) -> Result<Vec<SocketAddr>, Failure> {
    let refuse = |what: String| {
        Failure::new(
            FailureKind::BadInput,
            format!("--{field} {text}: {what}, expected {EXPECTED}"),
        )
        .with_field(field, text)
    };
    let found: Vec<SocketAddr> = text
        .to_socket_addrs()
        .map_err(|error| refuse(error.to_string()))?
        .collect();
    if found.is_empty() {
        Err(refuse("the name has no address".to_owned()))
    } else {
        Ok(found)
    }
}

/// A port that cannot be bound.
#[must_use]
pub fn in_use(text: &str, error: &dyn std::fmt::Display) -> Failure {
    Failure::new(
        FailureKind::BadInput,
        format!("cannot listen on {text}: {error}"),
    )
    .with_field("listen", text)
}

/// What a side prints and passes on.
#[must_use]
pub fn to_text(listening: &Listening, bound: &Address) -> String {
    let reserved = listening
        .reservation
        .as_ref()
        .and_then(|socket| socket.local_addr().ok());
    match (reserved, bound) {
        (Some(address), _) => address.to_string(),
        (None, Address::Tcp(address) | Address::Ucx(address) | Address::Libfabric(address)) => {
            address.to_string()
        }
        (None, Address::Shm(name) | Address::Cma(name)) => name.clone(),
        (None, other) => format!("{other:?}"),
    }
}

/// Reads a token file; the newline at its end is not part of the token.
pub fn read_token(path: &Path) -> Result<Vec<u8>, Failure> {
    let refuse = |what: String| {
        Failure::new(
            FailureKind::BadInput,
            format!("--auth-token-file {}: {what}", path.display()),
        )
        .with_field("auth_token_file", path.display())
    };
    let bytes = std::fs::read(path).map_err(|error| refuse(error.to_string()))?;
    let token = bytes.trim_ascii();
    if token.is_empty() {
        return Err(refuse("empty, expected a token".to_owned()));
    }
    Ok(token.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_hosts_need_a_token_and_shm_never_reaches_them() {
        assert!(listen("0.0.0.0:0", Transport::Tcp, false).is_err());
        assert!(listen("0.0.0.0:0", Transport::Tcp, true).is_ok());
        assert!(listen("0.0.0.0:0", Transport::Shm, true).is_err());
        assert!(connect("192.0.2.1:7000", Transport::Shm, true).is_err());
        let refused = connect("192.0.2.1:7000", Transport::Cma, true).unwrap_err();
        assert!(
            format!("{refused:?}").contains("--transport cma"),
            "{refused:?}"
        );
        assert!(connect("192.0.2.1:7000", Transport::Tcp, false).is_err());
        assert!(connect("[::1]:7000", Transport::Tcp, false).is_ok());
        assert!(connect("192.0.2.1:7000", Transport::Ucx, false).is_err());
        let found = connect("127.0.0.1:7000", Transport::Libfabric, false).unwrap();
        let expected = Address::Libfabric(([127, 0, 0, 1], 7000).into());
        assert_eq!(found, Target::Agent(vec![expected]));
        assert!(connect("localhost:7000", Transport::Shm, false).is_ok());
        for text in ["", "localhost", "127.0.0.1:99999", "[::1:7000"] {
            assert!(connect(text, Transport::Tcp, false).is_err(), "{text}");
            assert!(connect(text, Transport::Auto, false).is_err(), "{text}");
        }
    }

    #[test]
    fn auto_tries_the_nearest_way_first_and_names_of_this_host_only_here() {
        let tcp = |text: &str| Address::Tcp(text.parse().unwrap());
        let here = tcp("127.0.0.1:7000");
        let mut ways = nearer(&here);
        assert!(matches!(ways[..], [Address::Shm(_), Address::Cma(_)]));
        ways.push(here);
        let found = connect("127.0.0.1:7000", Transport::Auto, false).unwrap();
        assert_eq!(found, Target::Agent(ways));
        let far = connect("192.0.2.1:7000", Transport::Auto, true).unwrap();
        assert_eq!(far, Target::Agent(vec![tcp("192.0.2.1:7000")]));
        assert!(connect("192.0.2.1:7000", Transport::Auto, false).is_err());
    }

    #[test]
    fn a_port_that_is_taken_is_named() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let text = taken.local_addr().unwrap().to_string();
        let failure = listen(&text, Transport::Shm, false).unwrap_err();
        assert_eq!(
            (failure.exit_code(), failure.value.as_deref()),
            (2, Some(text.as_str()))
        );
    }
}
