//! UCX as a one-sided transport: puts and gets into registered memory, and a flush of the endpoint.
//!
//! One context, one worker and one endpoint for each connection, all in its mover's thread (the worker is
//! single-threaded). The endpoint asks for peer error handling, so UCX tells when the other process is
//! gone, and leaves its own shared-memory transports out: those cannot tell.
//!
//! A put that is over on this side has not arrived: only the flush of the endpoint, started after every put
//! was over, says so. Any negative status means that the endpoint is dead; it is kept for the message.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{CString, c_int, c_void};
use std::mem::zeroed;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::ptr::{null, null_mut};
use std::time::Duration;

use bytes::Bytes;
use kvgate_ucx_sys::*;

use super::BackendKind;
use super::rma::{Fabric, Failure, LocalKey, Request};
use crate::config::UcxConfig;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind};
use crate::mem::Memory;
use crate::sync::{Arc, AtomicI32, Ordering, thread};

/// Longest time that cancelled requests get to end.
const END: Duration = Duration::from_secs(2);
/// The device of the loopback interface on Linux.
const LOOPBACK: &str = "lo";

/// Loads the library.
///
/// # Errors
/// [`ErrorKind::BackendUnavailable`] with everything that was tried.
pub(crate) fn load(config: &UcxConfig) -> Result<Ucp, Error> {
    Ucp::load(&config.libraries).map_err(|absent| {
        let tried = absent
            .tried
            .iter()
            .map(|attempt| format!("{} ({})", attempt.path.display(), attempt.reason))
            .collect();
        let backend = BackendKind::Ucx;
        ErrorKind::BackendUnavailable { backend, tried }.into()
    })
}

/// Context and worker; its parts end in the order of the fields of [`Endpoint`].
struct Worker {
    ucp: Ucp,
    context: ucp_context_h,
    worker: ucp_worker_h,
}

/// One connection's half.
pub(crate) struct Endpoint {
    of: Worker,
    event_fd: c_int,
    ep: ucp_ep_h,
    /// What UCX has said about the peer; 0 is nothing.
    peer_error: Arc<AtomicI32>,
    rkeys: Vec<ucp_rkey_h>,
    /// A null is one that could not be unmapped.
    memories: BTreeMap<usize, ucp_mem_h>,
    next_handle: usize,
    /// In the order in which they were started.
    requests: VecDeque<(&'static str, ucs_status_ptr_t)>,
}

unsafe extern "C" fn on_peer_error(arg: *mut c_void, _ep: ucp_ep_h, status: ucs_status_t) {
    // SAFETY: I-21: `arg` is the cell of the endpoint, which outlives it.
    let cell = unsafe { &*arg.cast::<AtomicI32>() };
    cell.store(i32::from(status), Ordering::Release);
}

impl Worker {
    fn open(config: &UcxConfig, local: IpAddr) -> Result<Self, Error> {
        let mut of = Self {
            ucp: load(config)?,
            context: null_mut(),
            worker: null_mut(),
        };
        of.make_context(config, local)?;
        // SAFETY: I-16: all zero is a value of this struct; its mask says which fields count.
        let mut params: ucp_worker_params_t = unsafe { zeroed() };
        params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE.into();
        params.thread_mode = UCS_THREAD_MODE_SINGLE;
        // SAFETY: I-16: a live context, and a struct that is at least as long as the library's.
        let status = unsafe { (of.ucp.ucp_worker_create)(of.context, &params, &mut of.worker) };
        of.check("ucp_worker_create", status)?;
        Ok(of)
    }

