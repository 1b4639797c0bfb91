//! Agents: making, listening, connecting, ending.

use std::ffi::c_char;
use std::sync::Arc;
use std::task::Waker;

use kvgate_transfer::{Address, Agent, BackendKind, Deadline, PeerId, PeerInfo, PeerState};

use crate::arg::{self, Versioned, kv_incarnation};
use crate::handle::{Handle, handle};
use crate::memory::kv_pool_geometry;
use crate::status::{Failure, Outcome, guard, kv_status};
use crate::wake::EventFd;

/// Bytes of a buffer that every address fits into, with its closing zero.
pub const KV_ADDRESS_BYTES: usize = 128;

/// How long the release of an agent may take to stop its threads.
const RELEASE_DEADLINE_MS: u64 = 2_000;

/// One participant: registered memory, connections, flights. All calls with an agent may be made from
/// any thread, at the same time.
pub struct kv_agent {
    _opaque: (),
}

pub(crate) struct AgentObject {
    pub(crate) agent: Agent,
    pub(crate) fd: Arc<EventFd>,
}

impl AgentObject {
    /// What makes the agent's descriptor readable.
    pub(crate) fn waker(&self) -> Waker {
        Waker::from(self.fd.clone())
    }

    pub(crate) fn peer(&self, peer: u32) -> Outcome<PeerInfo> {
        let unknown = || Failure::argument(format!("peer {peer} does not exist"));
        self.agent.peer(PeerId(peer)).ok_or_else(unknown)
    }
}

handle!(kv_agent => AgentObject, "agent");

/// How to make an agent. Set `struct_bytes` and `name`, and let the rest be zero for the usual values.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct kv_agent_options {
    /// `sizeof(struct kv_agent_options)`.
    pub struct_bytes: u32,
    /// Operations towards one peer that may be queued or under way; 0 for 1024.
    pub queue_capacity: u32,
    /// The name, for people: UTF-8, not empty.
    pub name: *const c_char,
    /// Bytes that peers see, see `kv_agent_peer_metadata`; at most 1 MiB.
    pub metadata: *const u8,
    /// How many.
    pub metadata_bytes: usize,
    /// The secret that both sides of a connection beyond this host must know. NULL for none.
    pub auth_token: *const u8,
    /// How many bytes it has.
    pub auth_token_bytes: usize,
}

// SAFETY: `repr(C)`, numbers and pointers, `struct_bytes` first.
unsafe impl Versioned for kv_agent_options {
    const NAME: &'static str = "kv_agent_options";
}

/// What carries a connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum kv_backend {
    /// Another one.
    Other = 0,
    /// Within one process.
    Local = 1,
    /// Memory that two processes of one host map.
    Shm = 2,
    /// A TCP connection.
    Tcp = 3,
    /// The kernel copies between two processes of one host.
    Cma = 4,
    /// UCX.
    Ucx = 5,
    /// libfabric.
    Libfabric = 6,
}

/// A connection as this agent sees it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_peer_info {
    /// `sizeof(struct kv_peer_info)`; set it before the call.
    pub struct_bytes: u32,
    /// 1 while the connection stands, or has broken and may come back; 0 when it has ended.
    pub is_up: u32,
    /// What carries it, an `enum kv_backend`.
    pub backend: u32,
    /// Pools that the peer had registered when it was connected.
    pub pool_count: u32,
    /// Which life of the peer this connection belongs to.
    pub incarnation: kv_incarnation,
    /// Milliseconds since something was heard from it.
    pub silent_ms: u64,
    /// Bytes of its metadata.
    pub metadata_bytes: u64,
}

// SAFETY: `repr(C)`, numbers, `struct_bytes` first.
unsafe impl Versioned for kv_peer_info {
    const NAME: &'static str = "kv_peer_info";
}

/// What was left when an agent was shut down. All zero: nothing.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_shutdown_report {
    /// `sizeof(struct kv_shutdown_report)`; set it before the call.
    pub struct_bytes: u32,
    /// Threads that did not end in time.
    pub running_threads: u32,
    /// Flights whose memory may still be touched.
    pub unquiet_flights: u64,
    /// Regions that are still registered.
    pub open_regions: u64,
    /// Operations whose end nobody can tell.
    pub unknown_operations: u64,
    /// Messages for peers that were not down before: not sent, or sent over a connection that broke before the
    /// peer acknowledged them, so that nobody can tell whether they came.
    pub unsent_messages: u64,
}

