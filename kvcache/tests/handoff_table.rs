//! The whole table of states and events of both machines.
//!
//! `KVGATE_BLESS=1` writes `golden/handoff_table.txt` anew; read the difference before you keep it.
#![allow(clippy::unwrap_used, missing_docs)]

mod handoff_parts;

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Instant;

use handoff_parts::*;
use kvgate_kvcache::handoff::*;

fn row(text: &mut String, name: &str, result: &str, state: &str, outputs: &[String]) {
    writeln!(
        text,
        "  {name}: {result} -> {state} [{}]",
        outputs.join(", ")
    )
    .unwrap();
}

fn outcome(result: Result<(), MachineError>) -> String {
    result.map_or_else(|error| error.to_string(), |()| "ok".to_owned())
}

fn table() -> String {
    let now = Instant::now();
    let mut text = String::new();
    for state in DecodeState::ALL {
        writeln!(text, "decode {}", state.name()).unwrap();
        for (name, input) in decode_inputs() {
            let mut machine = decode_machine();
            for step in way_to(state) {
                machine.handle(now, step).unwrap();
            }
            assert_eq!(machine.state(), state);
            decode_outputs(&mut machine);
            let before = machine.counters();
            let result = machine.handle(now, input);
            assert!(
                result.is_ok() || machine.counters() != before,
                "{state:?} {name}: an error is counted"
            );
            let outputs = decode_outputs(&mut machine);
            row(
                &mut text,
                name,
                &outcome(result),
                machine.state().name(),
                &outputs,
            );
        }
    }
    for state in PrefillState::ALL {
        writeln!(text, "prefill {}", state.name()).unwrap();
        for (name, input) in prefill_inputs() {
            let mut machine = prefill_machine(now, 0);
            for step in path_to(state) {
                machine.handle(now, step).unwrap();
            }
            assert_eq!(machine.state(), state);
            prefill_outputs(&mut machine);
            let before = machine.counters();
            let result = machine.handle(now, input);
            assert!(
                result.is_ok() || machine.counters() != before,
                "{state:?} {name}: an error is counted"
            );
            let outputs = prefill_outputs(&mut machine);
            row(
                &mut text,
                name,
                &outcome(result),
                machine.state().name(),
                &outputs,
            );
        }
    }
    text
}

#[test]
fn every_event_in_every_state_does_what_the_table_says() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/handoff_table.txt");
    let table = table();
    if std::env::var_os("KVGATE_BLESS").is_some() {
        std::fs::write(&path, &table).unwrap();
    }
    let agreed = std::fs::read_to_string(&path).unwrap();
    for (found, expected) in table.lines().zip(agreed.lines()) {
        assert_eq!(found, expected);
    }
    assert_eq!(table.lines().count(), agreed.lines().count());
}
