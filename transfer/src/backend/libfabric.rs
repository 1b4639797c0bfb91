//! libfabric as a one-sided transport: writes that complete when they are delivered, and reads.
//!
//! One fabric, domain and reliable-datagram endpoint for each connection, all in its mover's thread. Every
//! write is asked for with `FI_DELIVERY_COMPLETE`, so the end of the last one is arrival and no flush is
//! needed; a provider that does not promise that is refused. `-FI_EAGAIN` means that the completion queue
//! has to be read first.
//!
//! A remote address is an offset into the region or a virtual address, and a key is the provider's choice
//! or ours, as the *target's* mode says; both travel in the card.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_int, c_void};
use std::mem::zeroed;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::ptr::{null, null_mut};
use std::time::Duration;

use bytes::Bytes;
use kvgate_libfabric_sys::*;

use super::BackendKind;
use super::rma::{self, Fabric as _, Failure, LocalKey, Request};
use crate::config::LibfabricConfig;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind};
use crate::mem::Memory;
use crate::sync::thread;

/// Completions that may wait: more than requests under way.
const QUEUE_LENGTH: usize = 1024;
/// Completions taken at once.
const BATCH: usize = 64;
/// Longest address of an endpoint.
const ADDRESS_LIMIT_BYTES: usize = 512;
/// Longest time that requests get to end before the endpoint is closed.
const DRAIN: Duration = Duration::from_millis(100);
/// Registrations that the provider leaves to us need keys of their own; so many are drawn.
const KEY_DRAWS: usize = 8;

/// Loads the library.
///
/// # Errors
/// [`ErrorKind::BackendUnavailable`] with everything that was tried.
pub(crate) fn load(config: &LibfabricConfig) -> Result<Fabric, Error> {
    Fabric::load(&config.libraries).map_err(|absent| {
        let tried = absent
            .tried
            .iter()
            .map(|attempt| format!("{} ({})", attempt.path.display(), attempt.reason))
            .collect();
        let backend = BackendKind::Libfabric;
        ErrorKind::BackendUnavailable { backend, tried }.into()
    })
}

/// The objects of one connection. A null is one that was not made.
struct Objects {
    api: Fabric,
    info: *mut fi_info,
    fabric: *mut fid_fabric,
    domain: *mut fid_domain,
    cq: *mut fid_cq,
    av: *mut fid_av,
    ep: *mut fid_ep,
    memories: BTreeMap<usize, *mut fid_mr>,
}

/// One connection's half.
pub(crate) struct Endpoint {
    of: Objects,
    event_fd: c_int,
    peer: Option<fi_addr_t>,
    keys: Vec<u64>,
    next_handle: usize,
    pending: usize,
    /// Some of what is pending are reads.
    has_reads: bool,
}

impl Objects {
    fn failure(&self, call: &'static str, code: i64) -> Failure {
        Failure {
            backend: BackendKind::Libfabric,
            call,
            code,
            words: self.api.describe(code),
        }
    }

    fn check(&self, call: &'static str, code: i64) -> Result<(), Failure> {
        match code {
            0 => Ok(()),
            code => Err(self.failure(call, code)),
        }
    }

    /// What the provider offers at `local`.
    fn find(&mut self, provider: &str, local: IpAddr) -> Result<(), Error> {
        let invalid = || ErrorKind::InvalidArgument {
            what: "provider of libfabric",
            value: format!("{provider:?}"),
        };
        let name = CString::new(provider).map_err(|_| invalid())?;
        let node = CString::new(local.to_string()).map_err(|_| invalid())?;
        // SAFETY: I-16: null asks for an empty description with all its parts.
        let hints = unsafe { (self.api.fi_dupinfo)(null()) };
        if hints.is_null() {
            return Err(self.failure("fi_dupinfo", 0).into());
        }
        // SAFETY: I-16: all parts were made by the library; the name is a string of the C library, as it is
        // when `fi_freeinfo` frees it.
        unsafe {
            (*hints).caps = (FI_MSG | FI_RMA).into();
            (*(*hints).ep_attr).type_ = FI_EP_RDM;
            let modes = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
            (*(*hints).domain_attr).mr_mode = modes as c_int;
            (*(*hints).domain_attr).threading = FI_THREAD_DOMAIN;
            (*(*hints).fabric_attr).prov_name = libc::strdup(name.as_ptr());
            (*(*hints).tx_attr).op_flags = FI_DELIVERY_COMPLETE.into();
        }
        // SAFETY: I-16: strings that end with a zero, live hints, a place for the answer.
        let code = unsafe {
            (self.api.fi_getinfo)(
                API_VERSION,
                node.as_ptr(),
                null(),
                FI_SOURCE,
                hints,
                &mut self.info,
            )
        };
        // SAFETY: I-21: made above, freed once.
        unsafe { (self.api.fi_freeinfo)(hints) };
        self.check("fi_getinfo", code.into())?;
        // SAFETY: I-16: an answer has all its parts.
        let op_flags = unsafe { (*(*self.info).tx_attr).op_flags };
        if op_flags & u64::from(FI_DELIVERY_COMPLETE) == 0 {
            return Err(invalid().into());
        }
        Ok(())
    }

