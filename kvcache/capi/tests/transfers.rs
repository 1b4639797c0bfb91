//! Posting, waiting and the event descriptor, within one process.
#![allow(clippy::unwrap_used)]

#[macro_use]
mod support;

use std::ffi::CStr;
use std::os::fd::BorrowedFd;
use std::ptr::{null, null_mut};

use kvgate::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use support::side::*;
use support::{PATIENCE_MS, message};

fn event() -> kv_event {
    kv_event {
        struct_bytes: size_of::<kv_event>() as u32,
        kind: 0,
        peer: 0,
        is_proven: 0,
        bytes: null(),
        length_bytes: 0,
    }
}

fn check(flight: *mut kv_flight) -> (u32, u32) {
    let mut answer = kv_stage {
        struct_bytes: size_of::<kv_stage>() as u32,
        state: 0,
        missing: 0,
        reserved: 0,
    };
    is!(Ok, kv_flight_check(flight, 0, &mut answer));
    (answer.state, answer.missing)
}

/// Waits until the descriptor is readable and clears it.
fn await_readable(fd: i32) {
    // SAFETY: the agent that owns it lives longer than every use here.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let timeout = Timespec {
        tv_sec: 10,
        tv_nsec: 0,
    };
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    assert_eq!(
        poll(&mut fds, Some(&timeout)).unwrap(),
        1,
        "the descriptor becomes readable"
    );
    rustix::io::read(fd, &mut [0; 8]).unwrap();
}

fn is_readable(fd: i32) -> bool {
    // SAFETY: as above.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).unwrap() == 1
}

/// Clears the descriptor, whatever it was.
fn clear(fd: i32) {
    while is_readable(fd) {
        await_readable(fd);
    }
}

#[test]
fn bytes_land_behind_the_gate_and_the_transfer_says_how_far() {
    let (prefill, decode) = Side::pair();
    let flight = flight_of(&decode, 1);
    assert_eq!(check(flight), (kv_stage_state::Pending as u32, 1));
    // SAFETY: slot 0 of the sender, which nothing reads yet.
    unsafe { prefill.base.write_bytes(7, SLOT as usize) };
    let prepared = prefill.prepare(3);
    let transfer = prefill.post(prepared, 1, &[kv_ticket { stage: 0, chunk: 0 }]);
    is!(Ok, kv_flight_wait(flight, 0, PATIENCE_MS));
    assert_eq!(check(flight), (kv_stage_state::Ready as u32, 0));
    // SAFETY: slot 3 of the receiver, behind its gate.
    let found = unsafe { std::slice::from_raw_parts(decode.base.add(3 * SLOT as usize), 64) };
    assert_eq!(found, [7; 64]);
    let (mut state, mut visibility) = (0, 0);
    is!(Ok, kv_transfer_wait(transfer, PATIENCE_MS, &mut visibility));
    assert_eq!(visibility, kv_visibility::RemoteVisible as u32);
    is!(
        Ok,
        kv_transfer_status(transfer, &mut state, &mut visibility)
    );
    assert_eq!((state, visibility), (kv_transfer_state::Done as u32, 3));
    is!(Ok, kv_transfer_cancel(transfer));
    is!(Ok, kv_transfer_wait(transfer, 0, null_mut()));
    is!(Ok, kv_flight_close(flight));
    is!(Ok, kv_flight_wait_quiet(flight, PATIENCE_MS));
    is!(Ok, kv_flight_release(flight));
    is!(Ok, kv_transfer_release(transfer));
    is!(Ok, kv_prepared_release(prepared));
    prefill.end();
    decode.end();
}

