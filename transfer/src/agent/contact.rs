//! [`Contact`]: who an agent is and where it can be reached; and the choice of the way there.
//!
//! The order of the ways, from the fewest copies on: the same process; the same host by mapped memory, then
//! by copies of the kernel; the network, in the order in which the other side lists its addresses. A way
//! that was asked for by name is the only one tried.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use super::Agent;
use super::address::Address;
use super::host::{HostId, parse_hex};
use super::{links, metadata};
use crate::backend::{self, BackendKind};
use crate::deadline::Deadline;
use crate::engine::Engine;
use crate::error::{Error, ErrorKind};
use crate::ids::{Incarnation, PeerId};
use crate::mem::{Memory, MemoryKind};
use crate::sync::{Arc, Mutex, Weak};

/// First word of a written contact; another version has another one.
const MAGIC: &str = "kvgate-contact/1";
/// Most addresses of a contact that is read.
const ADDRESS_LIMIT: usize = 64;

/// The engines that have given out a contact, for those who meet it in the same process.
static HERE: Mutex<BTreeMap<Incarnation, Weak<Engine>>> = Mutex::new(BTreeMap::new());

/// What has to be known of an agent to connect to it. Plain data: give it to the other side by whatever way
/// the application has, as [`fmt::Display`] writes it, or let a directory do that (feature `etcd`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Contact {
    /// The name it was built with.
    pub name: String,
    /// Which life of it. A connection to another one is refused.
    pub incarnation: Incarnation,
    /// Where it runs, if that is known.
    pub host: Option<HostId>,
    /// Where it listens, those it prefers first.
    pub addresses: Vec<Address>,
}

/// Which way to take to a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PathChoice {
    /// The best one that works.
    #[default]
    Auto,
    /// This one or none.
    Only(BackendKind),
}

impl Contact {
    /// The same agent, with `ip` in place of addresses that listen everywhere (`0.0.0.0`, `::`): these are
    /// good for listening, and nobody can connect to them.
    #[must_use]
    pub fn advertised_at(mut self, ip: IpAddr) -> Self {
        for address in &mut self.addresses {
            if let Some(socket) = address
                .socket()
                .filter(|socket| socket.ip().is_unspecified())
            {
                *address = address.at(SocketAddr::new(ip, socket.port()));
            }
        }
        self
    }

    /// The addresses that are worth trying from `host`, best first, and a sentence for each other one.
    /// `is_private`: some of the memory here cannot be mapped by others.
    fn candidates(
        &self,
        host: Option<HostId>,
        is_private: bool,
        way: PathChoice,
    ) -> (Vec<&Address>, Vec<String>) {
        let is_here = self.host.is_some() && self.host == host;
        let mut passed_over = Vec::new();
        let mut worth: Vec<&Address> = Vec::new();
        for address in &self.addresses {
            let is_asked_for =
                way == PathChoice::Auto || way == PathChoice::Only(address.backend());
            let reason = match () {
                () if !is_asked_for => "not the way that was asked for",
                () if way == PathChoice::Auto
                    && is_private
                    && matches!(address, Address::Shm(_)) =>
                {
                    "some memory here is private"
                }
                () if address.is_local() && !is_here => "reaches only its own host",
                () if address
                    .socket()
                    .is_some_and(|socket| socket.ip().is_unspecified()) =>
                {
                    "names no host"
                }
                () => {
                    worth.push(address);
                    continue;
                }
            };
            passed_over.push(format!("{address}: {reason}"));
        }
        worth.sort_by_key(|address| match address.backend() {
            BackendKind::Shm => 0,
            BackendKind::Cma => 1,
            _ => 2,
        });
        (worth, passed_over)
    }
}

impl fmt::Display for Contact {
    /// One line: magic, incarnation, host or `-`, addresses with commas between or `-`, name.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{MAGIC} {} ", self.incarnation)?;
        match self.host {
            Some(host) => write!(f, "{host} ")?,
            None => f.write_str("- ")?,
        }
        for (index, address) in self.addresses.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            write!(f, "{comma}{}", escaped(&address.to_string()))?;
        }
        let none = if self.addresses.is_empty() { "-" } else { "" };
        write!(f, "{none} {}", escaped(&self.name))
    }
}

impl FromStr for Contact {
    type Err = Error;

    /// What [`fmt::Display`] has written. Addresses are numbers, so no resolver is asked.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] with the text.
    fn from_str(text: &str) -> Result<Self, Error> {
        parse(text).ok_or_else(|| {
            ErrorKind::InvalidArgument {
                what: "contact",
                value: text.chars().take(200).collect(),
            }
            .into()
        })
    }
}