    /// Everything below the description, up to an enabled endpoint.
    fn open(&mut self) -> Result<(), Failure> {
        let none = null_mut();
        // SAFETY: I-16, for this and the calls below: objects that were made before and live, structs that
        // are zeroed and have room behind them, and places for the answers.
        let code =
            unsafe { (self.api.fi_fabric)((*self.info).fabric_attr, &mut self.fabric, none) };
        self.check("fi_fabric", code.into())?;
        let (fabric, info, made) = (self.fabric, self.info, &mut self.domain);
        // SAFETY: as above.
        let code = unsafe { call!((*fabric).ops, domain, fabric, info, made, none) };
        self.check("fi_domain", code)?;
        // SAFETY: as above; all zero is a value of this struct.
        let mut attr = Padded::new(unsafe { zeroed::<fi_cq_attr>() });
        attr.value.size = QUEUE_LENGTH;
        attr.value.format = FI_CQ_FORMAT_CONTEXT;
        attr.value.wait_obj = FI_WAIT_FD;
        let (domain, wanted, made) = (self.domain, &mut attr.value, &mut self.cq);
        // SAFETY: as above.
        let code = unsafe { call!((*domain).ops, cq_open, domain, wanted, made, none) };
        self.check("fi_cq_open", code)?;
        // SAFETY: as above; all zero is a value of this struct.
        let mut attr = Padded::new(unsafe { zeroed::<fi_av_attr>() });
        attr.value.type_ = FI_AV_TABLE;
        let (wanted, made) = (&mut attr.value, &mut self.av);
        // SAFETY: as above.
        let code = unsafe { call!((*domain).ops, av_open, domain, wanted, made, none) };
        self.check("fi_av_open", code)?;
        let made = &mut self.ep;
        // SAFETY: as above.
        let code = unsafe { call!((*domain).ops, endpoint, domain, info, made, none) };
        self.check("fi_endpoint", code)?;
        self.bind()
    }

    fn bind(&mut self) -> Result<(), Failure> {
        let both = u64::from(FI_TRANSMIT | FI_RECV);
        // SAFETY: I-16: a live endpoint and live objects of its domain.
        let (code, more) = unsafe {
            let ep: *mut fid = &mut (*self.ep).fid;
            let ops = (*ep).ops;
            let cq = call!(ops, bind, ep, &mut (*self.cq).fid, both);
            (cq, call!(ops, bind, ep, &mut (*self.av).fid, 0))
        };
        self.check("fi_ep_bind", code)?;
        self.check("fi_ep_bind", more)?;
        // SAFETY: as above.
        let code = unsafe {
            let ep: *mut fid = &mut (*self.ep).fid;
            call!((*ep).ops, control, ep, FI_ENABLE as c_int, null_mut())
        };
        self.check("fi_enable", code)
    }

    fn mr_mode(&self) -> u32 {
        // SAFETY: I-16: an answer of the library has all its parts.
        unsafe { (*(*self.info).domain_attr).mr_mode as u32 }
    }

    /// Random numbers of the length that the provider takes: nobody should guess a key.
    fn draw_key(&self) -> Result<u64, Failure> {
        let mut bytes = [0; 8];
        getrandom::fill(&mut bytes).map_err(|error| Failure {
            backend: BackendKind::Libfabric,
            call: "getrandom",
            code: 0,
            words: error.to_string(),
        })?;
        // SAFETY: I-16: an answer of the library has all its parts.
        let key_bytes = unsafe { (*(*self.info).domain_attr).mr_key_size };
        let bits = key_bytes.clamp(1, 8) as u32 * 8;
        Ok(u64::from_le_bytes(bytes) >> (64 - bits))
    }