#[test]
fn whatever_was_not_there_yet_makes_the_descriptor_readable() {
    let (prefill, decode) = Side::pair();
    let mut fd = 0;
    is!(Ok, kv_agent_event_fd(decode.agent, &mut fd));
    await_readable(fd);
    // Events.
    let mut found = event();
    is!(
        Ok,
        kv_agent_next_event(decode.agent, PATIENCE_MS, &mut found)
    );
    assert_eq!(found.kind, kv_event_kind::PeerUp as u32);
    is!(TimedOut, kv_agent_next_event(decode.agent, 0, &mut found));
    assert!(!is_readable(fd));
    is!(
        Ok,
        kv_agent_send(prefill.agent, prefill.peer, b"hello".as_ptr(), 5)
    );
    await_readable(fd);
    is!(Ok, kv_agent_next_event(decode.agent, 0, &mut found));
    // SAFETY: the library's bytes, good until the next event of this thread.
    let bytes = unsafe { std::slice::from_raw_parts(found.bytes, found.length_bytes) };
    assert_eq!(
        (bytes, found.kind),
        (&b"hello"[..], kv_event_kind::Message as u32)
    );
    // Gates.
    let flight = flight_of(&decode, 1);
    clear(fd);
    is!(TimedOut, kv_flight_wait(flight, 0, 1));
    let prepared = prefill.prepare(1);
    let transfer = prefill.post(prepared, 1, &[kv_ticket { stage: 0, chunk: 0 }]);
    await_readable(fd);
    is!(Ok, kv_flight_wait(flight, 0, 0));
    // Transfers: the sender has a descriptor of its own.
    let mut senders_fd = 0;
    is!(Ok, kv_agent_event_fd(prefill.agent, &mut senders_fd));
    loop {
        await_readable(senders_fd);
        let mut state = 0;
        is!(Ok, kv_transfer_status(transfer, &mut state, null_mut()));
        if state == kv_transfer_state::Done as u32 {
            break;
        }
    }
    // The quiet of a flight that its writer has to answer for.
    let second = flight_of(&decode, 2);
    is!(Ok, kv_flight_abort(second, c"not wanted".as_ptr()));
    is!(TimedOut, kv_flight_wait_quiet(second, 0));
    clear(fd);
    is!(Ok, kv_flight_writer_answered(second, decode.peer, 0));
    await_readable(fd);
    is!(Ok, kv_flight_wait_quiet(second, 0));
    is!(Ok, kv_flight_close(flight));
    is!(Ok, kv_flight_wait_quiet(flight, PATIENCE_MS));
    is!(Ok, kv_flight_release(flight));
    is!(Ok, kv_flight_release(second));
    is!(Ok, kv_transfer_release(transfer));
    is!(Ok, kv_prepared_release(prepared));
    prefill.end();
    decode.end();
}

/// A gate that is not armed keeps no waker: what lands right behind the arming would tell nobody.
#[test]
fn whoever_was_told_not_armed_is_woken_by_the_arming_and_by_the_end() {
    let (prefill, decode) = Side::pair();
    let mut fd = 0;
    is!(Ok, kv_agent_event_fd(decode.agent, &mut fd));
    for epoch in 1..=3 {
        let flight = unarmed_flight_of(&decode, epoch);
        clear(fd);
        assert_eq!(check(flight), (kv_stage_state::NotArmed as u32, 1));
        is!(NotArmed, kv_flight_wait(flight, 0, 0));
        assert!(!is_readable(fd));
        match epoch {
            1 => is!(Ok, kv_flight_arm(flight)),
            2 => is!(Ok, kv_flight_close(flight)),
            _ => is!(Ok, kv_flight_abort(flight, c"enough".as_ptr())),
        }
        await_readable(fd);
        let expected = match epoch {
            1 => kv_stage_state::Pending,
            _ => kv_stage_state::Failed,
        };
        assert_eq!(check(flight).0, expected as u32);
        is!(Ok, kv_flight_release(flight));
    }
    prefill.end();
    decode.end();
}

#[test]
fn a_handle_may_be_released_while_another_thread_waits_with_it() {
    let (prefill, decode) = Side::pair();
    let flight = flight_of(&decode, 1);
    let address = flight.addr();
    let waiting = std::thread::spawn(move || {
        let flight = std::ptr::without_provenance_mut::<kv_flight>(address);
        // SAFETY: a handle; it may be gone before it is looked up, which is an answer too.
        unsafe { kv_flight_wait(flight, 0, PATIENCE_MS) }
    });
    is!(Ok, kv_flight_release(flight));
    let answer = waiting.join().unwrap();
    // Released before the thread has looked the handle up, or while it waits.
    let expected = [kv_status::InvalidArgument, kv_status::Failed];
    assert!(expected.contains(&answer), "{answer:?}");
    prefill.end();
    decode.end();
}

