//! Cost of a gate: a ready check and the completion of one chunk. `-- --json` prints one object.

fn main() {
    let is_json = std::env::args().any(|argument| argument == "--json");
    match kvgate_transfer::barrier_cost(500) {
        Ok(cost) if is_json => println!(
            "{{\"gate_check_ns_p50\":{:.2},\"chunk_complete_ns_p50\":{:.2}}}",
            cost.gate_check_ns_p50, cost.chunk_complete_ns_p50
        ),
        Ok(cost) => {
            println!(
                "gate check of a ready stage: {:.2} ns (p50)",
                cost.gate_check_ns_p50
            );
            println!(
                "completing one chunk: {:.2} ns (p50)",
                cost.chunk_complete_ns_p50
            );
        }
        Err(error) => {
            eprintln!("barrier bench: {error}");
            std::process::exit(2);
        }
    }
}
