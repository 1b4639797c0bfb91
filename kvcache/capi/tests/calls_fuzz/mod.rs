//! What a fuzzer throws at the C interface: a program of calls, written in bytes. Whatever the order of the
//! calls and whatever the handles and numbers in them, each call answers one of the statuses of the header,
//! a failure has a message, and no call finds a defect of the library. Under ASan none touches memory that it
//! should not. The target is in `fuzz/`, the programs that every test run repeats in `tests/seeds/calls`.

mod cache;

use std::ffi::{CStr, CString};
use std::ptr::null_mut;

use kvgate::*;

/// Calls of one program.
const MAX_CALLS: usize = 200;
/// Places for handles of any kind.
const PLACES: usize = 16;
const SLOT_BYTES: u64 = 512;
const SLOTS: u32 = 8;

/// What the program says next: bytes, and zeros behind its end.
pub(crate) struct Program<'a> {
    bytes: &'a [u8],
}

impl Program<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.bytes.split_first() else {
            return 0;
        };
        self.bytes = rest;
        *first
    }

    /// Mostly small, now and then anything.
    fn number(&mut self) -> u32 {
        match self.byte() {
            small @ 0..=0xEF => u32::from(small % 12),
            _ => u32::from_le_bytes([self.byte(), self.byte(), self.byte(), self.byte()]),
        }
    }

    fn wide(&mut self) -> u64 {
        match self.byte() {
            small @ 0..=0xEF => u64::from(small % 12) * (SLOT_BYTES / 2),
            _ => u64::from(self.number()) << (self.byte() % 64),
        }
    }

    /// Up to seven numbers.
    fn numbers(&mut self) -> Vec<u32> {
        (0..self.byte() % 8).map(|_| self.number()).collect()
    }

    /// Mostly the right size of a versioned struct.
    fn bytes_of<T>(&mut self) -> u32 {
        match self.byte() {
            0xF0..=0xFF => self.number(),
            _ => size_of::<T>() as u32,
        }
    }

    fn is_over(&self) -> bool {
        self.bytes.is_empty()
    }
}

/// A handle of some kind, as a number.
type Handle = usize;

/// Gives a handle back.
type Release = fn(Handle) -> kv_status;

/// The handles of a program, and how each kind is released.
pub(crate) struct Machine<'a> {
    program: Program<'a>,
    places: [Handle; PLACES],
    /// Everything that was made, so that nothing is left behind.
    made: Vec<(Handle, Release)>,
    /// Answers in all, and those that were not a refusal.
    pub(crate) calls: usize,
    pub(crate) good: usize,
}

/// How a handle of a kind is given back.
macro_rules! releaser {
    ($release:ident) => {
        // SAFETY: handles are numbers that are looked up, never followed.
        |handle| unsafe { $release(handle as *mut _) }
    };
}
use releaser;