#[test]
fn mistakes_of_a_transfer_are_named() {
    let (prefill, decode) = Side::pair();
    let mut info = peer_info();
    is!(Ok, kv_agent_peer(prefill.agent, prefill.peer, &mut info));
    assert_eq!((info.is_up, info.backend), (1, kv_backend::Local as u32));
    let (mut name, mut length) = ([0_u8; 6], 0);
    let into = name.as_mut_ptr();
    is!(
        InvalidArgument,
        kv_agent_peer_metadata(prefill.agent, prefill.peer, into, 5, &mut length)
    );
    assert_eq!(length, 6);
    is!(
        Ok,
        kv_agent_peer_metadata(prefill.agent, prefill.peer, into, 6, &mut length)
    );
    assert_eq!(&name, b"decode");
    let (mut pool, mut geometry) = (0, prefill_geometry());
    is!(
        Ok,
        kv_agent_peer_pool(prefill.agent, prefill.peer, 0, &mut pool, &mut geometry)
    );
    assert_eq!(geometry, prefill_geometry());

    let prepare_op = |op: u32, local: *mut kv_descriptors, remote: *mut kv_descriptors| {
        let mut prepared = null_mut();
        // SAFETY: live handles.
        unsafe {
            kv_agent_prepare(
                prefill.agent,
                op,
                local,
                remote,
                prefill.peer,
                &mut prepared,
            )
        }
    };
    let prepare = |local, remote| prepare_op(kv_op::Write as u32, local, remote);
    let local = prefill.list(null(), prefill.pool, 0);
    let remote = prefill.list(&info.incarnation, pool, 4);
    assert_eq!(prepare_op(0, local, remote), kv_status::InvalidArgument);
    assert!(message().contains("kv_op"), "{}", message());
    assert_eq!(prepare(local, remote), kv_status::InvalidArgument);
    assert!(message().contains("slot 4"), "{}", message());
    let mut former = info.incarnation;
    former.bytes[0] ^= 1;
    let of_former = prefill.list(&former, pool, 0);
    assert_eq!(prepare(local, of_former), kv_status::Stale);
    assert_eq!(prepare(local, local), kv_status::InvalidArgument);

    let prepared = prefill.prepare(0);
    let mut options = post_options(1, &[]);
    let mut transfer = null_mut();
    for source in [0, 3, u32::MAX] {
        options.source = source;
        is!(
            InvalidArgument,
            kv_agent_post(prefill.agent, prepared, &options, &mut transfer)
        );
        assert!(message().contains("kv_source"), "{}", message());
    }
    let mut options = post_options(1, &[]);
    options.priority = 2;
    is!(
        InvalidArgument,
        kv_agent_post(prefill.agent, prepared, &options, &mut transfer)
    );
    assert!(message().contains("kv_priority"), "{}", message());
    options.priority = kv_priority::Background as u32;
    options.reserved = 1;
    is!(
        InvalidArgument,
        kv_agent_post(prefill.agent, prepared, &options, &mut transfer)
    );
    assert!(message().contains("reserved"), "{}", message());
    let ticket = kv_ticket {
        stage: 0,
        chunk: 65_536,
    };
    let options = post_options(1, std::slice::from_ref(&ticket));
    is!(
        InvalidArgument,
        kv_agent_post(prefill.agent, prepared, &options, &mut transfer)
    );
    assert!(transfer.is_null());
    for list in [local, remote, of_former] {
        is!(Ok, kv_descriptors_release(list));
    }
    is!(Ok, kv_agent_shutdown(decode.agent, PATIENCE_MS, null_mut()));
    let gone = prefill.post_after_the_end(prepared);
    assert_eq!(gone, kv_status::PeerDown);
    is!(Ok, kv_prepared_release(prepared));
    prefill.end();
    decode.end();
}

fn prefill_geometry() -> kv_pool_geometry {
    kv_pool_geometry {
        offset_bytes: 0,
        stride_bytes: SLOT,
        slot_bytes: SLOT,
        slot_count: 4,
        reserved: 0,
    }
}

impl Side {
    /// Waits for the news that the peer is gone, then posts.
    fn post_after_the_end(&self, prepared: *mut kv_prepared) -> kv_status {
        let mut found = event();
        while found.kind != kv_event_kind::PeerDown as u32 {
            is!(Ok, kv_agent_next_event(self.agent, PATIENCE_MS, &mut found));
        }
        let mut transfer = null_mut();
        // SAFETY: live handles and a local value.
        unsafe { kv_agent_post(self.agent, prepared, &post_options(1, &[]), &mut transfer) }
    }
}

