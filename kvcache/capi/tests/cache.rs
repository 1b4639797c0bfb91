//! The cache through the C interface, within one process: gates, addresses, offers, and what is refused.
#![allow(clippy::unwrap_used)]

#[macro_use]
mod support;

use std::ptr::null_mut;

use kvgate::*;
use support::world::*;
use support::{PATIENCE_MS, message};

#[test]
fn a_page_has_an_address_only_behind_its_gate() {
    let world = World::new();
    let flight = world.expect(1, kv_verify::Canary);
    is!(
        InvalidState,
        "not armed",
        kv_flight_offer(flight, null_mut(), 0, &mut 0)
    );
    let lease = read_lease(flight, kv_access::Read);
    let mut layer = null_mut();
    is!(NotArmed, kv_read_lease_layer(lease, 0, 0, &mut layer));
    is!(Ok, kv_flight_arm(flight));
    is!(TimedOut, kv_read_lease_layer(lease, 0, 1, &mut layer));
    is!(TimedOut, kv_flight_verify(flight, 0, null_mut()));
    assert!(layer.is_null());
    is!(
        InvalidArgument,
        kv_read_lease_layer(lease, 3, 0, &mut layer)
    );

    let offer = world.offer(flight);
    let source = reserve(world.source, 1);
    for number in 0..3 {
        world.send(source, offer, number, 10 + number as u8);
        is!(
            Ok,
            kv_read_lease_layer(lease, number, PATIENCE_MS, &mut layer)
        );
        let mut violations = 9;
        is!(Ok, kv_flight_verify(flight, number, &mut violations));
        assert_eq!(violations, 0);
        let window = page(layer, kv_component::SwaLatent as u32, (PROMPT - 1) / 64);
        assert_eq!((window.is_writable, window.page_count), (0, 8));
        // SAFETY: a page behind its gate.
        let bytes = unsafe {
            std::slice::from_raw_parts(window.address.cast::<u8>(), window.length_bytes as usize)
        };
        assert!(bytes.iter().all(|byte| *byte == 10 + number as u8));
        // SAFETY: the gate is open and nobody writes: this plants a row that no writer has sent.
        unsafe { window.address.cast::<u8>().add(43 * 128).write(0) };
        is!(
            Failed,
            "checksum",
            kv_flight_verify(flight, number, &mut violations)
        );
        assert_eq!(violations, 1);
        is!(Ok, kv_layer_release(layer));
        is!(InvalidArgument, kv_layer_page(layer, 0, 0, &mut no_page()));
    }
    is!(Ok, kv_write_lease_close(source, PATIENCE_MS));
    is!(Ok, kv_write_lease_close(source, 0));
    is!(InvalidState, kv_write_lease_layer(source, 0, &mut layer));
    is!(Ok, kv_write_lease_release(source));
    is!(Ok, kv_offer_release(offer));
    is!(Ok, kv_flight_close(flight));
    is!(TimedOut, kv_flight_wait_quiet(flight, 1));
    is!(Ok, kv_read_lease_release(lease));
    is!(Ok, kv_flight_wait_quiet(flight, PATIENCE_MS));
    is!(Ok, kv_flight_release(flight));
    world.end();
}

/// Whoever has addresses of a layer may still write there.
#[test]
fn a_layer_is_committed_and_closed_only_when_it_has_come_back() {
    let world = World::new();
    let source = reserve(world.source, 1);
    let (mut one, mut other, mut written) = (null_mut(), null_mut(), null_mut());
    is!(Ok, kv_write_lease_layer(source, 0, &mut one));
    is!(Ok, kv_write_lease_layer(source, 0, &mut other));
    for layer in [one, other] {
        is!(
            Busy,
            "given out",
            kv_write_lease_commit(source, 0, 0, PROMPT, &mut written)
        );
        is!(Busy, "given out", kv_write_lease_close(source, 0));
        assert!(written.is_null());
        is!(Ok, kv_layer_release(layer));
    }
    is!(
        Ok,
        kv_write_lease_commit(source, 0, 0, PROMPT, &mut written)
    );
    is!(TimedOut, kv_write_lease_close(source, 0));
    is!(Ok, kv_written_release(written));
    is!(Ok, kv_write_lease_close(source, PATIENCE_MS));
    is!(Ok, kv_write_lease_release(source));
    world.end();
}

