//! Every function, called with what it cannot work with: a typed answer and a message, never more.
#![allow(clippy::unwrap_used)]

#[macro_use]
mod support;

use std::ptr::{null, null_mut};

use kvgate::*;
use support::{made_up, message};

fn agent() -> *mut kv_agent {
    let options = kv_agent_options {
        struct_bytes: size_of::<kv_agent_options>() as u32,
        queue_capacity: 0,
        name: c"tester".as_ptr(),
        metadata: null(),
        metadata_bytes: 0,
        auth_token: null(),
        auth_token_bytes: 0,
    };
    let mut agent = null_mut();
    done!(kv_agent_create(&options, &mut agent));
    agent
}

#[test]
fn handles_that_are_none_are_refused_by_every_function() {
    let (mut out_u32, mut out_fd, mut length, mut address) = (0_u32, 0_i32, 0_usize, null_mut());
    let nothing = null();
    for agent in made_up::<kv_agent>().into_iter().chain([null_mut()]) {
        let mut incarnation = kv_incarnation::default();
        refused!("agent", kv_agent_incarnation(agent, &mut incarnation));
        refused!(
            "agent",
            kv_agent_listen(agent, c"shm:x".as_ptr(), null_mut())
        );
        refused!(
            "agent",
            kv_agent_connect(agent, c"shm:x".as_ptr(), 0, &mut out_u32)
        );
        refused!(
            "agent",
            kv_agent_connect_local(agent, agent, &mut out_u32, &mut out_u32)
        );
        refused!("agent", kv_agent_peer(agent, 0, null_mut()));
        refused!(
            "agent",
            kv_agent_peer_pool(agent, 0, 0, null_mut(), null_mut())
        );
        refused!(
            "agent",
            kv_agent_peer_metadata(agent, 0, null_mut(), 0, &mut length)
        );
        refused!("agent", kv_agent_send(agent, 0, null(), 0));
        refused!("agent", kv_agent_report_progress(agent));
        refused!("agent", kv_agent_shutdown(agent, 0, null_mut()));
        refused!("agent", kv_agent_next_event(agent, 0, null_mut()));
        refused!("agent", kv_agent_event_fd(agent, &mut out_fd));
        refused!(
            "agent",
            kv_agent_register(agent, null(), null(), 0, null_mut())
        );
        refused!(
            "agent",
            kv_agent_prepare(agent, 1, null(), null(), 0, null_mut())
        );
        refused!("agent", kv_agent_post(agent, null(), null(), null_mut()));
        let none = null_mut();
        refused!(
            "agent",
            kv_flight_create(agent, 1, nothing, 0, null(), 0, none)
        );
    }
    for memory in made_up::<kv_memory>().into_iter().chain([null_mut()]) {
        refused!(
            "memory",
            kv_memory_address(memory, &mut address, null_mut())
        );
    }
    for region in made_up::<kv_region>().into_iter().chain([null_mut()]) {
        refused!("region", kv_region_pool(region, 0, &mut out_u32));
        refused!("region", kv_region_close(region, 0));
    }
    for list in made_up::<kv_descriptors>().into_iter().chain([null_mut()]) {
        refused!("descriptor list", kv_descriptors_push(list, 0, null(), 0));
    }
    refused!("list is NULL", kv_descriptors_create(null(), null_mut()));
    for transfer in made_up::<kv_transfer>().into_iter().chain([null_mut()]) {
        refused!(
            "transfer",
            kv_transfer_status(transfer, &mut out_u32, null_mut())
        );
        refused!("transfer", kv_transfer_wait(transfer, 0, null_mut()));
        refused!("transfer", kv_transfer_cancel(transfer));
    }
    for flight in made_up::<kv_flight>().into_iter().chain([null_mut()]) {
        refused!("flight", kv_flight_arm(flight));
        refused!("flight", kv_flight_check(flight, 0, null_mut()));
        refused!("flight", kv_flight_wait(flight, 0, 0));
        refused!("flight", kv_flight_close(flight));
        refused!("flight", kv_flight_abort(flight, c"why".as_ptr()));
        refused!("flight", kv_flight_writer_answered(flight, 0, 0));
        refused!("flight", kv_flight_wait_quiet(flight, 0));
    }
}

#[test]
fn releasing_takes_null_and_refuses_what_is_no_handle() {
    releases!(
        kv_agent_release("agent"),
        kv_memory_release("memory"),
        kv_region_release("region"),
        kv_descriptors_release("descriptor list"),
        kv_prepared_release("prepared transfer"),
        kv_transfer_release("transfer"),
        kv_flight_release("flight"),
    );
}

#[test]
fn released_and_foreign_handles_are_refused() {
    let agent = agent();
    let mut memory = null_mut();
    done!(kv_memory_create(
        kv_memory_kind::Host as u32,
        4096,
        null(),
        &mut memory
    ));
    refused!("flight", kv_flight_arm(agent.cast()));
    refused!("region", kv_region_close(memory.cast(), 0));
    done!(kv_memory_release(memory));
    refused!("memory", kv_memory_release(memory));
    refused!(
        "memory",
        kv_memory_address(memory, &mut null_mut(), null_mut())
    );
    done!(kv_agent_release(agent));
    refused!("agent", kv_agent_release(agent));
    refused!("agent", kv_agent_report_progress(agent));
}

