//! What the report of a shutdown says was left.
#![allow(clippy::unwrap_used)]

#[macro_use]
mod support;

use std::ffi::{CStr, CString};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::ptr::null_mut;
use std::thread;

use kvgate::*;
use support::{PATIENCE_MS, message};

const SENT: u64 = 3;

fn agent(name: &CStr) -> *mut kv_agent {
    let options = sized!(kv_agent_options {
        name: name.as_ptr()
    });
    let mut agent = null_mut();
    is!(Ok, kv_agent_create(&options, &mut agent));
    agent
}

fn event(agent: *mut kv_agent, wanted: kv_event_kind) {
    let mut event = sized!(kv_event {});
    is!(Ok, kv_agent_next_event(agent, PATIENCE_MS, &mut event));
    assert_eq!(event.kind, wanted as u32);
}

fn shut_down(agent: *mut kv_agent, timeout_ms: u64) -> kv_shutdown_report {
    let mut report = sized!(kv_shutdown_report {});
    is!(Ok, kv_agent_shutdown(agent, timeout_ms, &mut report));
    is!(Ok, kv_agent_release(agent));
    assert_eq!(
        (
            report.running_threads,
            report.unquiet_flights,
            report.open_regions,
            report.unknown_operations
        ),
        (0, 0, 0, 0)
    );
    report
}

/// Passes on what comes until either side ends.
fn pass_on(mut from: TcpStream, mut to: TcpStream) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
}

/// A message for a peer that has no connection, and gets none, is named by the report.
#[test]
fn messages_that_were_not_sent_are_reported() {
    let (from, to) = (agent(c"from"), agent(c"to"));
    let mut bound = [0; KV_ADDRESS_BYTES];
    is!(
        Ok,
        kv_agent_listen(to, c"tcp:127.0.0.1:0".as_ptr(), bound.as_mut_ptr())
    );
    // SAFETY: the call has written a string that ends within the array.
    let bound = unsafe { CStr::from_ptr(bound.as_ptr()) }.to_str().unwrap();
    let target = bound.strip_prefix("tcp:").unwrap().to_owned();
    let door = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp:{}", door.local_addr().unwrap());
    // One connection goes through the door; the next ones find nobody behind it.
    let relay = thread::spawn(move || {
        let (near, _) = door.accept().unwrap();
        let far = TcpStream::connect(target).unwrap();
        let ends = [near.try_clone().unwrap(), far.try_clone().unwrap()];
        let there = (near.try_clone().unwrap(), far.try_clone().unwrap());
        let threads = [
            thread::spawn(move || pass_on(there.0, there.1)),
            thread::spawn(move || pass_on(far, near)),
        ];
        (door, ends, threads)
    });
    let (address, mut peer) = (CString::new(address).unwrap(), 0);
    is!(
        Ok,
        kv_agent_connect(from, address.as_ptr(), PATIENCE_MS, &mut peer)
    );
    event(from, kv_event_kind::PeerUp);
    let (door, ends, threads) = relay.join().unwrap();
    for end in &ends {
        end.shutdown(Shutdown::Both).unwrap();
    }
    event(from, kv_event_kind::PeerSuspended);
    for number in 0..SENT {
        let bytes = number.to_le_bytes();
        is!(Ok, kv_agent_send(from, peer, bytes.as_ptr(), bytes.len()));
    }
    assert_eq!(shut_down(from, 200).unsent_messages, SENT);
    drop(door);
    assert_eq!(shut_down(to, PATIENCE_MS).unsent_messages, 0);
    for thread in threads {
        thread.join().unwrap();
    }
}