/// The writer was told where to write and has not answered.
#[test]
fn no_time_makes_the_slots_of_a_flight_free() {
    let world = World::new();
    let flight = world.expect(1, kv_verify::Off);
    is!(Ok, kv_flight_arm(flight));
    is!(Ok, kv_flight_abort(flight, c"enough".as_ptr()));
    let mut next = null_mut();
    for timeout_ms in [0, 1, 20] {
        is!(TimedOut, kv_flight_wait_quiet(flight, timeout_ms));
        is!(Full, kv_pools_reserve(world.target, PROMPT, 2, &mut next));
    }
    assert!(next.is_null());
    is!(Ok, kv_flight_writer_answered(flight, world.to_writer, 0));
    is!(Ok, kv_flight_wait_quiet(flight, PATIENCE_MS));
    let next = reserve(world.target, 2);
    is!(Ok, kv_write_lease_release(next));
    is!(Ok, kv_flight_release(flight));
    world.end();
}

#[test]
fn one_lease_appends_and_a_failed_flight_gives_no_address() {
    let world = World::new();
    let flight = world.expect(2, kv_verify::Off);
    is!(Ok, kv_flight_arm(flight));
    is!(
        InvalidState,
        "KV_VERIFY_OFF",
        kv_flight_verify(flight, 0, null_mut())
    );
    let (offer, source) = (world.offer(flight), reserve(world.source, 2));
    world.send(source, offer, 0, 3);
    let append = read_lease(flight, kv_access::Append);
    let mut other = null_mut();
    is!(
        Busy,
        kv_flight_lease(flight, kv_access::Append as u32, &mut other)
    );
    is!(
        InvalidArgument,
        "kv_access",
        kv_flight_lease(flight, 0, &mut other)
    );
    let mut layer = null_mut();
    is!(Ok, kv_read_lease_layer(append, 0, PATIENCE_MS, &mut layer));
    assert_eq!(page(layer, 0, 0).is_writable, 1);
    is!(
        InvalidArgument,
        "no kv_component",
        kv_layer_page(layer, 8, 0, &mut no_page())
    );
    is!(
        InvalidArgument,
        "no index_k",
        kv_layer_page(layer, 2, 0, &mut no_page())
    );
    is!(
        InvalidArgument,
        "no page 8",
        kv_layer_page(layer, 0, 8, &mut no_page())
    );
    is!(Ok, kv_flight_abort(flight, c"enough".as_ptr()));
    is!(Failed, "enough", kv_layer_page(layer, 0, 0, &mut no_page()));
    is!(
        Failed,
        "enough",
        kv_read_lease_layer(append, 1, PATIENCE_MS, &mut null_mut())
    );
    is!(
        InvalidState,
        kv_flight_lease(flight, kv_access::Read as u32, &mut other)
    );
    is!(Ok, kv_layer_release(layer));
    is!(Ok, kv_read_lease_release(append));
    is!(TimedOut, kv_flight_wait_quiet(flight, 0));
    is!(Ok, kv_write_lease_close(source, PATIENCE_MS));
    is!(
        InvalidArgument,
        kv_flight_writer_answered(flight, world.to_writer + 1, 0)
    );
    is!(Ok, kv_flight_writer_answered(flight, world.to_writer, 0));
    is!(Ok, kv_flight_wait_quiet(flight, PATIENCE_MS));
    is!(Ok, kv_flight_release(flight));
    is!(Ok, kv_offer_release(offer));
    is!(Ok, kv_write_lease_release(source));
    world.end();
}