// SAFETY: `repr(C)`, numbers, `struct_bytes` first.
unsafe impl Versioned for kv_shutdown_report {
    const NAME: &'static str = "kv_shutdown_report";
}

/// Makes an agent, with a fresh incarnation. Release it with `kv_agent_release`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_agent_create(
    options: *const kv_agent_options,
    agent: *mut *mut kv_agent,
) -> kv_status {
    guard(|| {
        // SAFETY: the contract of the header.
        let (options, agent) = unsafe { (arg::versioned(options)?, arg::out(agent, "agent")?) };
        // SAFETY: as above.
        let name = unsafe { arg::text(options.name, "kv_agent_options.name")? };
        // SAFETY: as above.
        let metadata = unsafe {
            arg::slice(
                options.metadata,
                options.metadata_bytes,
                "kv_agent_options.metadata",
            )?
        };
        // SAFETY: as above.
        let token = unsafe {
            let (token, bytes) = (options.auth_token, options.auth_token_bytes);
            arg::slice(token, bytes, "kv_agent_options.auth_token")?
        };
        let mut config = kvgate_transfer::TransferConfig::default();
        if options.queue_capacity > 0 {
            config.queue_capacity = options.queue_capacity as usize;
        }
        let built = Agent::builder(name)
            .config(config)
            .app_metadata(metadata.to_vec())
            .auth_token((!token.is_empty()).then(|| token.to_vec()))
            .build()?;
        let fd = Arc::new(EventFd::new()?);
        agent.set(kv_agent::create(AgentObject { agent: built, fd }));
        Ok(())
    })
}

/// Ends the agent if `kv_agent_shutdown` has not, and its handle; NULL is allowed. Blocks for up to two
/// seconds while its threads end. Flights of it that miss something fail, and its event descriptor is not to
/// be used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_agent_release(agent: *mut kv_agent) -> kv_status {
    guard(|| {
        if let Ok(object) = kv_agent::open(agent) {
            // Whoever waits for an event of it does not hold the agent open.
            let _ = object
                .agent
                .shutdown(Deadline::after_ms(RELEASE_DEADLINE_MS));
        }
        kv_agent::release(agent)
    })
}

/// Which life this agent is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_agent_incarnation(
    agent: *const kv_agent,
    incarnation: *mut kv_incarnation,
) -> kv_status {
    guard(|| {
        let agent = kv_agent::open(agent)?;
        // SAFETY: the contract of the header.
        let incarnation = unsafe { arg::out(incarnation, "incarnation")? };
        incarnation.set(agent.agent.incarnation().into());
        Ok(())
    })
}

/// Listens until the agent is shut down. `address` begins with the transport: `tcp:HOST:PORT`,
/// `ucx:HOST:PORT` or `libfabric:HOST:PORT` (port 0 lets the system choose), `shm:NAME` or `cma:NAME` (the name
/// of an abstract Unix socket: same host, no file). Over shm the registered memory has to be shared. `bound`,
/// unless NULL, gets the address to connect to, in at most `KV_ADDRESS_BYTES` bytes. Whoever connects becomes
/// a peer and is announced by `KV_EVENT_KIND_PEER_UP`.
///
/// `KV_STATUS_BUSY` when the address is in use, `KV_STATUS_REFUSED` for an address beyond this host without
/// a secret, `KV_STATUS_UNAVAILABLE` when this library was built without the transport or what it needs is not
/// there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_agent_listen(
    agent: *const kv_agent,
    address: *const c_char,
    bound: *mut c_char,
) -> kv_status {
    guard(|| {
        let agent = kv_agent::open(agent)?;
        // SAFETY: the contract of the header.
        let text = unsafe { arg::text(address, "address")? };
        let found = Address::resolve(text)?;
        let mut result = Err(Failure::argument(format!("no address in {text:?}")));
        for address in &found {
            result = agent.agent.listen(address).map_err(Failure::from);
            if result.is_ok() {
                break;
            }
        }
        let mut shown = result?.to_string().into_bytes();
        shown.push(0);
        if shown.len() > KV_ADDRESS_BYTES {
            return Err(Failure::argument(format!(
                "the bound address has {} bytes",
                shown.len()
            )));
        }
        if !bound.is_null() {
            let mut length = 0;
            // SAFETY: the header asks for `KV_ADDRESS_BYTES` bytes.
            unsafe {
                arg::copy_out(&shown, bound.cast(), KV_ADDRESS_BYTES, &raw mut length)?;
            }
        }
        Ok(())
    })
}