fn parse(text: &str) -> Option<Contact> {
    let mut words = text.split(' ');
    let mut word = || words.next().filter(|word| !word.is_empty());
    if word()? != MAGIC {
        return None;
    }
    let incarnation = Incarnation(parse_hex(word()?)?);
    let host = match word()? {
        "-" => None,
        host => Some(HostId::parse(host)?),
    };
    let addresses = match word()? {
        "-" => Vec::new(),
        list if list.split(',').count() > ADDRESS_LIMIT => return None,
        list => list
            .split(',')
            .map(|address| Address::parse(&unescaped(address)?))
            .collect::<Option<_>>()?,
    };
    let name = unescaped(word()?)?;
    let is_whole = words.next().is_none() && name.len() <= metadata::NAME_LIMIT_BYTES;
    is_whole.then_some(Contact {
        name,
        incarnation,
        host,
        addresses,
    })
}

/// Percent signs for everything that separates, and for control characters.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for char in text.chars() {
        match char {
            ' ' | ',' | '%' => out.push_str(&format!("%{:02x}", u32::from(char))),
            char if char.is_ascii_control() => out.push_str(&format!("%{:02x}", u32::from(char))),
            char => out.push(char),
        }
    }
    out
}

fn unescaped(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut out = parts.next()?.to_owned();
    for part in parts {
        let (code, rest) = part.split_at_checked(2)?;
        let is_hex = code.bytes().all(|byte| byte.is_ascii_hexdigit());
        let code = u8::from_str_radix(code, 16)
            .ok()
            .filter(|code| is_hex && code.is_ascii())?;
        out.push(char::from(code));
        out.push_str(rest);
    }
    Some(out)
}

/// Whether some registered memory is not in a memfd.
fn has_private_memory(engine: &Engine) -> bool {
    let is_private = |memory: Arc<Memory>| memory.kind() != MemoryKind::Shared;
    let regions = engine.regions.all();
    regions
        .iter()
        .filter_map(|region| region.memory())
        .any(is_private)
}

impl Agent {
    /// What others need to connect to this agent: it lists the addresses that [`Agent::listen`] was called
    /// for so far, in that order, without those of [`Address::Shm`] if a pool lies in memory that others
    /// cannot map. An agent without any is still reachable inside its process.
    pub fn contact(&self) -> Contact {
        let engine = self.engine();
        let mut here = HERE.lock();
        here.retain(|_, engine| engine.strong_count() > 0);
        here.insert(engine.incarnation, Arc::downgrade(engine));
        drop(here);
        let mut addresses = self.owner.listening.lock().clone();
        if has_private_memory(engine) {
            addresses.retain(|address| !matches!(address, Address::Shm(_)));
        }
        Contact {
            name: engine.name.clone(),
            incarnation: engine.incarnation,
            host: HostId::here(),
            addresses,
        }
    }

