//! Transfers between processes of one host: both sides map the other's pools, whoever posts copies.
//!
//! The handshake hands sealed memfds over an abstract Unix socket, so nothing is left in any file
//! system. A write is then: copy the runs (plain memory), then one arrival frame on the socket. A read
//! is the copy alone. The send orders the copies before it, so the peer sees the bytes when it reads the frame; local
//! completion and visibility at the peer coincide here, and only here.
//!
//! Death: a pidfd of the peer's process. Readable means that its whole thread group is gone, and with
//! it every store it could make (I-9). A closed socket alone proves nothing: a process that lives may
//! still copy; so after it the pidfd gets a little patience, and then the answer is `Unprovable`. A
//! stopped process is neither: nothing happens until it goes on. `Bye` is the peer's word that it
//! stores no more, sent under the same lock that every copy holds.
//!
//! The peer writes only its own arrival frames and into our pools, where wrong bytes are wrong data;
//! all numbers of its frames are checked where they are used.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::channel::{self, Channel, Receiver, Reception, Sender, misplaced};
use super::socket::{Bounds, FrameReader, StreamEnd, timespec};
use super::{Access, BackendKind, Caps, Link, LinkEvents, Posted, PostedOp, Quiesce, RemoteRun};
use crate::Arrival;
use crate::agent::metadata::AgentMetadata;
use crate::agent::wire::{self, Frame};
use crate::deadline::Deadline;
use crate::engine::Op;
use crate::error::{Cause, Error, ErrorKind};
use crate::ids::{PeerId, PoolId, RegionId};
use crate::mem::PeerMapping;
use crate::mem::copy::copy_run;
use crate::mem::span::{PoolSpan, SlotRun};
use crate::sync::{Arc, AtomicBool, Mutex, Ordering, fence};
use crate::visibility::Visibility;

/// How long the side that closes waits for the other one's goodbye.
const GOODBYE_MS: u64 = 250;
/// How long a process may take to end after its socket has closed before it counts as alive. Memory
/// is torn down before the socket closes, so this does not grow with the pools.
const DEATH_PATIENCE_MS: u64 = 2_000;

/// The process at the other end of a Unix socket.
pub(crate) struct PeerProcess {
    pidfd: OwnedFd,
}

impl PeerProcess {
    /// The peer of a connected socket, if it belongs to the same user.
    ///
    /// `SO_PEERPIDFD` names the process without a race. Where the kernel lacks it, the pidfd is opened
    /// by number *before* the handshake; the peer's `Ready`, which answers what is sent afterwards,
    /// then proves that the process with that number was still the one that connected.
    ///
    /// # Errors
    /// A sentence for the refusal.
    pub(crate) fn of(socket: impl AsFd) -> Result<Self, String> {
        let peer = rustix::net::sockopt::socket_peercred(&socket)
            .map_err(|errno| format!("peer credentials: {errno}"))?;
        let own = rustix::process::geteuid();
        if peer.uid != own {
            return Err(format!(
                "peer runs as user {}, this process as {}",
                peer.uid.as_raw(),
                own.as_raw()
            ));
        }
        let pidfd = match peer_pidfd(socket.as_fd()) {
            Ok(pidfd) => pidfd,
            Err(Errno::NOPROTOOPT | Errno::INVAL) => pidfd_by_number(peer.pid)?,
            Err(errno) => return Err(format!("process of the peer cannot be watched: {errno}")),
        };
        Ok(Self { pidfd })
    }

    /// Whether the process has ended; waits for it up to `deadline`.
    fn has_ended(&self, deadline: Deadline) -> bool {
        loop {
            let timeout = timespec(deadline.remaining());
            match poll(
                &mut [PollFd::new(&self.pidfd, PollFlags::IN)],
                Some(&timeout),
            ) {
                Ok(count) => return count > 0,
                Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
    }
}

fn peer_pidfd(socket: BorrowedFd<'_>) -> Result<OwnedFd, Errno> {
    /// Linux 6.5; not in every libc crate's list of targets.
    const SO_PEERPIDFD: libc::c_int = 77;
    let mut fd: libc::c_int = -1;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: I-16: the kernel writes at most `len` bytes, the size of `fd`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut len,
        )
    };
    if result != 0 || fd < 0 {
        let code = std::io::Error::last_os_error().raw_os_error();
        return Err(Errno::from_raw_os_error(code.unwrap_or(libc::EIO)));
    }
    // SAFETY: I-21: the call has just made this descriptor; nobody else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn pidfd_by_number(pid: Pid) -> Result<OwnedFd, String> {
    pidfd_open(pid, PidfdFlags::empty())
        .map_err(|errno| format!("process of the peer cannot be watched: {errno}"))
}