    fn make_context(&mut self, config: &UcxConfig, local: IpAddr) -> Result<(), Error> {
        let ucp = &self.ucp;
        let mut settings = null_mut();
        // SAFETY: I-16: no prefix and no file: the defaults and the environment.
        let status = unsafe { (ucp.ucp_config_read)(null(), null(), &mut settings) };
        self.check("ucp_config_read", status)?;
        let settings = Settings(ucp, settings);
        settings.set("TLS", &config.transports)?;
        if local.to_canonical().is_loopback() {
            settings.set("NET_DEVICES", LOOPBACK)?;
        }
        // SAFETY: I-16: all zero is a value of this struct; its mask says which fields count.
        let mut params: ucp_params_t = unsafe { zeroed() };
        params.field_mask = UCP_PARAM_FIELD_FEATURES.into();
        params.features = (UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP).into();
        // SAFETY: I-16: the least version whose fields are used, live settings, and a struct that is at
        // least as long as the library's.
        let status = unsafe {
            (ucp.ucp_init_version)(
                LEAST_VERSION.major,
                LEAST_VERSION.minor,
                &params,
                settings.1,
                &mut self.context,
            )
        };
        drop(settings);
        self.check("ucp_init_version", status)?;
        Ok(())
    }

    fn failure(&self, call: &'static str, status: ucs_status_t) -> Failure {
        Failure {
            backend: BackendKind::Ucx,
            call,
            code: status.into(),
            words: self.ucp.describe(status),
        }
    }

    fn check(&self, call: &'static str, status: ucs_status_t) -> Result<(), Failure> {
        match status {
            UCS_OK => Ok(()),
            status => Err(self.failure(call, status)),
        }
    }

    fn progress(&self) -> bool {
        // SAFETY: I-21: a live worker, used in its own thread.
        unsafe { (self.ucp.ucp_worker_progress)(self.worker) > 0 }
    }

    /// How a request stands; a finished one is given back to the library.
    fn status(&self, request: ucs_status_ptr_t) -> ucs_status_t {
        // SAFETY: I-21: a request of this worker that was not freed.
        let status = unsafe { (self.ucp.ucp_request_check_status)(request) };
        if status != UCS_INPROGRESS {
            // SAFETY: I-21: it is over, and nobody else knows it.
            unsafe { (self.ucp.ucp_request_free)(request) };
        }
        status
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // SAFETY: I-21: made once, ended once, in this order; endpoints and memories are gone, or were never
        // made.
        unsafe {
            if !self.worker.is_null() {
                (self.ucp.ucp_worker_destroy)(self.worker);
            }
            if !self.context.is_null() {
                (self.ucp.ucp_cleanup)(self.context);
            }
        }
    }
}

/// Settings of a context that is being made.
struct Settings<'a>(&'a Ucp, *mut ucp_config_t);

impl Settings<'_> {
    fn set(&self, name: &'static str, value: &str) -> Result<(), Error> {
        let invalid = || ErrorKind::InvalidArgument {
            what: "setting of UCX",
            value: format!("{name}={value:?}"),
        };
        let (Ok(c_name), Ok(c_value)) = (CString::new(name), CString::new(value)) else {
            return Err(invalid().into());
        };
        // SAFETY: I-16: live settings and two strings that end with a zero; UCX copies them.
        let status =
            unsafe { (self.0.ucp_config_modify)(self.1, c_name.as_ptr(), c_value.as_ptr()) };
        match status {
            UCS_OK => Ok(()),
            _ => Err(invalid().into()),
        }
    }
}

impl Drop for Settings<'_> {
    fn drop(&mut self) {
        // SAFETY: I-21: read once, released once.
        unsafe { (self.0.ucp_config_release)(self.1) };
    }
}

impl Endpoint {
    /// Context and worker; the endpoint comes with the peer's address.
    pub(crate) fn open(config: &UcxConfig, local: IpAddr) -> Result<Self, Error> {
        let of = Worker::open(config, local)?;
        let mut event_fd = -1;
        // SAFETY: I-16: a live worker and a place for a number.
        let status = unsafe { (of.ucp.ucp_worker_get_efd)(of.worker, &mut event_fd) };
        of.check("ucp_worker_get_efd", status)?;
        Ok(Self {
            of,
            event_fd,
            ep: null_mut(),
            peer_error: Arc::new(AtomicI32::new(0)),
            rkeys: Vec::new(),
            memories: BTreeMap::new(),
            next_handle: 0,
            requests: VecDeque::new(),
        })
    }

