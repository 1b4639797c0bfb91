//! The calls of a paged cache: pools, leases, plans, flights and offers.

use std::ptr::null_mut;

use kvgate::*;

use super::{Machine, releaser, text};

const CONFIG: &str = r#"{
    "model_type": "deepseek_v4", "num_hidden_layers": 3, "compress_ratios": [0, 4, 128],
    "head_dim": 32, "qk_rope_head_dim": 16, "index_head_dim": 16, "sliding_window": 128,
    "rope_theta": 10000, "compress_rope_theta": 160000,
    "rope_scaling": { "type": "yarn", "factor": 16, "original_max_position_embeddings": 65536,
                      "beta_fast": 32, "beta_slow": 1 } }"#;

/// Tokens: mostly lengths around the borders of a page.
const LENGTHS: [u32; 8] = [0, 1, 127, 128, 255, 256, 300, 513];

impl Machine<'_> {
    fn tokens(&mut self) -> u32 {
        match self.program.byte() {
            0xF0.. => self.program.number(),
            small => LENGTHS[usize::from(small) % LENGTHS.len()],
        }
    }

    fn schema(&mut self) {
        let digest = [self.program.byte() % 2; KV_DIGEST_BYTES];
        let size = self.program.bytes_of::<kv_schema_options>();
        // Now and then a configuration that ends in the middle.
        let end = match self.program.byte() {
            cut @ 0xC0.. => usize::from(cut) % CONFIG.len(),
            _ => CONFIG.len(),
        };
        let config = text(&CONFIG[..end]);
        let options = kv_schema_options {
            struct_bytes: size,
            latent: 2,
            index_k: 3,
            window_page_rows: [0, 64, 256, 7][usize::from(self.program.byte()) % 4],
            drafting: u32::from(self.program.byte() % 3),
            reserved: 0,
            config_json: config.as_ptr(),
            weights_digest: digest.as_ptr(),
            config_digest: null_mut(),
        };
        let mut schema = null_mut();
        // SAFETY: local values, as long as they say.
        let status = unsafe { kv_schema_create(&options, &mut schema) };
        self.answered(status);
        self.keep(schema, releaser!(kv_schema_release));
    }

    fn pools(&mut self) {
        let options = kv_pool_options {
            struct_bytes: self.program.bytes_of::<kv_pool_options>(),
            memory: 1,
            pages: self.program.number().min(64),
            windows: self.program.number().min(64),
            requests: self.program.number().min(64),
            reserved: 0,
        };
        let schema = self.any();
        let mut pools = null_mut();
        // SAFETY: as above.
        let status = unsafe { kv_pools_create(schema, &options, &mut pools) };
        self.answered(status);
        self.keep(pools, releaser!(kv_pools_release));
    }

    fn with_pools(&mut self) {
        let (pools, agent) = (self.any(), self.any());
        // SAFETY: numbers, for which all zero is a value.
        let mut stats: kv_pool_stats = unsafe { std::mem::zeroed() };
        stats.struct_bytes = self.program.bytes_of::<kv_pool_stats>();
        // SAFETY: as above.
        let status = unsafe {
            match self.program.byte() % 3 {
                0 => kv_pools_register(pools, agent),
                1 => kv_pools_unregister(pools, 0),
                _ => kv_pools_stats(pools, &mut stats),
            }
        };
        self.answered(status);
        if status == kv_status::Ok && stats.memory_bytes > 0 {
            for space in [stats.pages, stats.windows, stats.requests] {
                let sum =
                    space.free + space.owned + space.draining + space.quarantined + space.retired;
                assert_eq!(sum, space.capacity, "slots are lost or made up");
            }
        }
    }

    fn reserve(&mut self) {
        let (pools, tokens) = (self.any(), self.tokens());
        let mut lease = null_mut();
        // SAFETY: as above.
        let status = unsafe { kv_pools_reserve(pools, tokens, 1, &mut lease) };
        self.answered(status);
        self.keep(lease, releaser!(kv_write_lease_release));
    }

    fn plan(&mut self) {
        let ends: Vec<u32> = (0..self.program.byte() % 3)
            .map(|_| self.tokens())
            .collect();
        let writers: Vec<_> = (0..self.program.byte() % 3)
            .map(|_| kv_writer_layers {
                rank: self.program.number(),
                first_layer: self.program.number(),
                end_layer: self.program.number(),
            })
            .collect();
        let (schema, tokens) = (self.any(), self.tokens());
        let mut plan = null_mut();
        // SAFETY: as above.
        let status = unsafe {
            kv_plan_create(
                schema,
                tokens,
                ends.as_ptr(),
                ends.len(),
                writers.as_ptr(),
                writers.len(),
                &mut plan,
            )
        };
        self.answered(status);
        self.keep(plan, releaser!(kv_plan_release));
    }

    fn with_lease(&mut self) {
        let (lease, layer) = (self.any(), self.program.number());
        let (first, end) = (self.tokens(), self.tokens());
        let (mut out, mut written) = (null_mut(), null_mut());
        // SAFETY: as above.
        let status = unsafe {
            match self.program.byte() % 3 {
                0 => kv_write_lease_layer(lease, layer, &mut out),
                1 => kv_write_lease_commit(lease, layer, first, end, &mut written),
                _ => kv_write_lease_close(lease, 0),
            }
        };
        self.answered(status);
        self.keep(out, releaser!(kv_layer_release));
        self.keep(written, releaser!(kv_written_release));
    }

    fn send(&mut self) {
        let (written, plan, segment) = (self.any(), self.any(), self.program.number());
        let (agent, peer, offer) = (self.any(), self.program.number(), self.any());
        let mut transfer = null_mut();
        // SAFETY: as above.
        let status = unsafe {
            kv_written_post(written, plan, segment, agent, peer, offer, 0, &mut transfer)
        };
        self.answered(status);
        self.keep(transfer, releaser!(kv_transfer_release));
    }

    fn expect(&mut self) {
        let writer = kv_writer {
            peer: self.program.number(),
            rank: self.program.number(),
        };
        let options = kv_expect_options {
            struct_bytes: self.program.bytes_of::<kv_expect_options>(),
            verify: self.program.number(),
            epoch: self.program.wide(),
            writers: &writer,
            writer_count: usize::from(self.program.byte() % 2),
        };
        let (lease, plan, agent) = (self.any(), self.any(), self.any());
        let mut flight = null_mut();
        // SAFETY: as above.
        let status = unsafe { kv_write_lease_expect(lease, plan, agent, &options, &mut flight) };
        self.answered(status);
        self.keep(flight, releaser!(kv_flight_release));
    }

    fn receive(&mut self) {
        let (flight, number) = (self.any(), self.program.number());
        let (mut lease, mut layer, mut violations) = (null_mut(), null_mut(), 0);
        // SAFETY: as above.
        let status = unsafe {
            match self.program.byte() % 3 {
                0 => kv_flight_lease(flight, number, &mut lease),
                1 => kv_flight_verify(flight, number, &mut violations),
                _ => kv_read_lease_layer(self.any(), number, 0, &mut layer),
            }
        };
        self.answered(status);
        self.keep(lease, releaser!(kv_read_lease_release));
        self.keep(layer, releaser!(kv_layer_release));
    }

    /// Asks for a page, and writes all of it if that is allowed.
    fn page(&mut self) {
        let (layer, component, ordinal) =
            (self.any(), self.program.number(), self.program.number());
        // SAFETY: numbers and a pointer, for which all zero is a value.
        let mut page: kv_page = unsafe { std::mem::zeroed() };
        page.struct_bytes = self.program.bytes_of::<kv_page>();
        // SAFETY: as above.
        let status = unsafe { kv_layer_page(layer, component, ordinal, &mut page) };
        self.answered(status);
        if status == kv_status::Ok && page.is_writable == 1 {
            // SAFETY: so many bytes are there while the layer is held, and no other thread runs.
            unsafe {
                page.address
                    .cast::<u8>()
                    .write_bytes(0x5A, page.length_bytes as usize)
            };
        }
    }

    /// The offer of a flight, damaged or not, read again.
    fn offer(&mut self) {
        let (flight, schema) = (self.any(), self.any());
        let mut bytes = vec![0; 4096];
        let mut length = 0;
        // SAFETY: as above.
        let status =
            unsafe { kv_flight_offer(flight, bytes.as_mut_ptr(), bytes.len(), &mut length) };
        self.answered(status);
        bytes.truncate(length.max(8).min(bytes.len()));
        if self.program.byte() >= 0x80 {
            let place = usize::from(self.program.byte()) % bytes.len();
            bytes[place] ^= self.program.byte();
        }
        let mut offer = null_mut();
        // SAFETY: as above.
        let status = unsafe { kv_offer_parse(schema, bytes.as_ptr(), bytes.len(), &mut offer) };
        self.answered(status);
        self.keep(offer, releaser!(kv_offer_release));
    }

    fn with_offer(&mut self) {
        let offer = self.any();
        let layers = kv_writer_layers {
            rank: 0,
            first_layer: 0,
            end_layer: 3,
        };
        let mut plan = null_mut();
        // SAFETY: numbers, for which all zero is a value.
        let mut info: kv_offer_info = unsafe { std::mem::zeroed() };
        info.struct_bytes = self.program.bytes_of::<kv_offer_info>();
        // SAFETY: as above.
        let status = unsafe {
            match self.program.byte() % 2 {
                0 => kv_offer_plan(offer, &layers, 1, &mut plan),
                _ => kv_offer_describe(offer, &mut info),
            }
        };
        self.answered(status);
        self.keep(plan, releaser!(kv_plan_release));
    }

    pub(super) fn cache_step(&mut self, kind: u8) {
        match (kind, self.program.byte() % 2) {
            (16, 0) => self.schema(),
            (16, _) => self.pools(),
            (17, 0) => self.with_pools(),
            (17, _) => self.reserve(),
            (18, 0) => self.plan(),
            (18, _) => self.with_lease(),
            (19, 0) => self.send(),
            (19, _) => self.expect(),
            (20, 0) => self.receive(),
            (20, _) => self.page(),
            (_, 0) => self.offer(),
            (_, _) => self.with_offer(),
        }
    }

    /// A schema, and pools of the first agent, where programs find them.
    pub(super) fn prepare_cache(&mut self) {
        let (config, digest) = (text(CONFIG), [1; KV_DIGEST_BYTES]);
        // SAFETY: numbers and pointers, for which all zero is a value.
        let mut options: kv_schema_options = unsafe { std::mem::zeroed() };
        options.struct_bytes = size_of::<kv_schema_options>() as u32;
        (options.latent, options.index_k) = (2, 3);
        (options.config_json, options.weights_digest) = (config.as_ptr(), digest.as_ptr());
        let sizes = kv_pool_options {
            struct_bytes: size_of::<kv_pool_options>() as u32,
            memory: 1,
            pages: 3,
            windows: 3,
            requests: 2,
            reserved: 0,
        };
        let (mut schema, mut pools) = (null_mut(), null_mut());
        // SAFETY: local values, as long as they say.
        let all = unsafe {
            [
                kv_schema_create(&options, &mut schema),
                kv_pools_create(schema, &sizes, &mut pools),
            ]
        };
        assert_eq!(all, [kv_status::Ok; 2], "{}", super::message());
        self.made
            .push((schema as usize, releaser!(kv_schema_release)));
        self.made
            .push((pools as usize, releaser!(kv_pools_release)));
        (self.places[6], self.places[7]) = (schema as usize, pools as usize);
    }
}