#[test]
fn structs_of_another_version_are_refused() {
    let live = agent();
    let mut options = kv_agent_options {
        struct_bytes: 0,
        queue_capacity: 0,
        name: c"tester".as_ptr(),
        metadata: null(),
        metadata_bytes: 0,
        auth_token: null(),
        auth_token_bytes: 0,
    };
    let mut out = null_mut();
    for wrong in [0, 8, size_of::<kv_agent_options>() as u32 + 8, u32::MAX] {
        options.struct_bytes = wrong;
        refused!(
            "kv_agent_options.struct_bytes",
            kv_agent_create(&options, &mut out)
        );
    }
    assert!(out.is_null(), "no answer is written");
    let mut event = kv_event {
        struct_bytes: 1,
        kind: 77,
        peer: 0,
        is_proven: 0,
        bytes: null(),
        length_bytes: 0,
    };
    refused!(
        "kv_event.struct_bytes",
        kv_agent_next_event(live, 0, &mut event)
    );
    assert_eq!(event.kind, 77);
    // SAFETY: all zero is a value of these.
    let (mut info, mut report): (kv_peer_info, kv_shutdown_report) =
        unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
    refused!(
        "kv_peer_info.struct_bytes",
        kv_agent_peer(live, 0, &mut info)
    );
    refused!(
        "kv_shutdown_report.struct_bytes",
        kv_agent_shutdown(live, 0, &mut report)
    );
    done!(kv_agent_report_progress(live));
    done!(kv_agent_release(live));
}

#[test]
fn arguments_are_checked_before_anything_happens() {
    let live = agent();
    let mut out = null_mut();
    refused!(
        "kv_agent_options is NULL",
        kv_agent_create(null(), &mut out)
    );
    let mut options = kv_agent_options {
        struct_bytes: size_of::<kv_agent_options>() as u32,
        queue_capacity: 0,
        name: null(),
        metadata: null(),
        metadata_bytes: 0,
        auth_token: null(),
        auth_token_bytes: 0,
    };
    refused!("name is NULL", kv_agent_create(&options, &mut out));
    options.name = c"caf\xe9".as_ptr();
    refused!("not UTF-8", kv_agent_create(&options, &mut out));
    options.name = c"".as_ptr();
    refused!("agent name", kv_agent_create(&options, &mut out));
    options.name = c"tester".as_ptr();
    options.metadata_bytes = 9;
    refused!("metadata is NULL", kv_agent_create(&options, &mut out));
    refused!("agent is NULL", kv_agent_create(&options, null_mut()));

    for address in [c"", c"udp:1", c"tcp", c"shm:"] {
        refused!(
            "address",
            kv_agent_listen(live, address.as_ptr(), null_mut())
        );
    }
    refused!("address is NULL", kv_agent_listen(live, null(), null_mut()));
    refused!(
        "peer is NULL",
        kv_agent_connect(live, c"shm:x".as_ptr(), 0, null_mut())
    );
    refused!("itself", kv_agent_connect_local(live, live, &mut 0, &mut 0));
    refused!(
        "peer 7",
        kv_agent_peer_pool(live, 7, 0, null_mut(), null_mut())
    );
    refused!("bytes is NULL", kv_agent_send(live, 7, null(), 1));
    refused!("peer 7", kv_agent_send(live, 7, null(), 0));
    refused!("fd is NULL", kv_agent_event_fd(live, null_mut()));
    done!(kv_agent_release(live));
}

#[test]
fn memory_and_regions_check_their_numbers() {
    let live = agent();
    let (mut memory, mut region) = (null_mut(), null_mut());
    for kind in [0, 3, u32::MAX] {
        refused!(
            "kv_memory_kind",
            kv_memory_create(kind, 4096, null(), &mut memory)
        );
    }
    let host = kv_memory_kind::Host as u32;
    refused!(
        "memory length",
        kv_memory_create(host, 0, null(), &mut memory)
    );
    refused!(
        "not UTF-8",
        kv_memory_create(host, 4096, c"\xff".as_ptr(), &mut memory)
    );
    refused!(
        "memory is NULL",
        kv_memory_create(host, 4096, null(), null_mut())
    );
    // SAFETY: a local value.
    let too_much = unsafe { kv_memory_create(host, u64::MAX, null(), &mut memory) };
    assert_eq!(too_much, kv_status::OutOfMemory);
    done!(kv_memory_create(host, 4096, null(), &mut memory));
    refused!(
        "address is NULL",
        kv_memory_address(memory, null_mut(), null_mut())
    );

    let mut pool = kv_pool_geometry {
        offset_bytes: 0,
        stride_bytes: 1024,
        slot_bytes: 1024,
        slot_count: 5,
        reserved: 0,
    };
    refused!(
        "pool 0 ends",
        kv_agent_register(live, memory, &pool, 1, &mut region)
    );
    refused!(
        "pools is NULL",
        kv_agent_register(live, memory, null(), 1, &mut region)
    );
    refused!(
        "pool",
        kv_agent_register(live, memory, &pool, 0, &mut region)
    );
    pool.slot_count = 4;
    pool.reserved = 1;
    refused!(
        "reserved",
        kv_agent_register(live, memory, &pool, 1, &mut region)
    );
    pool.reserved = 0;
    done!(kv_agent_register(live, memory, &pool, 1, &mut region));
    refused!("no pool 1", kv_region_pool(region, 1, &mut 0));
    done!(kv_region_close(region, 1000));
    // SAFETY: a live handle.
    assert_eq!(unsafe { kv_region_close(region, 0) }, kv_status::Closed);
    done!(kv_region_release(region));
    done!(kv_memory_release(memory));
    done!(kv_agent_release(live));
}

