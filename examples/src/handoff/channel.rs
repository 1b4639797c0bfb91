//! Framed messages over a pair of connected sockets: between the launcher and its roles, and between the
//! decode side and the reference.
//!
//! A frame is the byte counts of a JSON head and of a binary tail, then both. The other end of a channel
//! is always a process or thread of the same run, so a broken frame is a bug and not a matter of trust;
//! the byte counts are bounded all the same.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// No head or tail of a run comes near it (the largest tail is the logits of one request).
const MAX_PART_BYTES: u32 = 1 << 30;

/// The sending half; clones share the socket and never interleave frames.
#[derive(Clone, Debug)]
pub struct ChannelSender {
    stream: Arc<Mutex<UnixStream>>,
}

/// The receiving half.
#[derive(Debug)]
pub struct ChannelReceiver {
    stream: UnixStream,
}

/// Splits a connected socket. A send that the other end does not take for `write_limit` fails.
pub fn split(
    stream: UnixStream,
    write_limit: Duration,
) -> io::Result<(ChannelSender, ChannelReceiver)> {
    let receiver = stream.try_clone()?;
    stream.set_write_timeout(Some(write_limit))?;
    Ok((
        ChannelSender {
            stream: Arc::new(Mutex::new(stream)),
        },
        ChannelReceiver { stream: receiver },
    ))
}

impl ChannelSender {
    /// Sends a message without a tail.
    pub fn send<T: Serialize>(&self, message: &T) -> io::Result<()> {
        self.send_with(message, &[])
    }

    /// Sends a message and raw bytes.
    pub fn send_with<T: Serialize>(&self, message: &T, tail: &[u8]) -> io::Result<()> {
        let head = serde_json::to_vec(message).map_err(io::Error::other)?;
        let mut frame = Vec::with_capacity(8 + head.len());
        frame.extend_from_slice(&part_bytes(&head)?.to_le_bytes());
        frame.extend_from_slice(&part_bytes(tail)?.to_le_bytes());
        frame.extend_from_slice(&head);
        let mut stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        stream.write_all(&frame)?;
        stream.write_all(tail)
    }

    /// Ends both directions, so that the other end reads the end of the stream.
    pub fn close(&self) {
        let stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
        // A socket whose other end is gone is closed already.
        let _ = stream.shutdown(std::net::Shutdown::Both);
    }
}

impl ChannelReceiver {
    /// Waits for the next message; `None` at the end of the stream.
    pub fn receive<T: DeserializeOwned>(&mut self) -> io::Result<Option<(T, Vec<u8>)>> {
        let mut counts = [0; 8];
        match self.stream.read_exact(&mut counts) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            Err(error) => return Err(error),
        }
        let [a, b, c, d, e, f, g, h] = counts;
        let head = self.part(u32::from_le_bytes([a, b, c, d]))?;
        let tail = self.part(u32::from_le_bytes([e, f, g, h]))?;
        let message = serde_json::from_slice(&head).map_err(io::Error::other)?;
        Ok(Some((message, tail)))
    }

    fn part(&mut self, part_bytes: u32) -> io::Result<Vec<u8>> {
        if part_bytes > MAX_PART_BYTES {
            return Err(io::Error::other(format!(
                "a frame part of {part_bytes} bytes"
            )));
        }
        let mut part = Vec::new();
        let read = Read::by_ref(&mut self.stream)
            .take(u64::from(part_bytes))
            .read_to_end(&mut part)?;
        if read < part_bytes as usize {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(part)
    }
}

fn part_bytes(part: &[u8]) -> io::Result<u32> {
    u32::try_from(part.len())
        .ok()
        .filter(|&bytes| bytes <= MAX_PART_BYTES)
        .ok_or_else(|| io::Error::other(format!("a frame part of {} bytes", part.len())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_and_tails_arrive_in_order_and_the_end_is_seen() {
        let (left, right) = UnixStream::pair().unwrap();
        let limit = Duration::from_secs(10);
        let (sender, _) = split(left, limit).unwrap();
        let (_, mut receiver) = split(right, limit).unwrap();
        sender.send(&"one").unwrap();
        sender.send_with(&2_u32, &[7; 5]).unwrap();
        sender.close();
        assert_eq!(
            receiver.receive::<String>().unwrap(),
            Some(("one".to_owned(), vec![]))
        );
        assert_eq!(receiver.receive::<u32>().unwrap(), Some((2, vec![7; 5])));
        assert_eq!(receiver.receive::<u32>().unwrap(), None);
    }

    #[test]
    fn a_cut_frame_is_an_error_and_not_an_end() {
        let (mut left, right) = UnixStream::pair().unwrap();
        let (_, mut receiver) = split(right, Duration::from_secs(10)).unwrap();
        left.write_all(&[9, 0, 0, 0, 0, 0, 0, 0, b'"']).unwrap();
        drop(left);
        assert_eq!(
            receiver.receive::<String>().unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
    }
}