impl Machine<'_> {
    /// Any of the handles: of the right kind or not, released already or never made.
    fn any<T>(&mut self) -> *mut T {
        let place = usize::from(self.program.byte());
        match place {
            0xF8.. => null_mut(),
            0xF0..=0xF7 => (place * 0x1001) as *mut T,
            _ => self.places[place % PLACES] as *mut T,
        }
    }

    fn keep<T>(&mut self, handle: *mut T, release: Release) {
        if !handle.is_null() {
            self.made.push((handle as Handle, release));
            let place = usize::from(self.program.byte()) % PLACES;
            self.places[place] = handle as Handle;
        }
    }

    /// What holds of every answer.
    fn answered(&mut self, status: kv_status) {
        self.calls += 1;
        self.good += usize::from(status == kv_status::Ok);
        assert_ne!(status, kv_status::Internal, "{}", message());
        assert!(
            status == kv_status::Ok || !message().is_empty(),
            "{status:?} without a message"
        );
    }

    fn agent(&mut self) {
        let names = [c"a", c"", c"\xff", c"a longer name of an agent"];
        let name = names[usize::from(self.program.byte()) % names.len()];
        let secret = [7_u8; 4];
        let options = kv_agent_options {
            struct_bytes: self.program.bytes_of::<kv_agent_options>(),
            queue_capacity: self.program.number(),
            name: name.as_ptr(),
            metadata: secret.as_ptr(),
            metadata_bytes: usize::from(self.program.byte() % 5),
            auth_token: secret.as_ptr(),
            auth_token_bytes: usize::from(self.program.byte() % 5),
        };
        let mut agent = null_mut();
        // SAFETY: local values, as long as they say.
        let status = unsafe { kv_agent_create(&options, &mut agent) };
        self.answered(status);
        self.keep(agent, releaser!(kv_agent_release));
    }

    fn memory(&mut self) {
        let (kind, bytes) = (self.program.number(), self.program.wide());
        let mut memory = null_mut();
        // SAFETY: as above.
        let status =
            unsafe { kv_memory_create(kind, bytes.min(1 << 20), c"m".as_ptr(), &mut memory) };
        self.answered(status);
        self.keep(memory, releaser!(kv_memory_release));
    }

    fn region(&mut self) {
        let pools: Vec<_> = (0..self.program.byte() % 4)
            .map(|_| kv_pool_geometry {
                offset_bytes: self.program.wide(),
                stride_bytes: self.program.wide(),
                slot_bytes: self.program.wide(),
                slot_count: self.program.number(),
                reserved: u32::from(self.program.byte() == 0xFF),
            })
            .collect();
        let (agent, memory) = (self.any(), self.any());
        let mut region = null_mut();
        // SAFETY: as above.
        let status =
            unsafe { kv_agent_register(agent, memory, pools.as_ptr(), pools.len(), &mut region) };
        self.answered(status);
        self.keep(region, releaser!(kv_region_release));
    }

    fn connect(&mut self) {
        let (one, other) = (self.any(), self.any());
        let (mut there, mut here) = (0, 0);
        // SAFETY: as above.
        let status = unsafe { kv_agent_connect_local(one, other, &mut there, &mut here) };
        self.answered(status);
    }

    fn descriptors(&mut self) {
        let mut incarnation = kv_incarnation::default();
        let (agent, is_remote) = (self.any(), self.program.byte().is_multiple_of(2));
        // SAFETY: as above.
        let status = unsafe { kv_agent_incarnation(agent, &mut incarnation) };
        self.answered(status);
        let remote = if is_remote {
            &raw const incarnation
        } else {
            null_mut()
        };
        let mut list = null_mut();
        // SAFETY: as above.
        let status = unsafe { kv_descriptors_create(remote, &mut list) };
        self.answered(status);
        self.keep(list, releaser!(kv_descriptors_release));
        self.push(list);
    }

    fn push(&mut self, list: *mut kv_descriptors) {
        let (pool, slots) = (self.program.number(), self.program.numbers());
        // SAFETY: as above.
        let status = unsafe { kv_descriptors_push(list, pool, slots.as_ptr(), slots.len()) };
        self.answered(status);
    }

    fn prepare(&mut self) {
        let (op, peer) = (self.program.number(), self.program.number());
        let (agent, local, remote) = (self.any(), self.any(), self.any());
        let mut prepared = null_mut();
        // SAFETY: as above.
        let status = unsafe { kv_agent_prepare(agent, op, local, remote, peer, &mut prepared) };
        self.answered(status);
        self.keep(prepared, releaser!(kv_prepared_release));
    }

    fn post(&mut self) {
        let tickets: Vec<_> = (0..self.program.byte() % 4)
            .map(|_| kv_ticket {
                stage: self.program.number(),
                chunk: self.program.number(),
            })
            .collect();
        let options = kv_post_options {
            struct_bytes: self.program.bytes_of::<kv_post_options>(),
            source: self.program.number(),
            epoch: self.program.wide(),
            tickets: tickets.as_ptr(),
            ticket_count: tickets.len(),
            timeout_ms: 0,
            priority: self.program.number(),
            reserved: u32::from(self.program.byte() == 0xFF),
        };
        let (agent, prepared) = (self.any(), self.any());
        let mut transfer = null_mut();
        // SAFETY: as above.
        let status = unsafe { kv_agent_post(agent, prepared, &options, &mut transfer) };
        self.answered(status);
        self.keep(transfer, releaser!(kv_transfer_release));
    }

    fn transfer(&mut self) {
        let transfer = self.any();
        let (mut state, mut visibility) = (0, 0);
        // SAFETY: as above.
        let status = unsafe {
            match self.program.byte() % 3 {
                0 => kv_transfer_status(transfer, &mut state, &mut visibility),
                1 => kv_transfer_wait(transfer, 1, &mut visibility),
                _ => kv_transfer_cancel(transfer),
            }
        };
        self.answered(status);
    }

    fn flight(&mut self) {
        let chunks: Vec<_> = (0..self.program.byte() % 4)
            .map(|_| kv_chunk {
                stage: self.program.number(),
                chunk: self.program.number(),
                writer: self.program.number(),
                descriptor_count: self.program.number(),
            })
            .collect();
        let writers: Vec<_> = (0..self.program.byte() % 3)
            .map(|_| kv_writer {
                peer: self.program.number(),
                rank: self.program.number(),
            })
            .collect();
        let (agent, epoch) = (self.any(), self.program.wide());
        let mut flight = null_mut();
        // SAFETY: as above.
        let status = unsafe {
            kv_flight_create(
                agent,
                epoch,
                chunks.as_ptr(),
                chunks.len(),
                writers.as_ptr(),
                writers.len(),
                &mut flight,
            )
        };
        self.answered(status);
        self.keep(flight, releaser!(kv_flight_release));
    }

    fn with_flight(&mut self) {
        let (flight, number) = (self.any(), self.program.number());
        let mut stage = kv_stage {
            struct_bytes: self.program.bytes_of::<kv_stage>(),
            state: 0,
            missing: 0,
            reserved: 0,
        };
        // SAFETY: as above.
        let status = unsafe {
            match self.program.byte() % 7 {
                0 => kv_flight_arm(flight),
                1 => kv_flight_check(flight, number, &mut stage),
                2 => kv_flight_wait(flight, number, 0),
                3 => kv_flight_close(flight),
                4 => kv_flight_abort(flight, c"given up".as_ptr()),
                5 => kv_flight_writer_answered(flight, number, 0),
                _ => kv_flight_wait_quiet(flight, 0),
            }
        };
        self.answered(status);
    }

    fn events(&mut self) {
        let (agent, peer) = (self.any(), self.program.number());
        let words = [peer as u8; 9];
        // SAFETY: plain numbers and pointers, for which all zero is a value.
        let mut event: kv_event = unsafe { std::mem::zeroed() };
        event.struct_bytes = self.program.bytes_of::<kv_event>();
        // SAFETY: as above.
        let mut info: kv_peer_info = unsafe { std::mem::zeroed() };
        info.struct_bytes = self.program.bytes_of::<kv_peer_info>();
        let (mut pool, mut length, mut descriptor) = (0, 0, 0);
        // SAFETY: as above.
        let status = unsafe {
            match self.program.byte() % 7 {
                0 => kv_agent_next_event(agent, 0, &mut event),
                1 => kv_agent_send(agent, peer, words.as_ptr(), words.len()),
                2 => kv_agent_peer(agent, peer, &mut info),
                3 => kv_agent_peer_pool(agent, peer, 0, &mut pool, null_mut()),
                4 => kv_agent_peer_metadata(agent, peer, null_mut(), 0, &mut length),
                5 => kv_agent_event_fd(agent, &mut descriptor),
                _ => kv_agent_report_progress(agent),
            }
        };
        self.answered(status);
    }

    fn region_of(&mut self) {
        let (region, index) = (self.any(), self.program.number());
        let mut pool = 0;
        // SAFETY: as above.
        let status = unsafe {
            match self.program.byte() % 2 {
                0 => kv_region_pool(region, index, &mut pool),
                _ => kv_region_close(region, 0),
            }
        };
        self.answered(status);
    }

    /// Gives a handle back, perhaps as one of another kind, perhaps for the second time.
    fn release(&mut self) {
        let handle: *mut u8 = self.any();
        let how = match usize::from(self.program.byte()).checked_rem(self.made.len()) {
            Some(index) => self.made[index].1,
            None => releaser!(kv_agent_release),
        };
        let status = how(handle as Handle);
        self.answered(status);
    }

    fn shutdown(&mut self) {
        let agent = self.any();
        // SAFETY: as above.
        let status = unsafe { kv_agent_shutdown(agent, 0, null_mut()) };
        self.answered(status);
    }

    fn step(&mut self) {
        match self.program.byte() % 22 {
            0 => self.agent(),
            1 => self.memory(),
            2 => self.region(),
            3 => self.connect(),
            4 => self.descriptors(),
            5 => {
                let list = self.any();
                self.push(list);
            }
            6 => self.prepare(),
            7 => self.post(),
            8 => self.transfer(),
            9 => self.flight(),
            10 | 11 => self.with_flight(),
            12 => self.events(),
            13 => self.region_of(),
            14 => self.release(),
            15 => self.shutdown(),
            more => self.cache_step(more),
        }
    }

    /// Two connected agents with a pool each, so that short programs reach transfers; numbers of pools and
    /// peers are small, so that the program hits them.
    fn prepare_world(&mut self) {
        for place in 0..2 {
            let mut agent = null_mut();
            // SAFETY: numbers and pointers, for which all zero is a value.
            let mut options: kv_agent_options = unsafe { std::mem::zeroed() };
            options.struct_bytes = size_of::<kv_agent_options>() as u32;
            options.name = c"fuzzed".as_ptr();
            let (mut memory, mut region) = (null_mut(), null_mut());
            let pool = kv_pool_geometry {
                offset_bytes: 0,
                stride_bytes: SLOT_BYTES,
                slot_bytes: SLOT_BYTES,
                slot_count: SLOTS,
                reserved: 0,
            };
            let bytes = SLOT_BYTES * u64::from(SLOTS);
            // SAFETY: local values, as long as they say.
            let all = unsafe {
                [
                    kv_agent_create(&options, &mut agent),
                    kv_memory_create(1, bytes, c"m".as_ptr(), &mut memory),
                    kv_agent_register(agent, memory, &pool, 1, &mut region),
                ]
            };
            assert_eq!(all, [kv_status::Ok; 3], "{}", message());
            self.made
                .push((agent as Handle, releaser!(kv_agent_release)));
            self.made
                .push((memory as Handle, releaser!(kv_memory_release)));
            self.made
                .push((region as Handle, releaser!(kv_region_release)));
            for (index, handle) in [agent as Handle, memory as Handle, region as Handle]
                .into_iter()
                .enumerate()
            {
                self.places[index * 2 + place] = handle;
            }
        }
        let (mut there, mut here) = (0, 0);
        let (one, other) = (self.places[0] as *mut _, self.places[1] as *mut _);
        // SAFETY: as above.
        let status = unsafe { kv_agent_connect_local(one, other, &mut there, &mut here) };
        assert_eq!(status, kv_status::Ok, "{}", message());
    }
}