#[test]
fn flights_check_their_plan_and_their_writers() {
    let (one, other) = (agent(), agent());
    let (mut to_other, mut to_one) = (0, 0);
    done!(kv_agent_connect_local(
        one,
        other,
        &mut to_other,
        &mut to_one
    ));
    let mut flight = null_mut();
    let chunk = |stage, chunk, writer, descriptor_count| kv_chunk {
        stage,
        chunk,
        writer,
        descriptor_count,
    };
    let good = [chunk(0, 0, 3, 1), chunk(1, 0, 3, 1)];
    let writer = kv_writer {
        peer: to_other,
        rank: 3,
    };
    let mut create = |chunks: &[kv_chunk], writers: &[kv_writer]| {
        let (chunks, chunk_count) = (chunks.as_ptr(), chunks.len());
        let (writers, writer_count) = (writers.as_ptr(), writers.len());
        // SAFETY: local slices.
        unsafe {
            kv_flight_create(
                one,
                1,
                chunks,
                chunk_count,
                writers,
                writer_count,
                &mut flight,
            )
        }
    };
    for (chunks, what) in [
        (vec![], "no chunks"),
        (vec![chunk(65_536, 0, 3, 1)], "kv_chunk.stage is 65536"),
        (vec![chunk(0, u32::MAX, 3, 1)], "kv_chunk.chunk"),
        (vec![chunk(0, 0, 65_536, 1)], "kv_chunk.writer"),
        (vec![chunk(0, 0, 3, 0)], "no descriptor"),
        (vec![chunk(1, 0, 3, 1)], "stage 0 has no chunks"),
    ] {
        assert_eq!(create(&chunks, &[writer]), kv_status::InvalidArgument);
        assert!(message().contains(what), "{}", message());
    }
    for (writers, what) in [
        (vec![], "not listed"),
        (vec![writer, writer], "listed twice"),
        (vec![kv_writer { peer: 9, rank: 3 }], "peer 9"),
        (
            vec![kv_writer {
                peer: to_other,
                rank: 70_000,
            }],
            "kv_writer.rank",
        ),
    ] {
        assert_eq!(create(&good, &writers), kv_status::InvalidArgument);
        assert!(message().contains(what), "{}", message());
    }
    assert_eq!(create(&good, &[writer]), kv_status::Ok);
    refused!("no stage 2", kv_flight_wait(flight, 2, 0));
    refused!(
        "no stage 70000",
        kv_flight_check(flight, 70_000, &mut stage())
    );
    refused!("reason is NULL", kv_flight_abort(flight, null()));
    // SAFETY: live handles.
    unsafe {
        assert_eq!(kv_flight_wait(flight, 0, 0), kv_status::NotArmed);
        assert_eq!(kv_flight_wait_quiet(flight, 0), kv_status::InvalidState);
        assert_eq!(
            kv_flight_writer_answered(flight, to_other, 3),
            kv_status::InvalidState
        );
        assert_eq!(kv_flight_arm(flight), kv_status::Ok);
        assert_eq!(kv_flight_arm(flight), kv_status::InvalidState);
        assert_eq!(kv_flight_close(flight), kv_status::Ok);
        assert_eq!(kv_flight_close(flight), kv_status::InvalidState);
        assert_eq!(kv_flight_wait(flight, 0, 0), kv_status::Failed);
        assert_eq!(kv_flight_wait_quiet(flight, 0), kv_status::TimedOut);
    }
    refused!(
        "not writer 4",
        kv_flight_writer_answered(flight, to_other, 4)
    );
    done!(kv_flight_writer_answered(flight, to_other, 3));
    done!(kv_flight_wait_quiet(flight, 0));
    done!(kv_flight_release(flight));
    done!(kv_agent_release(other));
    done!(kv_agent_release(one));
}

fn stage() -> kv_stage {
    kv_stage {
        struct_bytes: size_of::<kv_stage>() as u32,
        state: 0,
        missing: 0,
        reserved: 0,
    }
}
