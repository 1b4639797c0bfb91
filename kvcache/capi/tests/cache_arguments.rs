//! Every function of the cache, called with what it cannot work with: a typed answer and a message.
#![allow(clippy::unwrap_used)]

#[macro_use]
mod support;

use std::ffi::CString;
use std::ptr::{null, null_mut};

use kvgate::*;
use support::{made_up, message};

const CONFIG: &str = r#"{
    "model_type": "deepseek_v4", "num_hidden_layers": 2, "compress_ratios": [0, 4],
    "head_dim": 32, "qk_rope_head_dim": 16, "index_head_dim": 16, "sliding_window": 128,
    "rope_theta": 10000, "compress_rope_theta": 160000,
    "rope_scaling": { "factor": 16, "original_max_position_embeddings": 65536,
                      "beta_fast": 32, "beta_slow": 1 } }"#;

const DIGEST: [u8; KV_DIGEST_BYTES] = [7; KV_DIGEST_BYTES];

fn schema() -> *mut kv_schema {
    let config = CString::new(CONFIG).unwrap();
    let options = sized!(kv_schema_options {
        latent: kv_latent_format::F32 as u32,
        index_k: kv_index_k_format::F32 as u32,
        config_json: config.as_ptr(),
        weights_digest: DIGEST.as_ptr(),
    });
    let mut schema = null_mut();
    done!(kv_schema_create(&options, &mut schema));
    schema
}

fn pools(schema: *mut kv_schema) -> *mut kv_pools {
    let options = sized!(kv_pool_options {
        memory: kv_memory_kind::Host as u32,
        pages: 2,
        windows: 2,
        requests: 2,
    });
    let mut pools = null_mut();
    done!(kv_pools_create(schema, &options, &mut pools));
    pools
}

#[test]
fn handles_that_are_none_are_refused_by_every_function() {
    let (mut number, mut length) = (0_u32, 0_usize);
    for schema in made_up::<kv_schema>().into_iter().chain([null_mut()]) {
        refused!("schema", kv_schema_layer_count(schema, &mut number));
        refused!("schema", kv_schema_component(schema, 0, 0, null_mut()));
        refused!("schema", kv_schema_slots(schema, 1, null_mut(), null_mut()));
        refused!("schema", kv_schema_fingerprint(schema, null_mut()));
        refused!("schema", kv_pools_create(schema, null(), null_mut()));
        refused!(
            "schema",
            kv_plan_create(schema, 1, null(), 0, null(), 0, null_mut())
        );
        refused!("schema", kv_offer_parse(schema, null(), 0, null_mut()));
    }
    for pools in made_up::<kv_pools>().into_iter().chain([null_mut()]) {
        refused!("pool set", kv_pools_register(pools, null()));
        refused!("pool set", kv_pools_unregister(pools, 0));
        refused!("pool set", kv_pools_stats(pools, null_mut()));
        refused!("pool set", kv_pools_reserve(pools, 1, 1, null_mut()));
    }
    for lease in made_up::<kv_write_lease>().into_iter().chain([null_mut()]) {
        refused!("write lease", kv_write_lease_layer(lease, 0, null_mut()));
        refused!(
            "write lease",
            kv_write_lease_commit(lease, 0, 0, 1, null_mut())
        );
        refused!("write lease", kv_write_lease_close(lease, 0));
        refused!(
            "write lease",
            kv_write_lease_expect(lease, null(), null(), null(), null_mut())
        );
    }
    for written in made_up::<kv_written>().into_iter().chain([null_mut()]) {
        let none = null_mut();
        refused!(
            "written layer",
            kv_written_post(written, null(), 0, null(), 0, null(), 0, none)
        );
    }
    for offer in made_up::<kv_offer>().into_iter().chain([null_mut()]) {
        refused!("offer", kv_offer_describe(offer, null_mut()));
        refused!("offer", kv_offer_plan(offer, null(), 0, null_mut()));
    }
    for flight in made_up::<kv_flight>().into_iter().chain([null_mut()]) {
        refused!(
            "flight",
            kv_flight_offer(flight, null_mut(), 0, &mut length)
        );
        refused!("flight", kv_flight_lease(flight, 1, null_mut()));
        refused!("flight", kv_flight_verify(flight, 0, null_mut()));
    }
    for lease in made_up::<kv_read_lease>().into_iter().chain([null_mut()]) {
        refused!("read lease", kv_read_lease_layer(lease, 0, 0, null_mut()));
    }
    for layer in made_up::<kv_layer>().into_iter().chain([null_mut()]) {
        refused!("layer", kv_layer_page(layer, 0, 0, null_mut()));
    }
}