    /// Registers a stretch under `requested`, or under a key of the provider.
    fn register(&self, memory: &Memory, requested: u64) -> Result<*mut fid_mr, i64> {
        let access = FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE;
        let (base, len_bytes) = (memory.base_ptr(), memory.len_bytes() as usize);
        let mut made = null_mut();
        // SAFETY: I-21: the mover keeps the memory until it is unregistered; a live domain.
        let code = unsafe {
            call!(
                (*self.domain).mr,
                reg,
                &mut (*self.domain).fid,
                base.cast(),
                len_bytes,
                access.into(),
                0,
                requested,
                0,
                &mut made,
                null_mut()
            )
        };
        if code == 0 { Ok(made) } else { Err(code) }
    }
}

/// Closes an object, and says what the library says. A null afterwards means that it is gone.
///
/// # Safety
/// Null, or a live object that nobody here uses any more, whose class has its description at the beginning.
unsafe fn close<T>(object: &mut *mut T) -> i64 {
    let description: *mut fid = object.cast();
    if description.is_null() {
        return 0;
    }
    // SAFETY: I-21: the caller's contract.
    let code = unsafe { call!((*description).ops, close, description) };
    if code == 0 {
        *object = null_mut();
    }
    code
}

impl Objects {
    /// Closes everything, those that stand on others first, up to the first that does not let itself be
    /// closed: it is in use, and so is what it stands on. Whether all are gone.
    fn close(&mut self) -> bool {
        // SAFETY: I-21, here and below: made once, null once closed, not used any more; every class has its
        // description at the beginning.
        if unsafe { close(&mut self.ep) } != 0 {
            return false;
        }
        while let Some(mut memory) = self.memories.first_entry() {
            // SAFETY: as above.
            if unsafe { close(memory.get_mut()) } != 0 {
                return false;
            }
            memory.remove();
        }
        // SAFETY: as above.
        unsafe {
            close(&mut self.av) == 0
                && close(&mut self.cq) == 0
                && close(&mut self.domain) == 0
                && close(&mut self.fabric) == 0
        }
    }
}

impl Drop for Objects {
    fn drop(&mut self) {
        // What is left when an endpoint could not be opened; it has no peer and no memory, so nothing of
        // anybody is touched by what does not close. After its end there is nothing.
        let _ = self.close();
        if !self.info.is_null() {
            // SAFETY: I-21: made once, freed once.
            unsafe { (self.api.fi_freeinfo)(self.info) };
        }
    }
}

impl Endpoint {
    /// An endpoint at `local`; it reaches the peer once it has its address.
    pub(crate) fn open(config: &LibfabricConfig, local: IpAddr) -> Result<Self, Error> {
        let mut of = Objects {
            api: load(config)?,
            info: null_mut(),
            fabric: null_mut(),
            domain: null_mut(),
            cq: null_mut(),
            av: null_mut(),
            ep: null_mut(),
            memories: BTreeMap::new(),
        };
        of.find(&config.provider, local.to_canonical())?;
        of.open()?;
        let mut event_fd: c_int = -1;
        let place: *mut c_void = (&raw mut event_fd).cast();
        // SAFETY: I-16: a live queue that was made with a descriptor to wait for, and a place for it.
        let code = unsafe {
            let cq: *mut fid = &mut (*of.cq).fid;
            call!((*cq).ops, control, cq, FI_GETWAIT as c_int, place)
        };
        of.check("fi_control", code)?;
        Ok(Self {
            of,
            event_fd,
            peer: None,
            keys: Vec::new(),
            next_handle: 0,
            pending: 0,
            has_reads: false,
        })
    }

    /// So many requests are over.
    fn take_off(&mut self, count: usize) {
        self.pending = self.pending.saturating_sub(count);
        self.has_reads &= self.pending > 0;
    }

