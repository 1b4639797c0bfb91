//! A writer and a reader of a small cache within one process.

use std::ffi::CString;
use std::ptr::null_mut;

use kvgate::*;

use super::{PATIENCE_MS, message};

pub(crate) const PROMPT: u32 = 300;

pub(crate) const CONFIG: &str = r#"{
    "model_type": "deepseek_v4", "num_hidden_layers": 3, "compress_ratios": [0, 4, 128],
    "head_dim": 32, "qk_rope_head_dim": 16, "index_head_dim": 16, "sliding_window": 128,
    "rope_theta": 10000, "compress_rope_theta": 160000,
    "rope_scaling": { "type": "yarn", "factor": 16, "original_max_position_embeddings": 65536,
                      "beta_fast": 32, "beta_slow": 1 } }"#;

pub(crate) fn schema_of(config: &str, weights: u8) -> *mut kv_schema {
    let (config, digest) = (CString::new(config).unwrap(), [weights; KV_DIGEST_BYTES]);
    let options = sized!(kv_schema_options {
        latent: kv_latent_format::F32 as u32,
        index_k: kv_index_k_format::F32 as u32,
        config_json: config.as_ptr(),
        weights_digest: digest.as_ptr(),
    });
    let mut schema = null_mut();
    is!(Ok, kv_schema_create(&options, &mut schema));
    schema
}

pub(crate) fn agent() -> *mut kv_agent {
    let options = sized!(kv_agent_options {
        name: c"tester".as_ptr()
    });
    let mut agent = null_mut();
    is!(Ok, kv_agent_create(&options, &mut agent));
    agent
}

pub(crate) fn pools_of(schema: *mut kv_schema) -> *mut kv_pools {
    let options = sized!(kv_pool_options {
        memory: kv_memory_kind::Host as u32,
        pages: 2,
        windows: 2,
        requests: 1,
    });
    let mut pools = null_mut();
    is!(Ok, kv_pools_create(schema, &options, &mut pools));
    pools
}

pub(crate) fn plan_of(schema: *mut kv_schema) -> *mut kv_plan {
    let layers = kv_writer_layers {
        rank: 0,
        first_layer: 0,
        end_layer: 3,
    };
    let mut plan = null_mut();
    is!(
        Ok,
        kv_plan_create(schema, PROMPT, &PROMPT, 1, &layers, 1, &mut plan)
    );
    plan
}

pub(crate) fn reserve(pools: *mut kv_pools, room: u64) -> *mut kv_write_lease {
    let mut lease = null_mut();
    is!(Ok, kv_pools_reserve(pools, PROMPT, room, &mut lease));
    lease
}

/// A writer and a reader that are connected, with a schema each.
pub(crate) struct World {
    pub(crate) writer: *mut kv_agent,
    pub(crate) reader: *mut kv_agent,
    pub(crate) to_reader: u32,
    pub(crate) to_writer: u32,
    pub(crate) schema: *mut kv_schema,
    pub(crate) source: *mut kv_pools,
    pub(crate) target: *mut kv_pools,
    pub(crate) plan: *mut kv_plan,
}

impl World {
    pub(crate) fn new() -> World {
        let (writer, reader, schema) = (agent(), agent(), schema_of(CONFIG, 1));
        let (source, target) = (pools_of(schema), pools_of(schema));
        is!(Ok, kv_pools_register(source, writer));
        is!(Ok, kv_pools_register(target, reader));
        is!(InvalidState, kv_pools_register(target, reader));
        let (mut to_reader, mut to_writer) = (0, 0);
        is!(
            Ok,
            kv_agent_connect_local(writer, reader, &mut to_reader, &mut to_writer)
        );
        let plan = plan_of(schema);
        World {
            writer,
            reader,
            to_reader,
            to_writer,
            schema,
            source,
            target,
            plan,
        }
    }

    pub(crate) fn expect(&self, room: u64, verify: kv_verify) -> *mut kv_flight {
        self.expect_by(self.reader, self.to_writer, room, verify)
    }

    /// A flight into the reader's pools that some agent expects.
    pub(crate) fn expect_by(
        &self,
        agent: *mut kv_agent,
        peer: u32,
        room: u64,
        verify: kv_verify,
    ) -> *mut kv_flight {
        let lease = reserve(self.target, room);
        let writer = kv_writer { peer, rank: 0 };
        let options = sized!(kv_expect_options {
            verify: verify as u32,
            epoch: room,
            writers: &writer,
            writer_count: 1,
        });
        let mut flight = null_mut();
        is!(
            Ok,
            kv_write_lease_expect(lease, self.plan, agent, &options, &mut flight)
        );
        is!(
            InvalidState,
            "became a flight",
            kv_write_lease_close(lease, 0)
        );
        is!(Ok, kv_write_lease_release(lease));
        flight
    }

