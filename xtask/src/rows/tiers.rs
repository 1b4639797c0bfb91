//! Reports of tiers from the field, and the tests that keep each one out of this one.

use super::{Cover, Row, row};

pub(super) static TIERS: [Row; 35] = [
    row(
        "TR-01",
        "an index pool is read without the wait for its layer",
        Cover::Tests(&[
            (
                "loom-tests/tests/tiers.rs",
                "a_request_reads_every_component_behind_its_load",
            ),
            (
                "hicache/tests/scenarios/dev_02.rs",
                "dev_02_a_layer_is_read_behind_its_own_fence",
            ),
        ]),
    ),
    row(
        "TR-02",
        "one pool is evicted between the look and the read, and the whole prefix is committed",
        Cover::Tests(&[
            (
                "hicache/tests/scenarios/dev_11.rs",
                "dev_11_a_hole_at_any_page_ends_the_prefix_before_it",
            ),
            (
                "hicache/src/testkit/contract.rs",
                "gone_between_look_and_read",
            ),
        ]),
    ),
    row(
        "TR-03",
        "a prefetch that was cut short publishes pages without their indexer keys",
        Cover::Tests(&[
            (
                "hicache/tests/scenarios/dev_11.rs",
                "dev_11_a_hole_at_any_page_ends_the_prefix_before_it",
            ),
            (
                "hicache/tests/scenarios/dev_11.rs",
                "dev_11_a_fetch_that_stops_at_any_page_publishes_what_has_come",
            ),
        ]),
    ),
    row(
        "TR-04",
        "tool calls are garbled after a load from storage",
        Cover::Partly(
            "a real model that calls tools needs a GPU",
            &[
                (
                    "hicache/tests/storage.rs",
                    "a_prefix_comes_back_from_storage_byte_for_byte",
                ),
                (
                    "examples/tests/turns_storage.rs",
                    "a_second_run_goes_on_from_the_directory_and_no_other_cache_does",
                ),
            ],
        ),
    ),
    row(
        "TR-05",
        "a restored prefix has the state of another request, also after a restart",
        Cover::Tests(&[
            (
                "hicache/tests/lives/main.rs",
                "any_life_publishes_what_can_be_restored",
            ),
            (
                "examples/tests/turns_storage.rs",
                "a_second_run_goes_on_from_the_directory_and_no_other_cache_does",
            ),
        ]),
    ),
    row(
        "TR-06",
        "a length is reported that cannot be restored",
        Cover::Tests(&[
            (
                "hicache/tests/lives/main.rs",
                "any_life_publishes_what_can_be_restored",
            ),
            (
                "kvcache/tests/prefix.rs",
                "a_hit_is_the_minimum_over_the_components",
            ),
        ]),
    ),
    row(
        "TR-07",
        "a pool of a new model is not stored at all",
        Cover::Tests(&[
            (
                "hicache/tests/scenarios/dev_01.rs",
                "dev_01_a_tier_without_a_component_is_refused",
            ),
            (
                "hicache/tests/tier_contract.rs",
                "a_tier_that_is_too_small_for_a_component_is_refused",
            ),
            (
                "hicache/src/record/shape.rs",
                "every_component_that_lasts_is_in_one_of_the_two",
            ),
        ]),
    ),
    row(
        "TR-08",
        "two formats of the same rows share keys in one directory",
        Cover::Tests(&[
            ("hicache/src/testkit/contract.rs", "namespaces"),
            (
                "examples/tests/turns_storage.rs",
                "a_second_run_goes_on_from_the_directory_and_no_other_cache_does",
            ),
        ]),
    ),
    row(
        "TR-09",
        "stale rows after an update of the weights",
        Cover::Tests(&[
            ("hicache/src/testkit/contract.rs", "namespaces"),
            (
                "kvcache/src/identity_tests.rs",
                "whatever_decides_a_byte_is_in_the_namespace",
            ),
        ]),
    ),
    row(
        "TR-10",
        "a stored key leaves the namespace of its tenant out",
        Cover::Tests(&[
            ("hicache/src/testkit/contract.rs", "namespaces"),
            (
                "hicache/tests/namespaces.rs",
                "a_host_tier_of_another_tenant_is_refused",
            ),
        ]),
    ),
    row(
        "TR-11",
        "a tenant learns from the figures what another one has stored",
        Cover::Tests(&[(
            "hicache/tests/reports.rs",
            "no_figure_tells_one_tenant_what_another_one_has",
        )]),
    ),
    row(
        "TR-12",
        "collisions of a weak hash can be made",
        Cover::Rule(
            "a rule of the design: keys are 32 bytes of a chained cryptographic hash",
            &[(
                "kvcache/src/identity_tests.rs",
                "a_key_covers_everything_before_it",
            )],
        ),
    ),
    row(
        "TR-13",
        "keys differ between processes, and nothing is ever found",
        Cover::Tests(&[
            (
                "kvcache/src/identity_tests.rs",
                "keys_are_the_same_on_every_machine",
            ),
            (
                "examples/tests/turns_storage.rs",
                "a_second_run_goes_on_from_the_directory_and_no_other_cache_does",
            ),
        ]),
    ),
    row(
        "TR-14",
        "a lookup asks for another key than the store has used",
        Cover::Tests(&[
            (
                "hicache/tests/storage.rs",
                "a_prefix_comes_back_from_storage_byte_for_byte",
            ),
            (
                "kvcache/src/identity_tests.rs",
                "a_block_is_hashed_once_however_the_tokens_come",
            ),
        ]),
    ),
    row(
        "TR-15",
        "a store copies pages before they are written, or after they have another owner",
        Cover::Tests(&[
            (
                "hicache/tests/scenarios/dev_06.rs",
                "dev_06_nothing_is_backed_up_before_it_is_written",
            ),
            (
                "loom-tests/tests/tiers.rs",
                "host_slots_are_used_again_behind_their_copy",
            ),
            (
                "loom-tests/tests/append.rs",
                "appending_waits_for_the_layer",
            ),
        ]),
    ),
    row(
        "TR-16",
        "five races of a load-back with writers, evictions and freed pages",
        Cover::Tests(&[
            (
                "loom-tests/tests/tiers.rs",
                "a_request_reads_every_component_behind_its_load",
            ),
            (
                "loom-tests/tests/tiers.rs",
                "two_loads_of_one_prefix_are_one",
            ),
            (
                "loom-tests/tests/tiers.rs",
                "host_slots_are_used_again_behind_their_copy",
            ),
            (
                "loom-tests/tests/tiers.rs",
                "who_waits_for_a_failed_load_hears_of_it",
            ),
            (
                "loom-tests/tests/reader_fence.rs",
                "a_step_keeps_what_it_reads",
            ),
            (
                "loom-tests/tests/cancel_reuse.rs",
                "a_late_write_never_hits_the_next_owner",
            ),
        ]),
    ),
    row(
        "TR-17",
        "a lease runs out under a slow reader",
        Cover::Tests(&[
            (
                "hicache/tests/log_faults.rs",
                "a_reader_finishes_over_an_eviction",
            ),
            (
                "hicache/tests/storage.rs",
                "a_slow_tier_is_a_miss_and_keeps_its_slots",
            ),
        ]),
    ),
    row(
        "TR-18",
        "keys are listed whose values are gone",
        Cover::Tests(&[
            ("hicache/src/testkit/contract.rs", "eviction"),
            ("hicache/tests/log_faults.rs", "any_life_of_a_log"),
        ]),
    ),
    row(
        "TR-19",
        "probes keep everything from being evicted",
        Cover::Tests(&[("hicache/src/testkit/contract.rs", "eviction")]),
    ),
    row(
        "TR-20",
        "a remote store that is killed makes wrong output",
        Cover::Tests(&[
            (
                "hicache/tests/redis.rs",
                "redis_killed_in_the_middle_gives_misses_and_nothing_wrong",
            ),
            (
                "hicache/tests/s3.rs",
                "s3_killed_in_the_middle_gives_misses_and_nothing_wrong",
            ),
        ]),
    ),
    row(
        "TR-21",
        "pins are never released, or twice, and the hits go to zero over hours",
        Cover::Tests(&[
            (
                "hicache/tests/lives/main.rs",
                "any_life_publishes_what_can_be_restored",
            ),
            ("hicache/tests/moves.rs", "many_loads_of_one_prefix_are_one"),
        ]),
    ),
    row(
        "TR-22",
        "a restart loses the index, or counts from zero and fills the disk",
        Cover::Tests(&[
            ("hicache/src/testkit/contract.rs", "restart"),
            (
                "hicache/tests/log_faults.rs",
                "a_long_life_conserves_records_and_bytes",
            ),
            (
                "hicache/tests/lives/main.rs",
                "any_life_publishes_what_can_be_restored",
            ),
        ]),
    ),
    row(
        "TR-23",
        "one file that cannot be removed, or a full disk, stops everything",
        Cover::Tests(&[
            (
                "hicache/tests/log_faults.rs",
                "an_undeletable_file_does_not_stop_eviction",
            ),
            (
                "hicache/tests/log_faults.rs",
                "a_full_disk_evicts_and_goes_on",
            ),
            (
                "hicache/tests/bad_input.rs",
                "a_directory_that_takes_nothing_more_costs_stores_only",
            ),
        ]),
    ),
    row(
        "TR-24",
        "prefixes that come once wear the disk out and push the others out",
        Cover::Tests(&[
            (
                "hicache/src/policy/s3fifo.rs",
                "a_scan_does_not_push_out_what_is_asked_for_again",
            ),
            (
                "hicache/tests/storage.rs",
                "a_prefix_is_stored_at_its_second_sight",
            ),
            (
                "examples/tests/tier_bench.rs",
                "a_trace_is_replayed_under_both_policies",
            ),
            (
                "hicache/tests/metrics.rs",
                "every_move_of_a_prefix_is_counted_where_it_happened",
            ),
        ]),
    ),
    row(
        "TR-25",
        "a lazy store never stores anything",
        Cover::Tests(&[
            (
                "hicache/tests/metrics.rs",
                "every_move_of_a_prefix_is_counted_where_it_happened",
            ),
            (
                "hicache/tests/storage.rs",
                "what_is_written_back_is_stored_before_it_is_needed_elsewhere",
            ),
            (
                "examples/tests/turns_storage.rs",
                "a_storage_tier_without_a_hit_shows_nothing",
            ),
        ]),
    ),
    row(
        "TR-26",
        "a collective inside the cache dead-locks the ranks",
        Cover::Rule(
            "a rule of the design: the cache has no collective",
            &[(
                "hicache/tests/scenarios/dev_14.rs",
                "dev_14_ranks_take_part_in_the_same_collectives",
            )],
        ),
    ),
    row(
        "TR-27",
        "a hit that is on its way is waited for without a deadline",
        Cover::Tests(&[
            (
                "hicache/tests/storage.rs",
                "a_slow_tier_is_a_miss_and_keeps_its_slots",
            ),
            (
                "loom-tests/tests/tiers.rs",
                "who_waits_for_a_failed_load_hears_of_it",
            ),
            (
                "hicache/tests/bad_input.rs",
                "a_tier_that_panics_is_a_miss_and_its_worker_goes_on",
            ),
            ("hicache/tests/redis.rs", "redis_that_says_nothing_is_late"),
        ]),
    ),
    row(
        "TR-28",
        "a disk tier hangs without its fast path, or is slower than computing",
        Cover::Partly(
            "files are read the portable way only, so there is no fast path to fall back from; the time to open is \
             measured by tier-bench",
            &[
                (
                    "hicache/tests/weighing.rs",
                    "what_a_slow_tier_has_is_computed_and_now_and_then_tried_again",
                ),
                (
                    "hicache/tests/storage.rs",
                    "a_damaged_record_is_read_from_the_tier_behind",
                ),
                (
                    "examples/tests/tier_bench.rs",
                    "every_row_has_its_bare_loop_and_no_bad_block",
                ),
            ],
        ),
    ),
    row(
        "TR-29",
        "layouts with several groups of layers disable or break a connector",
        Cover::Tests(&[
            ("hicache/src/testkit/contract.rs", "real_records"),
            (
                "hicache/src/record/shape.rs",
                "every_component_that_lasts_is_in_one_of_the_two",
            ),
            (
                "hicache/src/record/shape.rs",
                "flash_and_pro_have_the_known_sizes",
            ),
        ]),
    ),
    row(
        "TR-30",
        "rows that all ranks share are stored once per rank",
        Cover::Tests(&[
            (
                "hicache/tests/reports.rs",
                "readers_share_one_copy_in_every_tier",
            ),
            ("hicache/tests/storage.rs", "a_record_is_stored_once"),
        ]),
    ),
    row(
        "TR-31",
        "a prefix hit reads the stale window of another request",
        Cover::Tests(&[
            (
                "model/tests/resume.rs",
                "a_resumed_run_leaves_the_bits_of_a_cold_one",
            ),
            ("model/tests/resume.rs", "branches_do_not_see_each_other"),
            (
                "examples/tests/turns.rs",
                "turns_over_every_kind_of_transport_have_the_bits_of_a_cold_run",
            ),
        ]),
    ),
    row(
        "TR-32",
        "no hits below the common multiple of the group sizes",
        Cover::Tests(&[(
            "hicache/tests/reports.rs",
            "a_hit_ends_at_the_last_whole_block",
        )]),
    ),
    row(
        "TR-33",
        "a run behind a hit has other bits than a cold one",
        Cover::Tests(&[
            (
                "model/tests/resume.rs",
                "a_resumed_run_leaves_the_bits_of_a_cold_one",
            ),
            (
                "examples/tests/turns.rs",
                "short_tails_behind_a_boundary_have_the_bits_of_a_cold_run",
            ),
        ]),
    ),
    row(
        "TR-34",
        "a store fails in silence and counts as done",
        Cover::Tests(&[
            ("hicache/tests/storage.rs", "a_failing_tier_is_a_miss"),
            (
                "hicache/tests/lives/main.rs",
                "any_life_publishes_what_can_be_restored",
            ),
        ]),
    ),
    row(
        "TR-35",
        "hashing and lookups that grow with the square of the prompt",
        Cover::Tests(&[
            (
                "kvcache/src/identity_tests.rs",
                "a_million_tokens_are_4096_keys",
            ),
            (
                "kvcache/src/identity_tests.rs",
                "a_block_is_hashed_once_however_the_tokens_come",
            ),
        ]),
    ),
];