#[test]
fn releasing_takes_null_and_refuses_what_is_no_handle() {
    releases!(
        kv_schema_release("schema"),
        kv_pools_release("pool set"),
        kv_plan_release("plan"),
        kv_offer_release("offer"),
        kv_write_lease_release("write lease"),
        kv_written_release("written layer"),
        kv_read_lease_release("read lease"),
        kv_layer_release("layer"),
    );
}

#[test]
fn a_schema_names_what_does_not_fit() {
    let config = CString::new(CONFIG).unwrap();
    let good = sized!(kv_schema_options {
        latent: kv_latent_format::F32 as u32,
        index_k: kv_index_k_format::F32 as u32,
        config_json: config.as_ptr(),
        weights_digest: DIGEST.as_ptr(),
    });
    let mut schema = null_mut();
    type Change = fn(&mut kv_schema_options);
    let changes: [(Change, &str); 10] = [
        (|o| o.struct_bytes -= 8, "kv_schema_options.struct_bytes"),
        (|o| o.latent = 0, "latent cannot be 0"),
        (|o| o.index_k = 4, "index_k cannot be 4"),
        (
            |o| o.window_page_rows = 128,
            "window_page_rows cannot be 128",
        ),
        (|o| o.drafting = 2, "drafting cannot be 2"),
        (|o| o.reserved = 1, "reserved cannot be 1"),
        (|o| o.config_json = null(), "config_json is NULL"),
        (|o| o.config_json = c"{".as_ptr(), "not JSON"),
        (|o| o.weights_digest = null(), "weights_digest is NULL"),
        (
            |o| o.latent = kv_latent_format::PackedFp8 as u32,
            "head_dim is 32",
        ),
    ];
    for (change, what) in changes {
        let mut options = good;
        change(&mut options);
        // SAFETY: local values.
        let status = unsafe { kv_schema_create(&options, &mut schema) };
        assert_eq!(status, kv_status::InvalidArgument, "{what}");
        assert!(message().contains(what), "{what}: {}", message());
    }
    refused!(
        "kv_schema_options is NULL",
        kv_schema_create(null(), &mut schema)
    );
    refused!("schema is NULL", kv_schema_create(&good, null_mut()));
    assert!(schema.is_null());
}

