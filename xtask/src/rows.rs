//! Which test covers which report from the field.

use std::fmt::Write as _;
use std::io::Write as _;

use crate::Outcome;
use crate::exec::{Failure, Workspace};
use crate::invariants::defines;

mod reports;
mod tiers;

/// A failure that was seen in other systems, and what keeps it out of this one.
struct Row {
    id: &'static str,
    subject: &'static str,
    cover: Cover,
}

enum Cover {
    /// File and test function.
    Tests(&'static [(&'static str, &'static str)]),
    /// The code that could fail in this way does not exist yet.
    NotYet(&'static str),
    /// As `NotYet`, with tests of the part of it that does exist.
    Partly(&'static str, &'static [(&'static str, &'static str)]),
    /// Kept out by how things are made, not by a test alone.
    Rule(&'static str, &'static [(&'static str, &'static str)]),
}

const fn row(id: &'static str, subject: &'static str, cover: Cover) -> Row {
    Row { id, subject, cover }
}

/// Every row of every list.
fn all_rows() -> impl Iterator<Item = &'static Row> {
    ROWS.iter().chain(&reports::REPORTS).chain(&tiers::TIERS)
}

impl Cover {
    fn tests(&self) -> &'static [(&'static str, &'static str)] {
        match self {
            Cover::Tests(tests) | Cover::Partly(_, tests) | Cover::Rule(_, tests) => tests,
            Cover::NotYet(_) => &[],
        }
    }
}