/// A peer on this host with its pools mapped here.
pub(crate) struct ShmLink {
    shared: Arc<Shared>,
    receiver: Receiver,
    /// What was read with the handshake; the receive thread takes it.
    reader: Mutex<Option<FrameReader>>,
}

struct Shared {
    channel: Channel,
    process: PeerProcess,
    pools: BTreeMap<PoolId, PoolSpan>,
    /// Keeps the spans of `pools` mapped.
    _memories: BTreeMap<RegionId, PeerMapping>,
    /// Copies stop at the next run.
    is_closing: AtomicBool,
    /// The peer has promised to store no more.
    has_bye: AtomicBool,
    /// The peer's end of the socket is closed: its process ends now, or has broken the protocol.
    has_hung_up: AtomicBool,
}

impl ShmLink {
    /// A link to `process`, whose handshake is done.
    pub(crate) fn new(
        channel: Channel,
        reader: FrameReader,
        process: PeerProcess,
        peer: &AgentMetadata,
        memories: BTreeMap<RegionId, PeerMapping>,
    ) -> Self {
        let pools = peer.pools.iter().filter_map(|pool| {
            let memory = memories.get(&pool.region)?;
            let span = PoolSpan::new(memory.base_ptr(), memory.len_bytes(), pool.geometry)?;
            Some((pool.id, span))
        });
        Self {
            shared: Arc::new(Shared {
                channel,
                process,
                pools: pools.collect(),
                _memories: memories,
                is_closing: AtomicBool::new(false),
                has_bye: AtomicBool::new(false),
                has_hung_up: AtomicBool::new(false),
            }),
            receiver: Receiver::new(),
            reader: Mutex::new(Some(reader)),
        }
    }
}

impl Shared {
    /// The receive thread.
    fn receive(&self, mut reader: FrameReader, peer: PeerId, events: &dyn LinkEvents) {
        let process = Some(self.process.pidfd.as_fd());
        let bounds = Bounds {
            process,
            ..self.channel.bounds()
        };
        let channel = &self.channel;
        let mut end = channel::receive(channel, &mut reader, bounds, (peer, events), &mut NoWrites);
        let was_closed_here = channel.is_closed_here();
        if was_closed_here && reader.is_between_frames() {
            // Our goodbye is under way; the peer's one is the proof that it stores no more.
            let last = Bounds {
                stop: None,
                deadline: Some(Deadline::after_ms(GOODBYE_MS)),
                process,
                writable: None,
            };
            end = channel::receive(channel, &mut reader, last, (peer, events), &mut NoWrites);
        }
        let is_silent = matches!(end, Err(StreamEnd::Stopped | StreamEnd::TimedOut));
        self.has_hung_up
            .store(end.is_err() && !is_silent, Ordering::Release);
        self.has_bye.store(end.is_ok(), Ordering::Release);
        self.stop_storing();
        channel.socket.shutdown();
        if !was_closed_here {
            events.down(peer, channel::cause(end), self.proof());
        }
    }

    /// Ends what the worker does, and tells the peer that nothing is stored any more: the goodbye
    /// needs the lock that every copy holds.
    fn stop_storing(&self) {
        self.is_closing.store(true, Ordering::Release);
        self.channel.stop.raise();
        self.channel.farewell(wire::append_bye);
    }

    /// Waits only for the process behind a socket that was closed without a goodbye.
    fn proof(&self) -> Quiesce {
        let patience_ms = match self.has_hung_up.load(Ordering::Acquire) {
            true => DEATH_PATIENCE_MS,
            false => 0,
        };
        let deadline = Deadline::after_ms(patience_ms);
        if self.has_bye.load(Ordering::Acquire) || self.process.has_ended(deadline) {
            return Quiesce::Proven;
        }
        Quiesce::Unprovable(Cause::Transfer(
            "the process of the peer lives and may still write".into(),
        ))
    }