#[test]
fn a_schema_answers_about_what_it_has() {
    let schema = self::schema();
    let mut layers = 0;
    done!(kv_schema_layer_count(schema, &mut layers));
    assert_eq!(layers, 2);
    let mut info = sized!(kv_component_info {});
    done!(kv_schema_component(
        schema,
        0,
        kv_component::IndexK as u32,
        &mut info
    ));
    assert_eq!(info.is_present, 0);
    done!(kv_schema_component(
        schema,
        1,
        kv_component::C4State as u32,
        &mut info
    ));
    assert_eq!(
        (info.is_present, info.format),
        (1, kv_row_format::F32Rows as u32)
    );
    assert_eq!((info.channels, info.parts, info.row_bytes), (32, 4, 512));
    assert_eq!((info.rows_per_page, info.entries_per_page), (8, 256));
    refused!(
        "layer 2 does not exist",
        kv_schema_component(schema, 2, 0, &mut info)
    );
    refused!(
        "layer is 65536",
        kv_schema_component(schema, 65_536, 0, &mut info)
    );
    refused!(
        "no kv_component",
        kv_schema_component(schema, 0, 8, &mut info)
    );
    info.struct_bytes = 4;
    refused!(
        "kv_component_info.struct_bytes",
        kv_schema_component(schema, 0, 0, &mut info)
    );
    let (mut pages, mut windows) = (0, 0);
    done!(kv_schema_slots(schema, 600, &mut pages, &mut windows));
    assert_eq!((pages, windows), (3, 2));
    refused!(
        "windows is NULL",
        kv_schema_slots(schema, 600, &mut pages, null_mut())
    );
    let (mut one, mut other) = ([0; KV_DIGEST_BYTES], [0; KV_DIGEST_BYTES]);
    done!(kv_schema_fingerprint(schema, one.as_mut_ptr()));
    let again = self::schema();
    done!(kv_schema_fingerprint(again, other.as_mut_ptr()));
    assert!(one == other && one != [0; KV_DIGEST_BYTES]);
    refused!(
        "fingerprint is NULL",
        kv_schema_fingerprint(schema, null_mut())
    );
    done!(kv_schema_release(again));
    done!(kv_schema_release(schema));
}

#[test]
fn pools_and_leases_check_their_numbers() {
    let schema = self::schema();
    let good = sized!(kv_pool_options {
        memory: kv_memory_kind::Host as u32,
        pages: 2,
        windows: 2,
        requests: 2,
    });
    let (mut made, mut lease, mut layer) = (null_mut(), null_mut(), null_mut());
    type Change = fn(&mut kv_pool_options);
    let changes: [(Change, &str); 4] = [
        (|o| o.struct_bytes = 0, "kv_pool_options.struct_bytes"),
        (|o| o.memory = 0, "kv_memory_kind"),
        (|o| o.pages = 0, "pages"),
        (|o| o.reserved = 1, "reserved is 1"),
    ];
    for (change, what) in changes {
        let mut options = good;
        change(&mut options);
        // SAFETY: local values and a live handle.
        let status = unsafe { kv_pools_create(schema, &options, &mut made) };
        assert_eq!(status, kv_status::InvalidArgument, "{what}");
        assert!(message().contains(what), "{what}: {}", message());
    }
    let pools = self::pools(schema);
    refused!("agent", kv_pools_register(pools, null()));
    refused!("total_tokens", kv_pools_reserve(pools, 0, 1, &mut lease));
    refused!("never", kv_pools_reserve(pools, 1000, 1, &mut lease));
    refused!("lease is NULL", kv_pools_reserve(pools, 1, 1, null_mut()));
    done!(kv_pools_reserve(pools, 300, 1, &mut lease));
    let mut second = null_mut();
    // SAFETY: local values and a live handle.
    let full = unsafe { kv_pools_reserve(pools, 300, 2, &mut second) };
    assert_eq!(full, kv_status::Full);
    refused!(
        "layer 2 does not exist",
        kv_write_lease_layer(lease, 2, &mut layer)
    );
    refused!(
        "layer is 65536",
        kv_write_lease_layer(lease, 65_536, &mut layer)
    );
    refused!(
        "layer 2 does not exist",
        kv_write_lease_commit(lease, 2, 0, 1, &mut null_mut())
    );
    done!(kv_write_lease_layer(lease, 1, &mut layer));
    // SAFETY: a live handle.
    assert_eq!(unsafe { kv_write_lease_close(lease, 0) }, kv_status::Busy);
    refused!("page", kv_layer_page(layer, 0, 0, null_mut()));
    done!(kv_write_lease_release(lease));
    let mut page = sized!(kv_page {});
    done!(kv_layer_page(
        layer,
        kv_component::IndexK as u32,
        1,
        &mut page
    ));
    assert_eq!(
        (page.is_writable, page.page_count),
        (1, 2),
        "a layer keeps its lease"
    );
    done!(kv_layer_release(layer));
    let mut stats = sized!(kv_pool_stats {});
    done!(kv_pools_stats(pools, &mut stats));
    assert_eq!((stats.pages.free, stats.requests.free), (2, 2));
    stats.struct_bytes = 0;
    refused!(
        "kv_pool_stats.struct_bytes",
        kv_pools_stats(pools, &mut stats)
    );
    done!(kv_pools_release(pools));
    done!(kv_schema_release(schema));
}