static ROWS: [Row; 15] = [
    Row {
        id: "DEV-01",
        subject: "a host tier that does not carry index_k",
        cover: Cover::Tests(&[
            (
                "hicache/tests/scenarios/dev_01.rs",
                "dev_01_every_component_comes_back",
            ),
            (
                "hicache/tests/scenarios/dev_01.rs",
                "dev_01_a_tier_without_a_component_is_refused",
            ),
        ]),
    },
    Row {
        id: "DEV-02",
        subject: "index_k read before its layer has landed",
        cover: Cover::Tests(&[
            (
                "hicache/tests/scenarios/dev_02.rs",
                "dev_02_a_layer_is_read_behind_its_own_fence",
            ),
            (
                "kvcache/tests/flight_local.rs",
                "every_row_arrives_behind_its_gate_and_every_slot_comes_back",
            ),
            (
                "examples/tests/faults.rs",
                "every_corrupting_kind_is_found_by_the_bits_alone",
            ),
            ("loom-tests/tests/gate.rs", "reader_sees_every_component"),
        ]),
    },
    Row {
        id: "DEV-03",
        subject: "an abort gives pages away while a write is running",
        cover: Cover::Tests(&[
            (
                "kvcache/tests/scenarios/dev_03.rs",
                "dev_03_pages_of_an_aborted_request_wait_for_its_write",
            ),
            (
                "kvcache/tests/scenarios/dev_03.rs",
                "dev_03_a_dead_writer_frees_pages_only_with_a_proof",
            ),
            (
                "kvcache/tests/flight_local.rs",
                "an_aborted_flight_keeps_its_slots_until_the_writer_answers",
            ),
            (
                "loom-tests/tests/cancel_reuse.rs",
                "a_late_write_never_hits_the_next_owner",
            ),
            (
                "transfer/tests/sim_faults.rs",
                "no_byte_is_wrong_and_no_page_is_lost_under_every_fault",
            ),
        ]),
    },
    Row {
        id: "DEV-04",
        subject: "done after the first of several components",
        cover: Cover::Tests(&[
            (
                "kvcache/tests/scenarios/dev_04.rs",
                "dev_04_a_room_is_complete_with_its_last_component",
            ),
            (
                "transfer/src/barrier/tests.rs",
                "a_stage_opens_with_its_last_chunk_and_only_that_stage",
            ),
            (
                "kvcache/tests/handoff_machines.rs",
                "no_order_of_events_makes_a_receiver_ready_or_done_too_early",
            ),
            ("loom-tests/tests/gate.rs", "reader_sees_every_component"),
            ("loom-tests/tests/stale.rs", "a_repeat_counts_once"),
        ]),
    },
    Row {
        id: "DEV-05",
        subject: "several writers and the metadata of a request",
        cover: Cover::Tests(&[
            (
                "kvcache/tests/scenarios/dev_05.rs",
                "dev_05_a_request_never_sees_the_first_token_of_another",
            ),
            (
                "kvcache/tests/scenarios/dev_05.rs",
                "dev_05_a_late_row_of_a_former_try_is_refused",
            ),
            (
                "kvcache/tests/two_writers.rs",
                "each_layer_opens_with_its_own_writer_and_the_whole_equals_one_computation",
            ),
            (
                "kvcache/tests/two_writers.rs",
                "after_an_abort_every_writer_that_has_not_delivered_must_be_heard_of",
            ),
        ]),
    },
    Row {
        id: "DEV-06",
        subject: "pages copied before their producer has finished",
        cover: Cover::Tests(&[
            (
                "hicache/tests/scenarios/dev_06.rs",
                "dev_06_nothing_is_backed_up_before_it_is_written",
            ),
            (
                "kvcache/tests/plan_cover.rs",
                "a_witness_that_does_not_fit_is_refused",
            ),
        ]),
    },
    Row {
        id: "DEV-07",
        subject: "a host page evicted while it is loaded",
        cover: Cover::Tests(&[(
            "hicache/tests/scenarios/dev_07.rs",
            "dev_07_a_host_page_stays_until_its_copy_is_complete",
        )]),
    },
    Row {
        id: "DEV-08",
        subject: "a load into pages that an older step still writes",
        cover: Cover::Tests(&[
            (
                "hicache/tests/scenarios/dev_08.rs",
                "dev_08_a_load_waits_for_the_steps_of_the_pages_before",
            ),
            (
                "transfer/src/engine/quiesce.rs",
                "a_reading_step_keeps_memory_until_it_passes",
            ),
            (
                "loom-tests/tests/append.rs",
                "appending_waits_for_the_layer",
            ),
        ]),
    },
    Row {
        id: "DEV-09",
        subject: "a prefix sent before it was written",
        cover: Cover::Tests(&[
            (
                "kvcache/tests/scenarios/dev_09.rs",
                "dev_09_a_finished_suffix_does_not_speak_for_its_prefix",
            ),
            (
                "kvcache/tests/scenarios/dev_09.rs",
                "dev_09_a_finished_prefix_does_not_speak_for_what_follows",
            ),
            (
                "kvcache/tests/scenarios/dev_09.rs",
                "dev_09_a_prefix_under_load_is_not_sent",
            ),
            (
                "kvcache/tests/prefix.rs",
                "a_pending_prefix_is_found_but_read_only_through_its_gate",
            ),
            (
                "loom-tests/tests/prefix_pending.rs",
                "a_pending_hit_waits_for_its_flight",
            ),
        ]),
    },
    Row {
        id: "DEV-10",
        subject: "a peer restarts at the same address",
        cover: Cover::Tests(&[
            (
                "kvcache/tests/scenarios/dev_10.rs",
                "dev_10_descriptors_of_a_former_life_reach_nothing",
            ),
            (
                "kvcache/tests/scenarios/dev_10.rs",
                "dev_10_another_life_does_not_answer_for_the_former_one",
            ),
            (
                "transfer/tests/contract/ends.rs",
                "a_restarted_peer_is_another_one",
            ),
            (
                "loom-tests/tests/peer_restart.rs",
                "a_former_life_completes_nothing",
            ),
        ]),
    },
    Row {
        id: "DEV-11",
        subject: "a prefetch that publishes more than it loaded",
        cover: Cover::Tests(&[
            (
                "hicache/tests/scenarios/dev_11.rs",
                "dev_11_a_hole_at_any_page_ends_the_prefix_before_it",
            ),
            (
                "hicache/tests/scenarios/dev_11.rs",
                "dev_11_a_fetch_that_stops_at_any_page_publishes_what_has_come",
            ),
            (
                "hicache/tests/storage.rs",
                "a_hole_shortens_the_prefix_to_an_end_before_it",
            ),
            (
                "kvcache/tests/prefix.rs",
                "a_hit_is_the_minimum_over_the_components",
            ),
        ]),
    },
    Row {
        id: "DEV-12",
        subject: "a receiver waits for a component that nobody sends",
        cover: Cover::Tests(&[
            (
                "kvcache/tests/scenarios/dev_12.rs",
                "dev_12_every_combination_completes",
            ),
            (
                "kvcache/tests/scenarios/dev_12.rs",
                "dev_12_a_full_prefix_hit_waits_for_nobody",
            ),
            (
                "kvcache/tests/scenarios/dev_12.rs",
                "dev_12_a_component_of_one_side_only_is_refused_by_name",
            ),
            (
                "kvcache/tests/scenarios/dev_12.rs",
                "dev_12_a_writer_that_is_not_there_is_refused_before_anybody_waits",
            ),
            (
                "kvcache/tests/scenarios/dev_12.rs",
                "dev_12_a_writer_that_ends_early_ends_the_waits",
            ),
            (
                "kvcache/tests/plan_cover.rs",
                "every_length_every_writer_count_every_segment_size",
            ),
            (
                "kvcache/tests/fingerprint.rs",
                "every_input_of_the_schema_is_in_it",
            ),
        ]),
    },
    Row {
        id: "DEV-13",
        subject: "a failed load counted as loaded",
        cover: Cover::Tests(&[
            (
                "hicache/tests/scenarios/dev_13.rs",
                "dev_13_a_failed_load_is_a_miss",
            ),
            (
                "kvcache/tests/prefix.rs",
                "a_failed_flight_takes_its_pages_out_of_the_tree",
            ),
            (
                "loom-tests/tests/prefix_pending.rs",
                "a_failed_prefix_disappears",
            ),
        ]),
    },
    Row {
        id: "DEV-14",
        subject: "ranks that disagree about completions",
        cover: Cover::Tests(&[(
            "hicache/tests/scenarios/dev_14.rs",
            "dev_14_ranks_take_part_in_the_same_collectives",
        )]),
    },
    Row {
        id: "DEV-15",
        subject: "pages reused before the running step has passed",
        cover: Cover::Tests(&[
            (
                "kvcache/tests/scenarios/dev_15.rs",
                "dev_15_pages_wait_for_the_newest_step_in_flight",
            ),
            (
                "kvcache/tests/scenarios/dev_15.rs",
                "dev_15_the_end_of_the_older_step_frees_nothing",
            ),
            (
                "kvcache/tests/prefix.rs",
                "a_reading_step_keeps_an_evicted_page",
            ),
            (
                "loom-tests/tests/reader_fence.rs",
                "a_step_keeps_what_it_reads",
            ),
        ]),
    },
];