#[test]
fn events_end_with_the_agent() {
    let (prefill, decode) = Side::pair();
    let mut found = event();
    is!(
        Ok,
        kv_agent_next_event(decode.agent, PATIENCE_MS, &mut found)
    );
    is!(Ok, kv_agent_shutdown(decode.agent, PATIENCE_MS, null_mut()));
    is!(
        Ok,
        kv_agent_next_event(decode.agent, PATIENCE_MS, &mut found)
    );
    assert_eq!(found.kind, kv_event_kind::PeerDown as u32);
    // SAFETY: the text of the event, which ends with a zero byte.
    let cause = unsafe { CStr::from_ptr(found.bytes.cast()) };
    assert_eq!(cause.count_bytes(), found.length_bytes);
    assert_eq!(cause, c"shut down");
    is!(
        Closed,
        kv_agent_next_event(decode.agent, PATIENCE_MS, &mut found)
    );
    is!(
        Closed,
        kv_agent_listen(decode.agent, c"shm:late".as_ptr(), null_mut())
    );
    prefill.end();
    decode.end();
}

#[test]
fn a_read_needs_the_word_of_the_peer_and_redeems_its_own_gate() {
    let (prefill, decode) = Side::pair();
    // SAFETY: slot 2 of the one that is read, before anybody reads it.
    unsafe {
        prefill
            .base
            .add(2 * SLOT as usize)
            .write_bytes(9, SLOT as usize)
    };
    let flight = flight_of(&decode, 5);
    let read = decode.prepare_op(kv_op::Read, 2);
    let ticket = kv_ticket { stage: 0, chunk: 0 };
    let mut options = post_options(5, std::slice::from_ref(&ticket));
    let mut transfer = null_mut();
    is!(
        InvalidArgument,
        kv_agent_post(decode.agent, read, &options, &mut transfer)
    );
    assert!(message().contains("not announced"), "{}", message());
    options.source = kv_source::Announced as u32;
    is!(
        Ok,
        kv_agent_post(decode.agent, read, &options, &mut transfer)
    );
    is!(Ok, kv_flight_wait(flight, 0, PATIENCE_MS));
    // SAFETY: slot 0 of the reader, behind its gate.
    let found = unsafe { std::slice::from_raw_parts(decode.base, SLOT as usize) };
    assert_eq!(found, [9; SLOT as usize]);
    is!(Ok, kv_transfer_wait(transfer, PATIENCE_MS, null_mut()));
    is!(Ok, kv_flight_close(flight));
    is!(Ok, kv_flight_wait_quiet(flight, PATIENCE_MS));
    is!(Ok, kv_flight_release(flight));
    is!(Ok, kv_transfer_release(transfer));
    is!(Ok, kv_prepared_release(read));
    prefill.end();
    decode.end();
}

#[cfg(not(feature = "ucx"))]
#[test]
fn a_transport_that_was_not_built_in_is_unavailable() {
    let (prefill, decode) = Side::pair();
    let address = c"ucx:127.0.0.1:0".as_ptr();
    is!(
        Unavailable,
        kv_agent_listen(decode.agent, address, null_mut())
    );
    assert!(message().contains("ucx"), "{}", message());
    prefill.end();
    decode.end();
}

#[test]
fn processes_connect_over_every_transport_of_one_host() {
    for address in [c"tcp:127.0.0.1:0", c"shm:kvgate-capi-test"] {
        let (prefill, decode) = (Side::new(c"prefill"), Side::new(c"decode"));
        let mut bound = [0; KV_ADDRESS_BYTES];
        is!(
            Ok,
            kv_agent_listen(decode.agent, address.as_ptr(), bound.as_mut_ptr())
        );
        // SAFETY: the library has ended the text with a zero byte.
        let text = unsafe { CStr::from_ptr(bound.as_ptr()) }.to_str().unwrap();
        assert!(text.len() >= address.count_bytes(), "{text}");
        let mut peer = 0;
        is!(
            Ok,
            kv_agent_connect(prefill.agent, bound.as_ptr(), PATIENCE_MS, &mut peer)
        );
        let mut info = peer_info();
        is!(Ok, kv_agent_peer(prefill.agent, peer, &mut info));
        let expected = match text.starts_with("tcp:") {
            true => kv_backend::Tcp,
            false => kv_backend::Shm,
        };
        assert_eq!(info.backend, expected as u32);
        prefill.end();
        decode.end();
    }
}
