//! The limit of a stream socket: the whole list in one message, vectors straight from and into the pages, a
//! write acknowledged by one byte after it was applied. No checks beyond bounds, no retries, no security.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use kvgate_transfer::bare::{Slots, View};
use kvgate_transfer::sync::{Arc, Mutex};
use rustix::net::sockopt::set_socket_send_buffer_size;

use super::layout::{Group, Layout, PageList};
use super::options::Direction;
use crate::handoff::failure::{Failure, FailureKind};

/// As much as the bare loops of the peers' harness take.
const SEND_BUFFER_BYTES: usize = 4 << 20;

/// Longest wait for the cookie of somebody who has connected.
const COOKIE_LIMIT: Duration = Duration::from_secs(5);
/// Those who connect and do not know the cookie; after so many the loop is not served.
const STRANGERS: usize = 64;

/// Serves the connection that knows the cookie, on a thread of its own; returns the port and the cookie.
pub fn serve(
    ip: IpAddr,
    view: &Arc<Mutex<View>>,
    layout: &Layout,
) -> Result<(u16, [u8; 16]), Failure> {
    let listener = TcpListener::bind((ip, 0)).map_err(|error| system(&error))?;
    let port = listener
        .local_addr()
        .map_err(|error| system(&error))?
        .port();
    let mut cookie = [0; 16];
    File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut cookie))
        .map_err(|error| system(&error))?;
    let (view, layout) = (view.clone(), layout.clone());
    let body = move || {
        let found = listener
            .incoming()
            .take(STRANGERS)
            .flatten()
            .find(|stream| knows(stream, &cookie).unwrap_or(false));
        if let Some(stream) = found {
            // It ends when the measuring side closes its end.
            while let Ok(()) = answer(&stream, &view, &layout) {}
        }
    };
    let spawned = thread::Builder::new()
        .name("bare-stream".to_owned())
        .spawn(body);
    spawned.map_err(|error| system(&error))?;
    Ok((port, cookie))
}

/// Whether this is the measuring side.
fn knows(mut stream: &TcpStream, cookie: &[u8; 16]) -> io::Result<bool> {
    tune(stream)?;
    stream.set_read_timeout(Some(COOKIE_LIMIT))?;
    let mut said = [0; 16];
    stream.read_exact(&mut said)?;
    stream.set_read_timeout(None)?;
    Ok(said == *cookie)
}

/// The measuring side.
#[derive(Debug)]
pub struct BareStream {
    stream: TcpStream,
}

impl BareStream {
    /// Connects to the loop of the peer. Every wait for it is bounded by `limit`.
    pub fn connect(
        address: SocketAddr,
        cookie: &[u8; 16],
        limit: Duration,
    ) -> Result<Self, Failure> {
        let connected = TcpStream::connect_timeout(&address, limit).and_then(|mut stream| {
            tune(&stream)?;
            stream.set_read_timeout(Some(limit))?;
            stream.set_write_timeout(Some(limit))?;
            stream.write_all(cookie)?;
            Ok(stream)
        });
        let stream = connected.map_err(|error| system(&error))?;
        Ok(Self { stream })
    }

    /// Moves one list; `here` are its slots on this side.
    pub fn transfer(
        &mut self,
        direction: Direction,
        list: &PageList,
        view: &mut View,
        here: &Slots,
    ) -> Result<(), Failure> {
        self.attempt(direction, list, view, here)
            .map_err(|error| system(&error))
    }

    fn attempt(
        &mut self,
        direction: Direction,
        list: &PageList,
        view: &mut View,
        here: &Slots,
    ) -> io::Result<()> {
        self.stream.write_all(&message(direction, list))?;
        match direction {
            Direction::Read => Ok(here.receive(view, &self.stream)?),
            Direction::Write => {
                here.send(view, &self.stream)?;
                self.stream.read_exact(&mut [0])
            }
        }
    }
}

/// Direction and length, then per group its pools, its count and its slots.
fn message(direction: Direction, list: &PageList) -> Vec<u8> {
    let words = list
        .iter()
        .map(|group| 3 + group.there.len())
        .sum::<usize>();
    let mut bytes = Vec::with_capacity(8 + 4 * words);
    let mut push = |word: u32| bytes.extend_from_slice(&word.to_le_bytes());
    push(u32::from(direction == Direction::Write));
    push(words as u32);
    for Group { pools, there, .. } in list {
        push(pools.start as u32);
        push(pools.end as u32);
        push(there.len() as u32);
        there.iter().for_each(|slot| push(*slot));
    }
    bytes
}

fn answer(mut stream: &TcpStream, view: &Mutex<View>, layout: &Layout) -> io::Result<()> {
    let mut head = [0; 8];
    stream.read_exact(&mut head)?;
    let [a, b, c, d, e, f, g, h] = head;
    let is_write = u32::from_le_bytes([a, b, c, d]) == 1;
    let mut bytes = vec![0; 4 * u32::from_le_bytes([e, f, g, h]) as usize];
    stream.read_exact(&mut bytes)?;
    let word = |four: &[u8]| four.try_into().map_or(0, u32::from_le_bytes);
    let mut words = bytes.chunks_exact(4).map(word);
    let mut list = PageList::new();
    while let Some(start) = words.next() {
        let (end, count) = (words.next(), words.next());
        let there: Vec<u32> = words.by_ref().take(count.unwrap_or(0) as usize).collect();
        list.push(Group {
            pools: start as usize..end.unwrap_or(0) as usize,
            here: Vec::new(),
            there,
        });
    }
    let mut view = view.lock();
    let slots = layout
        .slots(&view, &list, |group| &group.there)
        .map_err(io::Error::other)?;
    if is_write {
        slots.receive(&mut view, stream)?;
        stream.write_all(&[1])
    } else {
        Ok(slots.send(&view, stream)?)
    }
}

fn tune(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    Ok(set_socket_send_buffer_size(stream, SEND_BUFFER_BYTES)?)
}

fn system(error: &io::Error) -> Failure {
    Failure::new(
        FailureKind::PeerLost,
        format!("bare loop of the stream socket: {error}"),
    )
}