/// Prints the table; a row that names a test which does not exist is a finding.
pub(crate) fn list(workspace: &Workspace) -> Result<Outcome, Failure> {
    let mut text = String::new();
    let missing = write_rows(workspace, &mut text)
        .map_err(|error| Failure::new(format!("list of rows: {error}")))?;
    // Whoever has seen enough may close the pipe.
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(Failure::new(format!("standard output: {error}")))
        }
        _ => Ok(Outcome::found_if(missing)),
    }
}

/// Answers whether a test that a row names is missing.
fn write_rows(workspace: &Workspace, out: &mut String) -> Result<bool, std::fmt::Error> {
    let mut missing = false;
    for row in all_rows() {
        match &row.cover {
            Cover::NotYet(why) => writeln!(out, "{}  {}: not yet ({why})", row.id, row.subject)?,
            Cover::Tests(_) => writeln!(out, "{}  {}:", row.id, row.subject)?,
            Cover::Partly(why, _) => {
                writeln!(out, "{}  {}: not yet ({why}); of it:", row.id, row.subject)?;
            }
            Cover::Rule(why, _) => writeln!(out, "{}  {} ({why}):", row.id, row.subject)?,
        }
        for (file, function) in row.cover.tests() {
            let exists = exists(workspace, file, function);
            missing |= !exists;
            let mark = if exists { "" } else { "  MISSING" };
            writeln!(out, "        {file}::{function}{mark}")?;
        }
    }
    Ok(missing)
}

fn exists(workspace: &Workspace, file: &str, function: &str) -> bool {
    workspace
        .read(file)
        .is_ok_and(|text| defines(&text, function))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// So that whoever renames a test hears of it with the other tests.
    #[test]
    fn every_test_that_a_row_names_exists() {
        let workspace = Workspace::find().unwrap();
        let named = all_rows().flat_map(|row| row.cover.tests());
        let missing: Vec<_> = named
            .filter(|(file, function)| !exists(&workspace, file, function))
            .collect();
        assert!(missing.is_empty(), "{missing:?}");
        assert!(!exists(&workspace, "xtask/src/rows.rs", "no_such_test"));
    }

    #[test]
    fn ids_are_counted_through() {
        let ids: Vec<_> = all_rows().map(|row| row.id).collect();
        let lists = [("DEV", 15), ("FR", 43), ("TR", 35)];
        let numbered = |(list, count)| (1..=count).map(move |number| format!("{list}-{number:02}"));
        let expected: Vec<_> = lists.into_iter().flat_map(numbered).collect();
        assert_eq!(ids, expected);
    }
}
