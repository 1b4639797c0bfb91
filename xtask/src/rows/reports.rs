//! Reports of transfer engines from the field, and the tests that keep each one out of this one.

use super::{Cover, Row, row};

pub(super) static REPORTS: [Row; 43] = [
    row(
        "FR-01",
        "a write is done when it lies in a socket buffer",
        Cover::Tests(&[
            (
                "transfer/tests/two_processes.rs",
                "a_stopped_reader_changes_nothing_and_gets_everything_later",
            ),
            (
                "transfer/tests/tcp_faults.rs",
                "a_lost_acknowledgement_is_not_a_success",
            ),
        ]),
    ),
    row(
        "FR-02",
        "a notification before its data",
        Cover::Tests(&[
            (
                "transfer/tests/contract/moves.rs",
                "the_sink_sees_the_bytes_before_the_gate_opens",
            ),
            (
                "transfer/tests/sim_faults.rs",
                "no_byte_is_wrong_and_no_page_is_lost_under_every_fault",
            ),
        ]),
    ),
    row(
        "FR-03",
        "a notification is dropped when its operation is asynchronous",
        Cover::Tests(&[
            (
                "transfer/src/engine/seam_tests.rs",
                "an_end_that_overtakes_the_post_is_not_lost",
            ),
            (
                "transfer/tests/contract/moves.rs",
                "sixty_four_flights_at_once",
            ),
        ]),
    ),
    row(
        "FR-04",
        "a notification inside the post is missed",
        Cover::Tests(&[(
            "loom-tests/tests/completion.rs",
            "an_end_races_with_the_return_of_the_post",
        )]),
    ),
    row(
        "FR-05",
        "a receiver waits for ever for a message that was lost",
        Cover::Tests(&[
            (
                "kvcache/tests/handoff_machines.rs",
                "a_lost_done_is_said_again_to_whoever_asks",
            ),
            (
                "kvcache/tests/handoff_machines.rs",
                "an_expired_wait_aborts_with_its_cause_and_frees_nothing",
            ),
        ]),
    ),
    row(
        "FR-06",
        "an operation to a stopped peer is polled for ever",
        Cover::Tests(&[
            (
                "transfer/tests/two_processes.rs",
                "a_stopped_reader_changes_nothing_and_gets_everything_later",
            ),
            (
                "transfer/tests/tcp_faults.rs",
                "a_stopped_connection_ends_nothing_and_goes_on_where_it_was",
            ),
            (
                "transfer/tests/stalls.rs",
                "a_stall_is_said_with_its_cause_and_changes_nothing",
            ),
        ]),
    ),
    row(
        "FR-07",
        "bytes land behind the release of their memory",
        Cover::Tests(&[
            (
                "transfer/tests/contract/ends.rs",
                "a_closed_region_refuses_and_is_quiet",
            ),
            (
                "transfer/tests/tcp_faults.rs",
                "memory_behind_a_stopped_connection_is_kept_until_it_ends",
            ),
        ]),
    ),
    row(
        "FR-08",
        "the next request is overwritten after an abort",
        Cover::Tests(&[
            (
                "loom-tests/tests/cancel_reuse.rs",
                "a_late_write_never_hits_the_next_owner",
            ),
            (
                "kvcache/tests/flight_local.rs",
                "an_aborted_flight_keeps_its_slots_until_the_writer_answers",
            ),
        ]),
    ),
    row(
        "FR-09",
        "a leak per transfer",
        Cover::Tests(&[(
            "transfer/tests/steady.rs",
            "four_thousand_transfers_leave_nothing_behind",
        )]),
    ),
    row(
        "FR-10",
        "several threads use one agent and it crashes",
        Cover::Tests(&[
            (
                "transfer/tests/contract/moves.rs",
                "one_sender_and_three_receivers",
            ),
            (
                "transfer/tests/contract/moves.rs",
                "three_senders_and_one_receiver",
            ),
        ]),
    ),
    row(
        "FR-11",
        "a race on the map of the peers",
        Cover::Tests(&[(
            "loom-tests/tests/late_arrival.rs",
            "a_connection_that_comes_at_the_end_is_closed",
        )]),
    ),
    row(
        "FR-12",
        "two threads add the same peer again",
        Cover::Tests(&[(
            "transfer/tests/meetings.rs",
            "several_threads_connect_to_one_peer_again",
        )]),
    ),
    row(
        "FR-13",
        "removing and adding a peer resets its connection",
        Cover::Tests(&[(
            "transfer/tests/descriptor_leak.rs",
            "two_hundred_connections_of_each_kind_leave_nothing_behind",
        )]),
    ),
    row(
        "FR-14",
        "one connect error loses a peer for ever",
        Cover::Tests(&[
            (
                "transfer/src/backend/link_tests/greetings.rs",
                "strangers_are_refused_by_name_and_the_listener_goes_on",
            ),
            (
                "transfer/src/backend/link_tests/greetings.rs",
                "an_address_in_use_and_one_without_a_listener_are_named",
            ),
        ]),
    ),
    row(
        "FR-15",
        "a post races with the disconnect",
        Cover::Tests(&[
            (
                "loom-tests/tests/completion.rs",
                "an_end_races_with_the_death_of_the_peer",
            ),
            (
                "transfer/tests/two_processes.rs",
                "a_killed_reader_ends_the_operations",
            ),
        ]),
    ),
    row(
        "FR-16",
        "two agents that start together hang",
        Cover::Tests(&[(
            "transfer/tests/meetings.rs",
            "two_agents_that_start_together_meet_in_both_directions",
        )]),
    ),
    row(
        "FR-17",
        "a descriptor costs a kilobyte on the wire",
        Cover::Tests(&[
            (
                "transfer/src/agent/wire_tests.rs",
                "a_run_of_slots_costs_sixteen_bytes",
            ),
            (
                "transfer/src/agent/wire_tests.rs",
                "ten_thousand_regions_fit",
            ),
        ]),
    ),
    row(
        "FR-18",
        "a post blocks its caller",
        Cover::Tests(&[(
            "transfer/tests/tcp_faults.rs",
            "posts_return_while_nothing_can_be_sent",
        )]),
    ),
    row(
        "FR-19",
        "the first transfer to a peer takes seconds",
        Cover::Tests(&[(
            "transfer/tests/directions.rs",
            "a_first_transfer_costs_what_a_later_one_costs",
        )]),
    ),
    row(
        "FR-20",
        "small pages of many layers become as many descriptors",
        Cover::Tests(&[
            ("transfer/src/desc.rs", "groups_of_one_shape_stay_groups"),
            (
                "transfer/src/backend/rma/requests.rs",
                "neighbours_without_gaps_are_one_request",
            ),
        ]),
    ),
    row(
        "FR-21",
        "a stale reference returns the bytes of another prompt",
        Cover::Tests(&[
            (
                "transfer/tests/contract/ends.rs",
                "a_restarted_peer_is_another_one",
            ),
            (
                "kvcache/src/page/slot.rs",
                "other_generations_have_no_effect",
            ),
        ]),
    ),
    row(
        "FR-22",
        "a transfer that failed counts as complete",
        Cover::Tests(&[
            (
                "transfer/tests/tcp_faults.rs",
                "a_connection_that_is_cut_or_half_closed_under_a_write_fails_both_sides",
            ),
            (
                "transfer/src/barrier/tests.rs",
                "a_failure_is_for_good_and_landing_goes_on_being_counted",
            ),
            (
                "transfer/tests/contract/ends.rs",
                "what_has_landed_is_known_slot_by_slot",
            ),
        ]),
    ),
    row(
        "FR-23",
        "state is used after the first of its components",
        Cover::Tests(&[
            (
                "transfer/src/barrier/tests.rs",
                "a_stage_opens_with_its_last_chunk_and_only_that_stage",
            ),
            ("loom-tests/tests/gate.rs", "reader_sees_every_component"),
        ]),
    ),
    row(
        "FR-24",
        "readers of index_k do not wait for their layer",
        Cover::Tests(&[
            ("loom-tests/tests/gate.rs", "a_ready_gate_orders_the_reader"),
            (
                "examples/tests/faults.rs",
                "every_corrupting_kind_is_found_by_the_bits_alone",
            ),
        ]),
    ),
    row(
        "FR-25",
        "the index pool lies outside of what is restored",
        Cover::Tests(&[(
            "kvcache/tests/plan_cover.rs",
            "every_length_every_writer_count_every_segment_size",
        )]),
    ),
    row(
        "FR-26",
        "pages are restored without those of their index",
        Cover::Tests(&[
            (
                "kvcache/tests/leases.rs",
                "a_reservation_takes_everything_or_nothing",
            ),
            (
                "kvcache/tests/prefix.rs",
                "a_pending_prefix_is_found_but_read_only_through_its_gate",
            ),
        ]),
    ),
    row(
        "FR-27",
        "slots are freed while a copy is under way",
        Cover::Tests(&[
            (
                "loom-tests/tests/drain.rs",
                "the_proof_comes_after_every_operation",
            ),
            (
                "kvcache/tests/leases.rs",
                "slots_stay_while_a_posted_operation_reads_them",
            ),
        ]),
    ),
    row(
        "FR-28",
        "the first token of another request",
        Cover::Tests(&[
            (
                "kvcache/tests/two_writers.rs",
                "each_layer_opens_with_its_own_writer_and_the_whole_equals_one_computation",
            ),
            (
                "transfer/tests/contract/moves.rs",
                "stale_duplicate_and_unknown_arrivals_are_counted_and_open_nothing",
            ),
        ]),
    ),
    row(
        "FR-29",
        "a component that nobody sends is waited for",
        Cover::Tests(&[
            (
                "kvcache/tests/plan_cover.rs",
                "every_length_every_writer_count_every_segment_size",
            ),
            (
                "kvcache/tests/handoff_greeting.rs",
                "writers_deliver_each_layer_once",
            ),
        ]),
    ),
    row(
        "FR-30",
        "only the sender knows of a failure",
        Cover::Tests(&[
            (
                "transfer/tests/contract/ends.rs",
                "a_lost_writer_fails_the_flight_at_once",
            ),
            (
                "kvcache/tests/handoff_machines.rs",
                "a_post_against_the_table_is_an_error_and_is_still_waited_for",
            ),
        ]),
    ),
    row(
        "FR-31",
        "a block is freed before its send has ended",
        Cover::Tests(&[
            (
                "kvcache/tests/leases.rs",
                "slots_stay_while_a_posted_operation_reads_them",
            ),
            (
                "transfer/src/engine/seam_tests.rs",
                "the_source_is_kept_until_the_link_tells_the_end",
            ),
        ]),
    ),
    row(
        "FR-32",
        "a buffer is gone while a write is running",
        Cover::Tests(&[
            (
                "loom-tests/tests/registration.rs",
                "closing_waits_for_the_operation",
            ),
            (
                "transfer/tests/contract/ends.rs",
                "a_closed_region_refuses_and_is_quiet",
            ),
        ]),
    ),
    row(
        "FR-33",
        "a socket per transfer",
        Cover::Tests(&[
            (
                "transfer/tests/steady.rs",
                "four_thousand_transfers_leave_nothing_behind",
            ),
            (
                "transfer/tests/descriptor_leak.rs",
                "two_hundred_connections_of_each_kind_leave_nothing_behind",
            ),
        ]),
    ),
    row(
        "FR-34",
        "writes go on into memory that was unregistered",
        Cover::Tests(&[
            (
                "transfer/src/engine/seam_tests.rs",
                "a_write_of_the_peer_keeps_the_region_and_another_registration_is_refused",
            ),
            (
                "transfer/src/backend/link_tests/frames.rs",
                "memory_of_another_registration_is_refused",
            ),
        ]),
    ),
    row(
        "FR-35",
        "registering the same memory again is refused",
        Cover::Tests(&[(
            "transfer/tests/meetings.rs",
            "memory_may_be_registered_twice_and_closed_once",
        )]),
    ),
    row(
        "FR-36",
        "a peer that restarts is written to under its old name",
        Cover::Tests(&[
            (
                "transfer/tests/contract/ends.rs",
                "a_restarted_peer_is_another_one",
            ),
            (
                "loom-tests/tests/peer_restart.rs",
                "a_former_life_completes_nothing",
            ),
        ]),
    ),
    row(
        "FR-37",
        "nobody can say whether a buffer is free after a timeout",
        Cover::Tests(&[
            (
                "transfer/tests/waits.rs",
                "a_wait_that_runs_out_does_not_end_the_operation",
            ),
            (
                "transfer/tests/tcp_faults.rs",
                "memory_behind_a_stopped_connection_is_kept_until_it_ends",
            ),
        ]),
    ),
    row(
        "FR-38",
        "reads are a hundred times slower than writes",
        Cover::Tests(&[(
            "transfer/tests/directions.rs",
            "a_read_is_as_fast_as_a_write",
        )]),
    ),
    row(
        "FR-39",
        "the destination differs from the source, cause unknown",
        Cover::Tests(&[
            ("kvcache/tests/faults.rs", "what_is_broken_is_named"),
            (
                "transfer/tests/two_processes.rs",
                "a_stopped_writer_is_not_dead_and_goes_on",
            ),
        ]),
    ),
    row(
        "FR-40",
        "shared memory hangs when an end closes under traffic",
        Cover::Tests(&[
            (
                "transfer/tests/two_processes.rs",
                "a_killed_writer_is_proven_dead_and_its_slots_are_free",
            ),
            (
                "transfer/src/backend/link_tests/moves.rs",
                "a_closed_link_is_down_and_quiet_on_both_sides",
            ),
        ]),
    ),
    row(
        "FR-41",
        "a completion of the device before its data",
        Cover::NotYet("needs hardware"),
    ),
    row(
        "FR-42",
        "metadata of another agent is accepted",
        Cover::Tests(&[(
            "transfer/tests/guards.rs",
            "what_another_agent_has_told_is_refused",
        )]),
    ),
    row(
        "FR-43",
        "a write to a stopped receiver completes",
        Cover::Tests(&[(
            "transfer/tests/two_processes.rs",
            "a_stopped_reader_changes_nothing_and_gets_everything_later",
        )]),
    ),
];