    /// Takes errors until nothing is under way: the end of the peer has ended it already.
    fn drain(&mut self) {
        let deadline = Deadline::after(DRAIN);
        while self.pending > 0 && !deadline.has_passed() {
            if self.progress() == Ok(false) {
                thread::yield_now();
            }
        }
    }

    /// The error that waits in the completion queue.
    fn read_error(&mut self) -> Failure {
        // SAFETY: I-16: all zero is a value of this struct, and there is room behind it.
        let mut entry = Padded::new(unsafe { zeroed::<fi_cq_err_entry>() });
        // SAFETY: I-16: a live queue and a place for one entry.
        let read = unsafe { call!((*self.of.cq).ops, readerr, self.of.cq, &mut entry.value, 0) };
        if read < 0 {
            return self.of.failure("fi_cq_readerr", read);
        }
        let entry = &entry.value;
        let mut failure = self.of.failure("completion", -i64::from(entry.err));
        // SAFETY: I-16: what the queue has just said; a null buffer means that the answer is a constant.
        let words = unsafe {
            match (*(*self.of.cq).ops).strerror {
                Some(words) => words(
                    self.of.cq,
                    entry.prov_errno,
                    entry.err_data.cast_const(),
                    null_mut(),
                    0,
                ),
                None => null(),
            }
        };
        if !words.is_null() {
            // SAFETY: I-16: not null, a string that ends with a zero.
            let words = unsafe { CStr::from_ptr(words) }.to_string_lossy();
            failure.words = format!("{}; {words} ({})", failure.words, entry.prov_errno);
        }
        failure
    }
}

impl rma::Fabric for Endpoint {
    const KIND: BackendKind = BackendKind::Libfabric;

    fn address(&mut self) -> Result<Bytes, Failure> {
        let mut address = vec![0u8; ADDRESS_LIMIT_BYTES];
        let mut len_bytes = address.len();
        // SAFETY: I-16: a live endpoint, and a place with its length.
        let code = unsafe {
            call!(
                (*self.of.ep).cm,
                getname,
                &mut (*self.of.ep).fid,
                address.as_mut_ptr().cast(),
                &mut len_bytes
            )
        };
        self.of.check("fi_getname", code)?;
        address.truncate(len_bytes);
        Ok(address.into())
    }

    fn connect(&mut self, address: &[u8], keys: &[Bytes]) -> Result<(), Failure> {
        let wrong = |words: &str| Failure {
            backend: BackendKind::Libfabric,
            call: "card",
            code: 0,
            words: words.into(),
        };
        // SAFETY: I-16: an answer of the library has all its parts.
        let expected_bytes = unsafe { (*self.of.info).src_addrlen };
        if address.len() != expected_bytes {
            return Err(wrong("the peer's address is of another kind"));
        }
        for key in keys {
            let key = <[u8; 8]>::try_from(&key[..]).map_err(|_| wrong("not a key"))?;
            self.keys.push(u64::from_le_bytes(key));
        }
        let mut peer = 0;
        // SAFETY: I-16: a live vector, one address of the length of our own, a place for its number.
        let count = unsafe {
            call!(
                (*self.of.av).ops,
                insert,
                self.of.av,
                address.as_ptr().cast(),
                1,
                &mut peer,
                0,
                null_mut()
            )
        };
        if count != 1 {
            return Err(self.of.failure("fi_av_insert", count.min(0)));
        }
        self.peer = Some(peer);
        Ok(())
    }

    fn register(&mut self, memory: &Memory) -> Result<usize, Failure> {
        let mut draws = 0;
        let made = loop {
            draws += 1;
            match self.of.register(memory, self.of.draw_key()?) {
                Ok(made) => break made,
                Err(code) if code == -i64::from(FI_ENOKEY) && draws < KEY_DRAWS => {}
                Err(code) => return Err(self.of.failure("fi_mr_reg", code)),
            }
        };
        let handle = self.next_handle;
        self.next_handle += 1;
        self.of.memories.insert(handle, made);
        Ok(handle)
    }

    fn key(&mut self, handle: usize, memory: &Memory) -> Result<LocalKey, Failure> {
        let Some(&made) = self.of.memories.get(&handle) else {
            return Err(self.of.failure("registration", 0));
        };
        let base = match self.of.mr_mode() & FI_MR_VIRT_ADDR {
            0 => 0,
            _ => memory.base_ptr() as u64,
        };
        // SAFETY: I-16: a live registration.
        let key = unsafe { (*made).key };
        let key = Bytes::copy_from_slice(&key.to_le_bytes());
        Ok(LocalKey { base, key })
    }