/// Connects to an agent that listens at `address` (as for `kv_agent_listen`) and puts the number of the
/// connection into `peer`. Blocks until the handshake is done. The peer then knows what was registered
/// here before, so register first.
///
/// `KV_STATUS_UNREACHABLE` when nobody listens (trying again may help), `KV_STATUS_REFUSED` with the reason of
/// either side, `KV_STATUS_UNAVAILABLE` as for `kv_agent_listen`, `KV_STATUS_TIMED_OUT`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_agent_connect(
    agent: *const kv_agent,
    address: *const c_char,
    timeout_ms: u64,
    peer: *mut u32,
) -> kv_status {
    guard(|| {
        let agent = kv_agent::open(agent)?;
        // SAFETY: the contract of the header.
        let (text, peer) = unsafe { (arg::text(address, "address")?, arg::out(peer, "peer")?) };
        let deadline = Deadline::after_ms(timeout_ms);
        let mut result = Err(Failure::argument(format!("no address in {text:?}")));
        for address in &Address::resolve(text)? {
            result = agent
                .agent
                .connect(address, deadline)
                .map_err(Failure::from);
            if result.is_ok() {
                break;
            }
        }
        peer.set(result?.0);
        Ok(())
    })
}

/// Connects two agents of this process. `peer_of_one` gets the number of `other` as `one` sees it, and
/// `peer_of_other` the number of `one` as `other` sees it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_agent_connect_local(
    one: *const kv_agent,
    other: *const kv_agent,
    peer_of_one: *mut u32,
    peer_of_other: *mut u32,
) -> kv_status {
    guard(|| {
        let (one, other) = (kv_agent::open(one)?, kv_agent::open(other)?);
        if Arc::ptr_eq(&one, &other) {
            return Err(Failure::argument("an agent cannot be connected to itself"));
        }
        // SAFETY: the contract of the header.
        let (first, second) = unsafe {
            let first = arg::out(peer_of_one, "peer_of_one")?;
            (first, arg::out(peer_of_other, "peer_of_other")?)
        };
        let (to_other, to_one) = Agent::connect_local(&one.agent, &other.agent)?;
        first.set(to_other.0);
        second.set(to_one.0);
        Ok(())
    })
}

/// What is known of a connection.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_agent_peer(
    agent: *const kv_agent,
    peer: u32,
    info: *mut kv_peer_info,
) -> kv_status {
    guard(|| {
        let agent = kv_agent::open(agent)?;
        // SAFETY: the contract of the header.
        let out = unsafe { arg::versioned_out(info)? };
        let found = agent.peer(peer)?;
        out.set(kv_peer_info {
            struct_bytes: size_of::<kv_peer_info>() as u32,
            is_up: u32::from(!matches!(found.state, PeerState::Down(_))),
            backend: backend_of(found.backend) as u32,
            pool_count: found.pools.len() as u32,
            incarnation: found.incarnation.into(),
            silent_ms: u64::try_from(found.last_progress.elapsed().as_millis()).unwrap_or(u64::MAX),
            metadata_bytes: found.app_metadata.len() as u64,
        });
        Ok(())
    })
}

