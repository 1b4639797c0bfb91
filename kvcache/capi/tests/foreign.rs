//! What was made with one agent, used with another one of the same process: refused, and nothing moves.
#![allow(clippy::unwrap_used)]

#[macro_use]
mod support;

use std::ptr::{null, null_mut};

use kvgate::*;
use support::side::*;
use support::world::*;
use support::{PATIENCE_MS, message};

/// Connects two agents and answers the number of `to` as `from` sees it.
fn connect(from: *mut kv_agent, to: *mut kv_agent) -> u32 {
    let (mut there, mut back) = (0, 0);
    is!(Ok, kv_agent_connect_local(from, to, &mut there, &mut back));
    there
}

#[test]
fn a_transfer_is_posted_by_the_agent_that_prepared_it() {
    let (prefill, decode) = Side::pair();
    let mut third = Side::new(c"third");
    third.peer = connect(third.agent, decode.agent);
    let flight = flight_of(&decode, 1);
    // SAFETY: slot 0 of two senders, which nobody reads yet.
    unsafe {
        prefill.base.write_bytes(7, SLOT as usize);
        third.base.write_bytes(8, SLOT as usize);
    }
    let prepared = prefill.prepare(1);
    let ticket = kv_ticket { stage: 0, chunk: 0 };
    let options = post_options(1, std::slice::from_ref(&ticket));
    let mut transfer = null_mut();
    for agent in [third.agent, decode.agent] {
        is!(
            InvalidArgument,
            "does not exist",
            kv_agent_post(agent, prepared, &options, &mut transfer)
        );
    }
    assert!(transfer.is_null());
    // The pool of another agent in a list of this one.
    let mut info = peer_info();
    is!(Ok, kv_agent_peer(third.agent, third.peer, &mut info));
    let local = third.list(null(), prefill.pool, 0);
    let remote = third.list(&info.incarnation, decode.pool, 1);
    let (agent, peer, write, mut none) = (third.agent, third.peer, kv_op::Write, null_mut());
    is!(
        InvalidArgument,
        "pool",
        kv_agent_prepare(agent, write as u32, local, remote, peer, &mut none)
    );
    is!(TimedOut, kv_flight_wait(flight, 0, 0));
    // SAFETY: slot 1 of the receiver, which no operation was admitted for.
    let found = unsafe { std::slice::from_raw_parts(decode.base.add(SLOT as usize), 64) };
    assert_eq!(found, [0; 64]);
    let transfer = prefill.post(prepared, 1, &[ticket]);
    is!(Ok, kv_flight_wait(flight, 0, PATIENCE_MS));
    is!(Ok, kv_transfer_release(transfer));
    is!(Ok, kv_flight_close(flight));
    is!(Ok, kv_flight_wait_quiet(flight, PATIENCE_MS));
    is!(Ok, kv_flight_release(flight));
    for list in [local, remote] {
        is!(Ok, kv_descriptors_release(list));
    }
    is!(Ok, kv_prepared_release(prepared));
    prefill.end();
    third.end();
    decode.end();
}

#[test]
fn a_written_layer_is_sent_by_the_agent_of_its_pools() {
    let world = World::new();
    let third = agent();
    let (pools, to_reader) = (pools_of(world.schema), connect(third, world.reader));
    is!(Ok, kv_pools_register(pools, third));
    let flight = world.expect(1, kv_verify::Off);
    is!(Ok, kv_flight_arm(flight));
    let (offer, source) = (world.offer(flight), reserve(world.source, 1));
    let (mut written, mut transfer) = (null_mut(), null_mut());
    is!(
        Ok,
        kv_write_lease_commit(source, 0, 0, PROMPT, &mut written)
    );
    let mut post = |agent: *mut kv_agent, peer: u32| {
        // SAFETY: live handles.
        unsafe { kv_written_post(written, world.plan, 0, agent, peer, offer, 0, &mut transfer) }
    };
    assert_eq!(post(third, to_reader), kv_status::InvalidArgument);
    assert!(message().contains("pool"), "{}", message());
    assert_eq!(post(third, world.to_reader), kv_status::InvalidArgument);
    assert_eq!(post(world.writer, to_reader), kv_status::InvalidArgument);
    assert!(transfer.is_null());
    is!(TimedOut, kv_flight_wait(flight, 0, 0));
    is!(Ok, kv_written_release(written));
    is!(Ok, kv_write_lease_close(source, 0));
    is!(Ok, kv_write_lease_release(source));
    is!(Ok, kv_offer_release(offer));
    give_up(&world, flight);
    is!(Ok, kv_pools_release(pools));
    is!(Ok, kv_agent_release(third));
    world.end();
}

fn give_up(world: &World, flight: *mut kv_flight) {
    is!(Ok, kv_flight_abort(flight, c"enough".as_ptr()));
    is!(Ok, kv_flight_writer_answered(flight, world.to_writer, 0));
    is!(Ok, kv_flight_wait_quiet(flight, PATIENCE_MS));
    is!(Ok, kv_flight_release(flight));
}

/// The third agent is connected to the writer, so everything but the pools would fit.
#[test]
fn a_flight_is_offered_by_the_agent_of_its_pools() {
    let world = World::new();
    let third = agent();
    let to_writer = connect(third, world.writer);
    let flight = world.expect_by(third, to_writer, 1, kv_verify::Off);
    is!(InvalidArgument, "another agent", kv_flight_arm(flight));
    is!(
        InvalidState,
        "not armed",
        kv_flight_offer(flight, null_mut(), 0, &mut 0)
    );
    is!(NotArmed, kv_flight_wait(flight, 0, 0));
    is!(Ok, kv_pools_unregister(world.target, PATIENCE_MS));
    is!(InvalidState, "not registered", kv_flight_arm(flight));
    is!(NotArmed, kv_flight_wait(flight, 0, 0));
    is!(Ok, kv_flight_abort(flight, c"enough".as_ptr()));
    is!(Ok, kv_flight_wait_quiet(flight, PATIENCE_MS));
    is!(Ok, kv_flight_release(flight));
    is!(Ok, kv_pools_register(world.target, world.reader));
    // Armed, and then the pools went to another agent.
    let flight = world.expect(2, kv_verify::Off);
    is!(Ok, kv_flight_arm(flight));
    is!(Ok, kv_pools_unregister(world.target, PATIENCE_MS));
    let mut length = 0;
    is!(
        InvalidState,
        "not registered",
        kv_flight_offer(flight, null_mut(), 0, &mut length)
    );
    is!(Ok, kv_pools_register(world.target, third));
    is!(
        InvalidArgument,
        "another agent",
        kv_flight_offer(flight, null_mut(), 0, &mut length)
    );
    assert_eq!(length, 0, "nothing was written");
    is!(TimedOut, kv_flight_wait(flight, 0, 0));
    give_up(&world, flight);
    world.end();
    is!(Ok, kv_agent_release(third));
}