/// Runs a program and gives back everything that it made; how many calls it had, and how many of them were
/// not refused.
pub(crate) fn calls(bytes: &[u8]) -> (usize, usize) {
    let mut machine = Machine {
        program: Program { bytes },
        places: [0; PLACES],
        made: Vec::new(),
        calls: 0,
        good: 0,
    };
    machine.prepare_world();
    machine.prepare_cache();
    while !machine.program.is_over() && machine.calls < MAX_CALLS {
        machine.step();
    }
    for (handle, release) in std::mem::take(&mut machine.made).into_iter().rev() {
        let status = release(handle);
        // Unless the program has given it back by itself.
        let gone = status == kv_status::InvalidArgument && !message().is_empty();
        assert!(status == kv_status::Ok || gone, "{status:?}: {}", message());
    }
    (machine.calls, machine.good)
}

/// The message of the last failure of this thread.
fn message() -> String {
    // SAFETY: the string of this thread, which nothing replaces meanwhile.
    let text = unsafe { CStr::from_ptr(kv_last_error_message()) };
    text.to_str().expect("a message is UTF-8").to_owned()
}

/// Text for C; a zero ends it.
fn text(words: &str) -> CString {
    CString::new(words.split('\0').next().unwrap_or_default()).expect("no zero is left")
}