#[test]
fn plans_and_offers_check_their_numbers() {
    let schema = self::schema();
    let mut plan = null_mut();
    let layers = |first_layer, end_layer| kv_writer_layers {
        rank: 0,
        first_layer,
        end_layer,
    };
    let mut create = |tokens: u32, ends: &[u32], writers: &[kv_writer_layers]| {
        let (ends, end_count) = (ends.as_ptr(), ends.len());
        let (writers, count) = (writers.as_ptr(), writers.len());
        // SAFETY: local slices and a live handle.
        unsafe { kv_plan_create(schema, tokens, ends, end_count, writers, count, &mut plan) }
    };
    let all = layers(0, 2);
    for (tokens, ends, writers, what) in [
        (300, vec![], vec![all], "segment_ends"),
        (300, vec![299], vec![all], "300"),
        (300, vec![100, 300], vec![all], "256"),
        (300, vec![300], vec![], "one writer"),
        (300, vec![300], vec![layers(0, 1)], "one writer for layer 1"),
        (300, vec![300], vec![all, all], "one writer for layer 0"),
        (300, vec![300], vec![layers(0, 65_536)], "end_layer"),
        (
            300,
            vec![300],
            vec![kv_writer_layers {
                rank: 65_536,
                ..all
            }],
            "rank",
        ),
    ] {
        assert_eq!(
            create(tokens, &ends, &writers),
            kv_status::InvalidArgument,
            "{what}"
        );
        assert!(message().contains(what), "{what}: {}", message());
    }
    assert_eq!(create(300, &[256, 300], &[all]), kv_status::Ok);
    let mut offer = null_mut();
    refused!(
        "bytes is NULL",
        kv_offer_parse(schema, null(), 9, &mut offer)
    );
    refused!(
        "not an offer: 0 bytes",
        kv_offer_parse(schema, null(), 0, &mut offer)
    );
    refused!(
        "not an offer",
        kv_offer_parse(schema, [0; 64].as_ptr(), 64, &mut offer)
    );
    let pools = self::pools(schema);
    let (mut lease, mut flight) = (null_mut(), null_mut());
    done!(kv_pools_reserve(pools, 200, 1, &mut lease));
    refused!(
        "plan",
        kv_write_lease_expect(lease, null(), null(), null(), &mut flight)
    );
    refused!(
        "agent",
        kv_write_lease_expect(lease, plan, null(), null(), &mut flight)
    );
    let agent = agent();
    refused!(
        "kv_expect_options",
        kv_write_lease_expect(lease, plan, agent, null(), &mut flight)
    );
    let mut options = sized!(kv_expect_options { verify: 3 });
    refused!(
        "no kv_verify",
        kv_write_lease_expect(lease, plan, agent, &options, &mut flight)
    );
    options.verify = 0;
    refused!(
        "slots",
        kv_write_lease_expect(lease, plan, agent, &options, &mut flight)
    );
    assert!(flight.is_null());
    let mut layer = null_mut();
    done!(kv_write_lease_layer(lease, 0, &mut layer));
    done!(kv_layer_release(layer));
    done!(kv_write_lease_close(lease, 1000));
    done!(kv_write_lease_release(lease));
    done!(kv_agent_release(agent));
    done!(kv_pools_release(pools));
    done!(kv_plan_release(plan));
    done!(kv_schema_release(schema));
}

fn agent() -> *mut kv_agent {
    let options = sized!(kv_agent_options {
        name: c"tester".as_ptr()
    });
    let mut agent = null_mut();
    done!(kv_agent_create(&options, &mut agent));
    agent
}
