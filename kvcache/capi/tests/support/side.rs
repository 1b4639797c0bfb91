//! Two agents with a pool of plain slots each, within one process.

use std::ffi::CStr;
use std::ptr::{null, null_mut};

use kvgate::*;

use super::{PATIENCE_MS, message};

pub(crate) const SLOT: u64 = 64;

/// An agent with one pool of four slots.
pub(crate) struct Side {
    pub(crate) agent: *mut kv_agent,
    pub(crate) memory: *mut kv_memory,
    pub(crate) region: *mut kv_region,
    pub(crate) pool: u32,
    pub(crate) base: *mut u8,
    pub(crate) peer: u32,
}

impl Side {
    pub(crate) fn new(name: &CStr) -> Side {
        let options = kv_agent_options {
            struct_bytes: size_of::<kv_agent_options>() as u32,
            queue_capacity: 0,
            name: name.as_ptr(),
            metadata: name.as_ptr().cast(),
            metadata_bytes: name.count_bytes(),
            auth_token: null(),
            auth_token_bytes: 0,
        };
        let pool = kv_pool_geometry {
            offset_bytes: 0,
            stride_bytes: SLOT,
            slot_bytes: SLOT,
            slot_count: 4,
            reserved: 0,
        };
        let (mut agent, mut memory, mut region) = (null_mut(), null_mut(), null_mut());
        let (mut number, mut base) = (0, null_mut());
        is!(Ok, kv_agent_create(&options, &mut agent));
        is!(
            Ok,
            kv_memory_create(kv_memory_kind::Host as u32, 4 * SLOT, null(), &mut memory)
        );
        is!(Ok, kv_agent_register(agent, memory, &pool, 1, &mut region));
        is!(Ok, kv_region_pool(region, 0, &mut number));
        is!(Ok, kv_memory_address(memory, &mut base, null_mut()));
        let base = base.cast();
        Side {
            agent,
            memory,
            region,
            pool: number,
            base,
            peer: 0,
        }
    }

    pub(crate) fn pair() -> (Side, Side) {
        let (mut prefill, mut decode) = (Side::new(c"prefill"), Side::new(c"decode"));
        let (one, other) = (&mut prefill.peer, &mut decode.peer);
        is!(
            Ok,
            kv_agent_connect_local(prefill.agent, decode.agent, one, other)
        );
        (prefill, decode)
    }

    pub(crate) fn list(
        &self,
        incarnation: *const kv_incarnation,
        pool: u32,
        slot: u32,
    ) -> *mut kv_descriptors {
        let mut list = null_mut();
        is!(Ok, kv_descriptors_create(incarnation, &mut list));
        is!(Ok, kv_descriptors_push(list, pool, &slot, 1));
        list
    }

    /// Prepares a write of slot 0 to a slot of the peer.
    pub(crate) fn prepare(&self, slot: u32) -> *mut kv_prepared {
        self.prepare_op(kv_op::Write, slot)
    }

    /// Prepares a transfer between slot 0 and a slot of the peer.
    pub(crate) fn prepare_op(&self, op: kv_op, slot: u32) -> *mut kv_prepared {
        let mut info = peer_info();
        is!(Ok, kv_agent_peer(self.agent, self.peer, &mut info));
        let mut pool = 0;
        is!(
            Ok,
            kv_agent_peer_pool(self.agent, self.peer, 0, &mut pool, null_mut())
        );
        let local = self.list(null(), self.pool, 0);
        let remote = self.list(&info.incarnation, pool, slot);
        let mut prepared = null_mut();
        is!(
            Ok,
            kv_agent_prepare(
                self.agent,
                op as u32,
                local,
                remote,
                self.peer,
                &mut prepared
            )
        );
        is!(Ok, kv_descriptors_release(local));
        is!(Ok, kv_descriptors_release(remote));
        prepared
    }

    pub(crate) fn post(
        &self,
        prepared: *mut kv_prepared,
        epoch: u64,
        tickets: &[kv_ticket],
    ) -> *mut kv_transfer {
        let options = post_options(epoch, tickets);
        let mut transfer = null_mut();
        is!(
            Ok,
            kv_agent_post(self.agent, prepared, &options, &mut transfer)
        );
        transfer
    }

    pub(crate) fn end(self) {
        is!(Ok, kv_region_close(self.region, PATIENCE_MS));
        is!(Ok, kv_region_release(self.region));
        is!(Ok, kv_memory_release(self.memory));
        is!(Ok, kv_agent_shutdown(self.agent, PATIENCE_MS, null_mut()));
        is!(Ok, kv_agent_release(self.agent));
    }
}

pub(crate) fn peer_info() -> kv_peer_info {
    kv_peer_info {
        struct_bytes: size_of::<kv_peer_info>() as u32,
        is_up: 0,
        backend: 0,
        pool_count: 0,
        incarnation: kv_incarnation::default(),
        silent_ms: 0,
        metadata_bytes: 0,
    }
}

pub(crate) fn post_options(epoch: u64, tickets: &[kv_ticket]) -> kv_post_options {
    kv_post_options {
        struct_bytes: size_of::<kv_post_options>() as u32,
        source: kv_source::HostWritten as u32,
        epoch,
        tickets: tickets.as_ptr(),
        ticket_count: tickets.len(),
        timeout_ms: PATIENCE_MS,
        priority: kv_priority::Foreground as u32,
        reserved: 0,
    }
}

/// A flight of one stage of one chunk, armed.
pub(crate) fn flight_of(side: &Side, epoch: u64) -> *mut kv_flight {
    let flight = unarmed_flight_of(side, epoch);
    is!(Ok, kv_flight_arm(flight));
    flight
}

pub(crate) fn unarmed_flight_of(side: &Side, epoch: u64) -> *mut kv_flight {
    let chunk = kv_chunk {
        stage: 0,
        chunk: 0,
        writer: 0,
        descriptor_count: 1,
    };
    let writer = kv_writer {
        peer: side.peer,
        rank: 0,
    };
    let mut flight = null_mut();
    is!(
        Ok,
        kv_flight_create(side.agent, epoch, &chunk, 1, &writer, 1, &mut flight)
    );
    flight
}