    /// Keeps a request that is under way; refuses one that failed at once.
    fn keep(&mut self, call: &'static str, request: ucs_status_ptr_t) -> Result<(), Failure> {
        if let Some(status) = status_of(request) {
            return Err(self.of.failure(call, status));
        }
        if !request.is_null() {
            self.requests.push_back((call, request));
        }
        Ok(())
    }

    /// The peer is known, and nothing was heard against it.
    fn check_peer(&self) -> Result<(), Failure> {
        let status = self.peer_error.load(Ordering::Acquire);
        match ucs_status_t::try_from(status) {
            Ok(UCS_OK) if !self.ep.is_null() => Ok(()),
            Ok(UCS_OK) => Err(self.of.failure("endpoint", UCS_ERR_NOT_CONNECTED)),
            Ok(status) => Err(self.of.failure("endpoint", status)),
            Err(_) => Err(self.of.failure("endpoint", UCS_ERR_LAST)),
        }
    }

    /// Lets requests end that were cancelled; `false` when some have not.
    fn drain(&mut self, deadline: Deadline) -> bool {
        while let Some(&(_, request)) = self.requests.front() {
            if self.of.status(request) != UCS_INPROGRESS {
                self.requests.pop_front();
            } else if deadline.has_passed() {
                return false;
            } else if !self.of.progress() {
                thread::yield_now();
            }
        }
        true
    }

    fn destroy_rkeys(&mut self) {
        for rkey in self.rkeys.drain(..) {
            // SAFETY: I-21: unpacked once, destroyed once; no request uses it any more.
            unsafe { (self.of.ucp.ucp_rkey_destroy)(rkey) };
        }
    }

    /// Ends the endpoint at once; what is under way is cancelled. Whether all of that is over.
    fn close_ep(&mut self, deadline: Deadline) -> bool {
        let ep = std::mem::replace(&mut self.ep, null_mut());
        if ep.is_null() {
            return self.drain(deadline);
        }
        // SAFETY: I-16: all zero is a value of this struct; its mask says which fields count.
        let mut param: ucp_request_param_t = unsafe { zeroed() };
        param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
        param.flags = UCP_EP_CLOSE_FLAG_FORCE;
        // SAFETY: I-21: a live endpoint with peer error handling, closed once.
        let request = unsafe { (self.of.ucp.ucp_ep_close_nbx)(ep, &param) };
        let is_closing = self.keep("ucp_ep_close_nbx", request).is_ok();
        is_closing && self.drain(deadline)
    }

    fn mapped(&self, handle: usize) -> Result<ucp_mem_h, Failure> {
        let mapped = self.memories.get(&handle).copied();
        let mapped = mapped.filter(|mapped| !mapped.is_null());
        mapped.ok_or_else(|| self.of.failure("registration", UCS_ERR_INVALID_PARAM))
    }

    /// Unmaps a memory, once: what fails is never tried again, and never counts as unmapped.
    fn unmap(&mut self, handle: usize) -> Result<(), Failure> {
        let Some(place) = self.memories.get_mut(&handle) else {
            return Ok(());
        };
        let mapped = std::mem::replace(place, null_mut());
        let status = match mapped.is_null() {
            true => UCS_ERR_BUSY,
            // SAFETY: I-21: mapped once, unmapped once; no request of this side uses it.
            false => unsafe { (self.of.ucp.ucp_mem_unmap)(self.of.context, mapped) },
        };
        self.of.check("ucp_mem_unmap", status)?;
        self.memories.remove(&handle);
        Ok(())
    }