/// A pool of a peer: its number there, for remote descriptor lists, and its slots. `index` counts from 0
/// to `kv_peer_info.pool_count`, in the order in which the peer registered them. Either answer may be
/// NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_agent_peer_pool(
    agent: *const kv_agent,
    peer: u32,
    index: u32,
    pool: *mut u32,
    geometry: *mut kv_pool_geometry,
) -> kv_status {
    guard(|| {
        let agent = kv_agent::open(agent)?;
        // SAFETY: the contract of the header.
        let (pool, geometry) = unsafe {
            let pool = arg::optional_out(pool, "pool")?;
            (pool, arg::optional_out(geometry, "geometry")?)
        };
        let info = agent.peer(peer)?;
        let Some(found) = info.pools.get(index as usize) else {
            let message = format!(
                "peer {peer} has {} pools, no pool {index}",
                info.pools.len()
            );
            return Err(Failure::argument(message));
        };
        if let Some(pool) = pool {
            pool.set(found.pool.0);
        }
        if let Some(geometry) = geometry {
            geometry.set(found.geometry.into());
        }
        Ok(())
    })
}

/// Copies the bytes that a peer says about itself, see `kv_agent_options.metadata`. `length` gets their
/// number, also when `capacity` is smaller and the call fails.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_agent_peer_metadata(
    agent: *const kv_agent,
    peer: u32,
    buffer: *mut u8,
    capacity: usize,
    length: *mut usize,
) -> kv_status {
    guard(|| {
        let agent = kv_agent::open(agent)?;
        let info = agent.peer(peer)?;
        // SAFETY: the contract of the header.
        unsafe { arg::copy_out(&info.app_metadata, buffer, capacity, length) }
    })
}

/// Queues a control message: reliable while the connection stands, and in order with everything that was
/// posted to this peer before. Never blocks; the bytes are copied.
///
/// `KV_STATUS_FULL` when too many wait, `KV_STATUS_PEER_DOWN`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_agent_send(
    agent: *const kv_agent,
    peer: u32,
    bytes: *const u8,
    length_bytes: usize,
) -> kv_status {
    guard(|| {
        let agent = kv_agent::open(agent)?;
        // SAFETY: the contract of the header.
        let bytes = unsafe { arg::slice(bytes, length_bytes, "bytes")? };
        Ok(agent.agent.send(PeerId(peer), bytes)?)
    })
}

/// Tells every peer that this process is alive and doing something, at most every 100 ms whatever the
/// number of calls; it resets `kv_peer_info.silent_ms` there. Never blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_agent_report_progress(agent: *const kv_agent) -> kv_status {
    guard(|| {
        kv_agent::open(agent)?.agent.report_progress();
        Ok(())
    })
}

/// Ends the agent within `timeout_ms`: nothing is admitted any more, flights that miss something fail,
/// queues are drained, connections closed, threads joined. `report`, unless NULL, says what was left;
/// memory that somebody may still touch stays mapped. The handle stays until `kv_agent_release`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_agent_shutdown(
    agent: *const kv_agent,
    timeout_ms: u64,
    report: *mut kv_shutdown_report,
) -> kv_status {
    guard(|| {
        let agent = kv_agent::open(agent)?;
        let out = match report.is_null() {
            true => None,
            // SAFETY: the contract of the header.
            false => Some(unsafe { arg::versioned_out(report)? }),
        };
        let left = agent.agent.shutdown(Deadline::after_ms(timeout_ms));
        if let Some(out) = out {
            out.set(kv_shutdown_report {
                struct_bytes: size_of::<kv_shutdown_report>() as u32,
                running_threads: u32::try_from(left.running_threads).unwrap_or(u32::MAX),
                unquiet_flights: left.unquiet_flights.len() as u64,
                open_regions: left.open_regions.len() as u64,
                unknown_operations: left.unknown_operations,
                unsent_messages: left.unsent_messages,
            });
        }
        Ok(())
    })
}

fn backend_of(kind: BackendKind) -> kv_backend {
    match kind {
        BackendKind::Local => kv_backend::Local,
        BackendKind::Shm => kv_backend::Shm,
        BackendKind::Tcp => kv_backend::Tcp,
        BackendKind::Cma => kv_backend::Cma,
        BackendKind::Ucx => kv_backend::Ucx,
        BackendKind::Libfabric => kv_backend::Libfabric,
        _ => kv_backend::Other,
    }
}