    /// Connects to the agent that `contact` tells of, one attempt for each address, by the way that is asked
    /// for or the best that works. [`super::PeerInfo::backend`] says which one it was.
    ///
    /// # Errors
    /// [`ErrorKind::NoPath`] with what was tried and why each did not do (retryable);
    /// [`ErrorKind::IncarnationMismatch`] when another life answers there, whose connection comes and ends as events;
    /// [`ErrorKind::VersionMismatch`], [`ErrorKind::DeadlineExceeded`] and [`ErrorKind::Closed`], all of which
    /// end the search; [`ErrorKind::InvalidArgument`] for the contact of this agent.
    pub fn connect_to(
        &self,
        contact: &Contact,
        way: PathChoice,
        deadline: Deadline,
    ) -> Result<PeerId, Error> {
        if contact.incarnation == self.incarnation() {
            let (what, value) = ("contact of another agent", contact.to_string());
            return Err(ErrorKind::InvalidArgument { what, value }.into());
        }
        let mut tried = Vec::new();
        if matches!(way, PathChoice::Auto | PathChoice::Only(BackendKind::Local)) {
            let found = HERE
                .lock()
                .get(&contact.incarnation)
                .and_then(Weak::upgrade);
            match found.map(|engine| backend::local::connect(self.engine(), &engine)) {
                Some(Ok((peer, _))) => return Ok(peer),
                Some(Err(error)) if way == PathChoice::Auto => {
                    tried.push(format!("local: {error}"))
                }
                Some(Err(error)) => return Err(error),
                None if way != PathChoice::Auto => {
                    tried.push("local: not in this process".to_owned())
                }
                None => {}
            }
        }
        let (worth, passed_over) =
            contact.candidates(HostId::here(), has_private_memory(self.engine()), way);
        for address in worth {
            let life = Some(contact.incarnation);
            let connected = links::connect(self.engine(), address, life, deadline);
            let error = match connected {
                Ok(peer) => return Ok(peer),
                Err(error) => error,
            };
            match error.kind() {
                ErrorKind::IncarnationMismatch { .. }
                | ErrorKind::VersionMismatch { .. }
                | ErrorKind::DeadlineExceeded { .. }
                | ErrorKind::Closed => return Err(error),
                _ => tried.push(format!("{address}: {error}")),
            }
        }
        tried.extend(passed_over);
        Err(ErrorKind::NoPath {
            name: contact.name.clone(),
            tried,
        }
        .into())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn contact(addresses: &[&str]) -> Contact {
        Contact {
            name: "decode 0".to_owned(),
            incarnation: Incarnation(7),
            host: Some(HostId([3; 16])),
            addresses: addresses
                .iter()
                .map(|text| Address::parse(text).unwrap())
                .collect(),
        }
    }

    fn order(contact: &Contact, host: Option<HostId>, way: PathChoice) -> Vec<String> {
        let (worth, _) = contact.candidates(host, false, way);
        worth.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn the_nearest_way_comes_first_and_what_cannot_work_is_named() {
        let all = [
            "tcp:10.0.0.1:5",
            "cma:c",
            "tcp:127.0.0.1:6",
            "shm:s",
            "ucx:0.0.0.0:7",
        ];
        let contact = contact(&all);
        let here = contact.host;
        assert_eq!(
            order(&contact, here, PathChoice::Auto),
            ["shm:s", "cma:c", "tcp:10.0.0.1:5", "tcp:127.0.0.1:6"]
        );
        for elsewhere in [None, Some(HostId([4; 16]))] {
            assert_eq!(
                order(&contact, elsewhere, PathChoice::Auto),
                ["tcp:10.0.0.1:5"]
            );
        }
        let unknown = Contact {
            host: None,
            ..contact.clone()
        };
        assert_eq!(
            order(&unknown, None, PathChoice::Auto),
            ["tcp:10.0.0.1:5"],
            "unknown is elsewhere"
        );
        assert_eq!(
            order(&contact, here, PathChoice::Only(BackendKind::Cma)),
            ["cma:c"]
        );
        let (worth, _) = contact.candidates(here, true, PathChoice::Auto);
        assert_eq!(
            worth[0].to_string(),
            "cma:c",
            "private memory is not mapped"
        );
        let (_, passed_over) = contact.candidates(None, false, PathChoice::Auto);
        assert_eq!(passed_over.len(), 4, "{passed_over:?}");
        assert!(
            passed_over.contains(&"ucx:0.0.0.0:7: names no host".to_owned()),
            "{passed_over:?}"
        );
        let advertised = contact.advertised_at([10, 0, 0, 9].into());
        assert_eq!(
            advertised.addresses.last(),
            Address::parse("ucx:10.0.0.9:7").as_ref()
        );
        assert_eq!(
            advertised.addresses[..4],
            all.map(|text| Address::parse(text).unwrap())[..4]
        );
    }

    #[test]
    fn what_is_no_contact_is_refused() {
        let good = contact(&["shm:s"]).to_string();
        for wrong in [
            String::new(),
            good.replace("/1", "/2"),
            good.replace("shm:", "gpu:"),
            good.replace("%20", "%2x"),
            good.replace("%20", "%+1"),
            good.replace("%20", " "),
            good.replace(" shm:s", ""),
            good.replacen("0", "", 1),
            format!("{good} more"),
            good.replace("shm:s", &vec!["shm:s"; ADDRESS_LIMIT + 1].join(",")),
        ] {
            let error = wrong.parse::<Contact>().unwrap_err();
            assert!(
                matches!(error.kind(), ErrorKind::InvalidArgument { .. }),
                "{wrong}"
            );
        }
    }

    proptest! {
        #[test]
        fn a_written_contact_comes_back(
            name in "[^\\x00]{1,40}",
            shm in "[^\\x00]{1,20}",
            number in any::<u128>(),
            host in proptest::option::of(any::<[u8; 16]>()),
            has_address: bool,
        ) {
            let addresses = match has_address {
                true => vec![Address::Shm(shm), Address::Tcp(([10, 0, 0, 1], 80).into())],
                false => Vec::new(),
            };
            let incarnation = Incarnation(number);
            let contact = Contact { name, incarnation, host: host.map(HostId), addresses };
            let text = contact.to_string();
            prop_assert!(!text.contains('\n'));
            prop_assert_eq!(text.parse::<Contact>().unwrap(), contact);
        }

        #[test]
        fn no_text_makes_it_panic(text in "(kvgate-contact/1 )?[0-9a-f%, :é-]{0,120}") {
            let _ = text.parse::<Contact>();
        }
    }
}