    fn unregister(&mut self, handle: usize) -> Result<(), Failure> {
        let Some(memory) = self.of.memories.get_mut(&handle) else {
            return Ok(());
        };
        // SAFETY: I-21: a live registration that no request of this side uses; gone only if it says so.
        let code = unsafe { close(memory) };
        self.of.check("fi_close", code)?;
        self.of.memories.remove(&handle);
        Ok(())
    }

    fn post(&mut self, request: &Request, handle: usize) -> Result<bool, Failure> {
        let (key, memory) = (self.keys.get(request.key), self.of.memories.get(&handle));
        let (Some(peer), Some(&key), Some(&memory)) = (self.peer, key, memory) else {
            return Err(self.of.failure("registration", 0));
        };
        let (ep, remote) = (self.of.ep, request.remote);
        let (local, bytes) = (request.local.cast::<c_void>(), request.bytes);
        let no_context = null_mut();
        // SAFETY: I-16: the stretch was checked against both registrations; I-21: it stays mapped, and I-7,
        // I-9: is not used otherwise, until the request is over or the endpoint is closed.
        let code = unsafe {
            let (ops, desc) = ((*ep).rma, (*memory).mem_desc);
            match request.is_read {
                false => call!(
                    ops, write, ep, local, bytes, desc, peer, remote, key, no_context
                ),
                true => call!(
                    ops, read, ep, local, bytes, desc, peer, remote, key, no_context
                ),
            }
        };
        match code {
            0 => {
                self.pending += 1;
                self.has_reads |= request.is_read;
                Ok(true)
            }
            code if code == -i64::from(FI_EAGAIN) => Ok(false),
            code => Err(self.of.failure("fi_write or fi_read", code)),
        }
    }

    fn flush(&mut self) -> Result<(), Failure> {
        // Every write has said that it is delivered.
        Ok(())
    }

    fn pending(&self) -> usize {
        self.pending
    }

    fn progress(&mut self) -> Result<bool, Failure> {
        // SAFETY: I-16: all zero is a value of this struct.
        let mut entries: [fi_cq_entry; BATCH] = unsafe { zeroed() };
        let place = entries.as_mut_ptr().cast();
        // SAFETY: I-16: a live queue of this format, and places for so many entries.
        let read = unsafe { call!((*self.of.cq).ops, read, self.of.cq, place, BATCH) };
        match usize::try_from(read) {
            Ok(count) => {
                self.take_off(count);
                Ok(count > 0)
            }
            Err(_) if read == -i64::from(FI_EAGAIN) => Ok(false),
            Err(_) if read == -i64::from(FI_EAVAIL) => {
                let failure = self.read_error();
                self.take_off(1);
                Err(failure)
            }
            Err(_) => Err(self.of.failure("fi_cq_read", read)),
        }
    }

    fn arm(&mut self) -> Result<bool, Failure> {
        // SAFETY: I-16: a live fabric and one live object that can be waited for.
        let code = unsafe {
            let mut all: [*mut fid; 1] = [&mut (*self.of.cq).fid];
            let ops = (*self.of.fabric).ops;
            call!(ops, trywait, self.of.fabric, all.as_mut_ptr(), 1)
        };
        match code {
            0 => Ok(true),
            code if code == -i64::from(FI_EAGAIN) => Ok(false),
            code => Err(self.of.failure("fi_trywait", code)),
        }
    }

    fn event_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: I-21: it belongs to the queue, which lives as long as this borrow.
        unsafe { BorrowedFd::borrow_raw(self.event_fd) }
    }

    fn largest_bytes(&self) -> usize {
        // SAFETY: I-16: an answer of the library has all its parts.
        unsafe { (*(*self.of.info).ep_attr).max_msg_size }
    }

    fn end(mut self) -> bool {
        self.drain();
        // Closing an endpoint inside the answer to a read ends the process in some versions (the provider
        // reports the request twice).
        let is_gone = !self.has_reads && self.of.close();
        if !is_gone {
            // Left as it is: the provider, or the card, may go on with it.
            std::mem::forget(self);
        }
        is_gone
    }
}