    /// The peer's side of a run, checked against its geometry.
    fn remote(&self, local: &SlotRun, remote: &RemoteRun) -> Result<SlotRun, Error> {
        let pool = remote.pool;
        let span = self
            .pools
            .get(&pool)
            .ok_or(ErrorKind::UnknownPool { pool })?;
        let found = span
            .run(remote.slot, remote.slot_count)
            .ok_or(ErrorKind::SlotOutOfRange {
                pool,
                slot: remote.slot,
                slot_count: span.geometry().slot_count,
            })?;
        if local.slot_bytes != found.slot_bytes || local.slot_count != found.slot_count {
            return Err(ErrorKind::LengthMismatch {
                local_count: local.payload_bytes(),
                remote_count: found.payload_bytes(),
            }
            .into());
        }
        Ok(found)
    }

    /// Copies every run. The sender is held, so that a goodbye comes only after it.
    fn copy(&self, op: &PostedOp, _right_to_store: &Sender<'_>) -> Result<(), Error> {
        for (local, remote) in op.runs.local.iter().zip(&op.runs.remote) {
            if self.is_closing.load(Ordering::Relaxed) {
                return Err(ErrorKind::Closed.into());
            }
            let remote = self.remote(local, remote)?;
            let (from, to) = match op.op {
                Op::Write => (local, &remote),
                Op::Read => (&remote, local),
            };
            // SAFETY: I-16: `remote` checked count and length against both pools; I-21: the engine
            // keeps our memory mapped while the operation is posted, `_memories` the peer's, and
            // they are different mappings; I-7, I-9: the engine posts only what was committed or
            // announced, to slots that are in flight.
            unsafe { copy_run(from, to) };
        }
        // The socket orders the copies before the frame; this tells the compiler.
        fence(Ordering::Release);
        Ok(())
    }
}

impl Link for ShmLink {
    fn start(&self, peer: PeerId, events: Arc<dyn LinkEvents>) -> Result<(), Error> {
        let reader = self.reader.lock().take().ok_or(ErrorKind::Closed)?;
        let shared = Arc::clone(&self.shared);
        self.receiver.start(format!("kvgate-shm-{peer}"), move || {
            shared.receive(reader, peer, &*events);
        })
    }

    fn kind(&self) -> BackendKind {
        BackendKind::Shm
    }

    fn caps(&self) -> Caps {
        Caps {
            completion: Visibility::RemoteVisible,
            max_descriptors: u64::MAX,
            arrival_in_band: true,
            access: Access::Direct,
        }
    }

    fn post(&self, op: &PostedOp) -> Result<Posted, Error> {
        if let Some(arrival) = &op.arrival {
            wire::check_arrival(arrival)?;
        }
        let mut sender = self.shared.channel.sender()?;
        self.shared.copy(op, &sender)?;
        let level = Visibility::RemoteVisible;
        if let Some(arrival) = op.arrival.as_ref().filter(|_| op.op == Op::Write) {
            sender.send(|words| wire::append_arrival(words, level, arrival))?;
        }
        Ok(Posted::Done(level))
    }

    fn announce(&self, arrival: &Arrival, level: Visibility) -> Result<(), Error> {
        wire::check_arrival(arrival)?;
        let frame = |words: &mut Vec<u8>| wire::append_arrival(words, level, arrival);
        self.shared.channel.send(frame)
    }

    fn send(&self, message: &[u8]) -> Result<(), Error> {
        wire::check_message(message)?;
        let frame = |words: &mut Vec<u8>| wire::append_message(words, message);
        self.shared.channel.send(frame)
    }

    fn send_progress(&self, counter: u64) -> Result<(), Error> {
        let frame = |words: &mut Vec<u8>| wire::append_progress(words, counter);
        self.shared.channel.send(frame)
    }

    fn quiesce(&self) -> Quiesce {
        self.shared.proof()
    }

    fn close(&self) {
        self.shared.channel.close();
        self.shared.stop_storing();
        self.shared.channel.socket.shutdown_send();
        self.receiver.join();
    }
}

impl Drop for ShmLink {
    fn drop(&mut self) {
        self.close();
    }
}

/// Nobody sends payload over this socket.
struct NoWrites;

impl Reception for NoWrites {
    fn frame(&mut self, frame: Frame, _reader: &mut FrameReader) -> Result<(), StreamEnd> {
        Err(misplaced(&frame))
    }
}