    /// Takes everything apart but the worker; `false` as soon as something does not end.
    fn close(&mut self) -> bool {
        if self.requests.is_empty() {
            self.destroy_rkeys();
        }
        if !self.close_ep(Deadline::after(END)) {
            return false;
        }
        self.destroy_rkeys();
        let handles: Vec<_> = self.memories.keys().copied().collect();
        handles.into_iter().all(|handle| self.unmap(handle).is_ok())
    }
}

impl Fabric for Endpoint {
    const KIND: BackendKind = BackendKind::Ucx;

    fn address(&mut self) -> Result<Bytes, Failure> {
        let of = &self.of;
        let (mut address, mut len_bytes) = (null_mut(), 0);
        // SAFETY: I-16: a live worker and two places.
        let status =
            unsafe { (of.ucp.ucp_worker_get_address)(of.worker, &mut address, &mut len_bytes) };
        of.check("ucp_worker_get_address", status)?;
        // SAFETY: I-16: the library says that so many bytes are there.
        let bytes = unsafe { std::slice::from_raw_parts(address.cast::<u8>(), len_bytes) };
        let bytes = Bytes::copy_from_slice(bytes);
        // SAFETY: I-21: got once, released once, copied before.
        unsafe { (of.ucp.ucp_worker_release_address)(of.worker, address) };
        Ok(bytes)
    }

    fn connect(&mut self, address: &[u8], keys: &[Bytes]) -> Result<(), Failure> {
        // SAFETY: I-16: all zero is a value of this struct; its mask says which fields count.
        let mut params: ucp_ep_params_t = unsafe { zeroed() };
        let fields = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
            | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
            | UCP_EP_PARAM_FIELD_ERR_HANDLER;
        params.field_mask = fields.into();
        params.address = address.as_ptr().cast();
        params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
        params.err_handler.cb = Some(on_peer_error);
        params.err_handler.arg = Arc::as_ptr(&self.peer_error).cast_mut().cast();
        // SAFETY: I-16: a live worker; the address is what the peer's worker gave out, over a channel that
        // checks its sums; I-21: the error cell outlives the endpoint.
        let status = unsafe { (self.of.ucp.ucp_ep_create)(self.of.worker, &params, &mut self.ep) };
        self.of.check("ucp_ep_create", status)?;
        for key in keys {
            let mut rkey = null_mut();
            // SAFETY: I-16: a live endpoint and a key that the peer's UCX has packed.
            let status = unsafe {
                (self.of.ucp.ucp_ep_rkey_unpack)(self.ep, key.as_ptr().cast(), &mut rkey)
            };
            self.of.check("ucp_ep_rkey_unpack", status)?;
            self.rkeys.push(rkey);
        }
        // Ends when the peer has answered. A peer that goes while the two still connect ends the process
        // in some versions of UCX; so no connection is in service before.
        self.flush()
    }

    fn register(&mut self, memory: &Memory) -> Result<usize, Failure> {
        let of = &self.of;
        // SAFETY: I-16: all zero is a value of this struct; its mask says which fields count.
        let mut params: ucp_mem_map_params_t = unsafe { zeroed() };
        let fields = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
        params.field_mask = fields.into();
        params.address = memory.base_ptr().cast();
        params.length = memory.len_bytes() as usize;
        let mut mapped = null_mut();
        // SAFETY: I-21: the mover keeps the memory until it is unregistered.
        let status = unsafe { (of.ucp.ucp_mem_map)(of.context, &params, &mut mapped) };
        of.check("ucp_mem_map", status)?;
        let handle = self.next_handle;
        self.next_handle += 1;
        self.memories.insert(handle, mapped);
        Ok(handle)
    }