#[test]
fn an_offer_is_read_by_its_own_cache_only() {
    let world = World::new();
    let flight = world.expect(3, kv_verify::Canary);
    is!(Ok, kv_flight_arm(flight));
    let bytes = offer_bytes(flight);
    let mut offer = null_mut();
    let other = schema_of(CONFIG, 2);
    is!(
        Refused,
        "weights",
        kv_offer_parse(other, bytes.as_ptr(), bytes.len(), &mut offer)
    );
    let narrow = schema_of(&CONFIG.replace("\"head_dim\": 32", "\"head_dim\": 48"), 1);
    is!(
        Refused,
        "at the receiver",
        kv_offer_parse(narrow, bytes.as_ptr(), bytes.len(), &mut offer)
    );
    for length in 0..bytes.len() {
        let mut cut = null_mut();
        is!(
            InvalidArgument,
            kv_offer_parse(world.schema, bytes.as_ptr(), length, &mut cut)
        );
    }
    for at in (0..bytes.len()).step_by(7) {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x40;
        let (pointer, length) = (damaged.as_ptr(), damaged.len());
        // SAFETY: local bytes.
        let status = unsafe { kv_offer_parse(world.schema, pointer, length, &mut offer) };
        assert!(
            [kv_status::InvalidArgument, kv_status::Refused].contains(&status),
            "byte {at}"
        );
    }
    assert!(offer.is_null());
    let offer = world.offer(flight);
    let mut info = sized!(kv_offer_info {});
    is!(Ok, kv_offer_describe(offer, &mut info));
    assert_eq!((info.room, info.epoch, info.prompt_tokens), (3, 3, PROMPT));
    assert_eq!((info.segment_count, info.is_verified), (1, 1));
    let mut incarnation = kv_incarnation::default();
    is!(Ok, kv_agent_incarnation(world.reader, &mut incarnation));
    assert_eq!(info.incarnation, incarnation);

    // A witness of this cache with the plan of another, or of another prompt.
    let source = reserve(world.source, 3);
    let mut written = null_mut();
    is!(Ok, kv_write_lease_commit(source, 0, 0, 256, &mut written));
    let post = |written: *mut kv_written, plan: *mut kv_plan, segment: u32| {
        let (agent, peer, mut transfer) = (world.writer, world.to_reader, null_mut());
        // SAFETY: live handles.
        unsafe { kv_written_post(written, plan, segment, agent, peer, offer, 0, &mut transfer) }
    };
    let foreign = plan_of(other);
    assert_eq!(post(written, foreign, 0), kv_status::Refused);
    let (layers, mut short) = (whole(), null_mut());
    is!(
        Ok,
        kv_plan_create(world.schema, 256, &256, 1, &layers, 1, &mut short)
    );
    assert_eq!(post(written, short, 0), kv_status::InvalidArgument);
    assert_eq!(post(written, world.plan, 1), kv_status::InvalidArgument);
    assert_eq!(
        post(written, world.plan, 0),
        kv_status::InvalidState,
        "too few tokens"
    );
    is!(
        InvalidState,
        kv_write_lease_commit(source, 0, 299, PROMPT + 1, &mut null_mut())
    );
    let mut same = null_mut();
    is!(Ok, kv_offer_plan(offer, &layers, 1, &mut same));
    for plan in [foreign, short, same] {
        is!(Ok, kv_plan_release(plan));
    }
    is!(Ok, kv_written_release(written));
    is!(Ok, kv_offer_release(offer));
    is!(Ok, kv_write_lease_release(source));
    is!(Ok, kv_flight_abort(flight, c"enough".as_ptr()));
    is!(Ok, kv_flight_writer_answered(flight, world.to_writer, 0));
    is!(Ok, kv_flight_wait_quiet(flight, PATIENCE_MS));
    is!(Ok, kv_flight_release(flight));
    is!(Ok, kv_schema_release(other));
    is!(Ok, kv_schema_release(narrow));
    world.end();
}

fn whole() -> kv_writer_layers {
    kv_writer_layers {
        rank: 0,
        first_layer: 0,
        end_layer: 3,
    }
}