    pub(crate) fn offer(&self, flight: *mut kv_flight) -> *mut kv_offer {
        let bytes = offer_bytes(flight);
        let mut offer = null_mut();
        is!(
            Ok,
            kv_offer_parse(self.schema, bytes.as_ptr(), bytes.len(), &mut offer)
        );
        offer
    }

    /// Writes `content` over every page of a layer, commits and sends it.
    pub(crate) fn send(
        &self,
        lease: *mut kv_write_lease,
        offer: *mut kv_offer,
        layer: u32,
        content: u8,
    ) {
        let mut rows = null_mut();
        is!(Ok, kv_write_lease_layer(lease, layer, &mut rows));
        for (component, pages) in self.components(layer) {
            for ordinal in 0..pages {
                let page = page(rows, component, ordinal);
                assert_eq!(page.is_writable, 1);
                // SAFETY: a page of this lease, which nobody sends yet.
                unsafe {
                    page.address
                        .cast::<u8>()
                        .write_bytes(content, page.length_bytes as usize);
                }
            }
        }
        let mut written = null_mut();
        is!(
            Busy,
            kv_write_lease_commit(lease, layer, 0, PROMPT, &mut written)
        );
        is!(Ok, kv_layer_release(rows));
        is!(
            Ok,
            kv_write_lease_commit(lease, layer, 0, PROMPT, &mut written)
        );
        let mut transfer = null_mut();
        let (plan, agent, peer) = (self.plan, self.writer, self.to_reader);
        let within = PATIENCE_MS;
        is!(
            Ok,
            kv_written_post(written, plan, 0, agent, peer, offer, within, &mut transfer)
        );
        is!(Ok, kv_transfer_wait(transfer, PATIENCE_MS, null_mut()));
        is!(Ok, kv_transfer_release(transfer));
        is!(Ok, kv_written_release(written));
    }

    /// The components of a layer and the pages that 300 tokens have of each.
    pub(crate) fn components(&self, layer: u32) -> Vec<(u32, u32)> {
        let mut found = Vec::new();
        for component in 0..8 {
            let mut info = sized!(kv_component_info {});
            is!(
                Ok,
                kv_schema_component(self.schema, layer, component, &mut info)
            );
            if info.is_present == 1 {
                let per_slot = match info.rows_per_page == 64 && info.group_tokens == 1 {
                    true => 4,
                    false => 1,
                };
                let is_request = component == kv_component::C128State as u32;
                let slots = if is_request { 1 } else { 2 };
                found.push((component, slots * per_slot));
            }
        }
        found
    }

    pub(crate) fn end(self) {
        let mut stats = sized!(kv_pool_stats {});
        for pools in [self.source, self.target] {
            is!(Ok, kv_pools_stats(pools, &mut stats));
            assert_eq!(
                (stats.pages.free, stats.windows.free, stats.requests.free),
                (2, 2, 1)
            );
            is!(Ok, kv_pools_unregister(pools, PATIENCE_MS));
            is!(Ok, kv_pools_release(pools));
        }
        is!(Ok, kv_plan_release(self.plan));
        is!(Ok, kv_schema_release(self.schema));
        is!(Ok, kv_agent_release(self.writer));
        is!(Ok, kv_agent_release(self.reader));
    }
}

pub(crate) fn offer_bytes(flight: *mut kv_flight) -> Vec<u8> {
    let mut length = 0;
    is!(
        InvalidArgument,
        kv_flight_offer(flight, null_mut(), 0, &mut length)
    );
    let mut bytes = vec![0; length];
    is!(
        Ok,
        kv_flight_offer(flight, bytes.as_mut_ptr(), length, &mut length)
    );
    bytes
}

pub(crate) fn page(layer: *mut kv_layer, component: u32, ordinal: u32) -> kv_page {
    let mut page = sized!(kv_page {});
    is!(Ok, kv_layer_page(layer, component, ordinal, &mut page));
    page
}

pub(crate) fn no_page() -> kv_page {
    sized!(kv_page {})
}

pub(crate) fn read_lease(flight: *mut kv_flight, access: kv_access) -> *mut kv_read_lease {
    let mut lease = null_mut();
    is!(Ok, kv_flight_lease(flight, access as u32, &mut lease));
    lease
}