    fn key(&mut self, handle: usize, memory: &Memory) -> Result<LocalKey, Failure> {
        let (of, mapped) = (&self.of, self.mapped(handle)?);
        let (mut packed, mut len_bytes) = (null_mut(), 0);
        // SAFETY: I-16: a live context and memory, and two places.
        let status =
            unsafe { (of.ucp.ucp_rkey_pack)(of.context, mapped, &mut packed, &mut len_bytes) };
        of.check("ucp_rkey_pack", status)?;
        // SAFETY: I-16: the library says that so many bytes are there.
        let key = unsafe { std::slice::from_raw_parts(packed.cast::<u8>(), len_bytes) };
        let key = LocalKey {
            base: memory.base_ptr() as u64,
            key: Bytes::copy_from_slice(key),
        };
        // SAFETY: I-21: packed once, released once, copied before.
        unsafe { (of.ucp.ucp_rkey_buffer_release)(packed) };
        Ok(key)
    }

    fn unregister(&mut self, handle: usize) -> Result<(), Failure> {
        self.unmap(handle)
    }

    fn post(&mut self, request: &Request, handle: usize) -> Result<bool, Failure> {
        self.check_peer()?;
        let memory = self.mapped(handle)?;
        let Some(&rkey) = self.rkeys.get(request.key) else {
            return Err(self.of.failure("registration", UCS_ERR_INVALID_PARAM));
        };
        // SAFETY: I-16: all zero is a value of this struct; its mask says which fields count.
        let mut param: ucp_request_param_t = unsafe { zeroed() };
        param.op_attr_mask = UCP_OP_ATTR_FIELD_MEMH;
        param.memh = memory;
        let Request {
            local,
            bytes,
            remote,
            ..
        } = *request;
        let (call, started) = match request.is_read {
            // SAFETY: I-16: the stretch was checked against both registrations; I-21: it stays mapped, and
            // I-7, I-9: is not used otherwise, until the request is over or the worker is gone.
            false => ("ucp_put_nbx", unsafe {
                (self.of.ucp.ucp_put_nbx)(self.ep, local.cast(), bytes, remote, rkey, &param)
            }),
            // SAFETY: as above.
            true => ("ucp_get_nbx", unsafe {
                (self.of.ucp.ucp_get_nbx)(self.ep, local.cast(), bytes, remote, rkey, &param)
            }),
        };
        self.keep(call, started)?;
        Ok(true)
    }

    fn flush(&mut self) -> Result<(), Failure> {
        self.check_peer()?;
        // SAFETY: I-16: all zero is a value of this struct: no option.
        let param: ucp_request_param_t = unsafe { zeroed() };
        // SAFETY: I-21: a live endpoint.
        let request = unsafe { (self.of.ucp.ucp_ep_flush_nbx)(self.ep, &param) };
        self.keep("ucp_ep_flush_nbx", request)
    }

    fn pending(&self) -> usize {
        self.requests.len()
    }

    fn progress(&mut self) -> Result<bool, Failure> {
        // Not a step further with a dead peer: an answer that cannot be sent ends the process.
        if !self.ep.is_null() {
            self.check_peer()?;
        }
        let mut has_moved = self.of.progress();
        while let Some(&(call, request)) = self.requests.front() {
            match self.of.status(request) {
                UCS_INPROGRESS => break,
                status => {
                    self.requests.pop_front();
                    self.of.check(call, status)?;
                    has_moved = true;
                }
            }
        }
        Ok(has_moved)
    }

    fn arm(&mut self) -> Result<bool, Failure> {
        // SAFETY: I-21: a live worker, used in its own thread.
        match unsafe { (self.of.ucp.ucp_worker_arm)(self.of.worker) } {
            UCS_OK => Ok(true),
            UCS_ERR_BUSY => Ok(false),
            status => Err(self.of.failure("ucp_worker_arm", status)),
        }
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: I-21: it belongs to the worker, which lives as long as this borrow.
        unsafe { BorrowedFd::borrow_raw(self.event_fd) }
    }

    fn largest_bytes(&self) -> usize {
        usize::MAX
    }

    fn end(mut self) -> bool {
        let is_gone = self.close();
        if !is_gone {
            // Left as it is, with its worker and the cell of its errors: UCX, or the card, may go on with it.
            std::mem::forget(self);
        }
        is_gone
    }
}
