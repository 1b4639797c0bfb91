//! Inside a library the top-level modules form no circle.

use std::collections::{BTreeMap, BTreeSet};

use crate::lexer::{Token, tokens, without_tests};

use super::sources::Source;

const CRATES: [&str; 5] = ["transfer", "kvcache", "hicache", "kernels", "model"];

/// An error names the types that it reports: what it imports does not count.
const REPORTER: &str = "error";

/// Modules that are one machine in several files: the agent is the engine's face, links report to
/// the engine that drives them, and the fault hooks reach into what they break. A circle that
/// touches any other module is a complaint.
const KNOTS: [(&str, &[&str]); 3] = [
    (
        "transfer",
        &["agent", "backend", "engine", "mem", "obs", "stream"],
    ),
    ("transfer", &["barrier", "fault"]),
    // A pool hands out leases, a lease gives back to its pool, and a plan is compiled between two. A
    // request goes on behind a prefix of the tree, which it keeps until it is quiet itself.
    ("kvcache", &["canary", "lease", "plan", "pool", "prefix"]),
];

/// For each top-level module, the top-level modules of the same crate that it names.
type Graph = BTreeMap<String, BTreeSet<String>>;

/// One complaint for each pair of modules that reach each other.
pub(super) fn circles(sources: &[Source]) -> Vec<String> {
    CRATES
        .iter()
        .flat_map(|folder| circles_of(folder, sources))
        .collect()
}

fn circles_of(folder: &str, sources: &[Source]) -> Vec<String> {
    let graph = graph_of(folder, sources);
    let reach: BTreeMap<_, _> = graph.keys().map(|m| (m, reachable(&graph, m))).collect();
    let mut complaints = Vec::new();
    for (module, reached) in &reach {
        for other in reached.iter().filter(|other| other > module) {
            let back = reach
                .get(other)
                .is_some_and(|back| back.contains(module.as_str()));
            if back && !is_knot(folder, module, other) {
                complaints.push(format!(
                    "{folder}: modules {module} and {other} form a circle"
                ));
            }
        }
    }
    complaints
}

fn is_knot(folder: &str, one: &str, other: &str) -> bool {
    KNOTS.iter().any(|(crate_folder, modules)| {
        *crate_folder == folder && modules.contains(&one) && modules.contains(&other)
    })
}

fn graph_of(folder: &str, sources: &[Source]) -> Graph {
    let mut graph = Graph::new();
    let inside: Vec<_> = sources
        .iter()
        .filter_map(|source| Some((module_of(folder, &source.path)?, source)))
        .collect();
    for (module, _) in &inside {
        graph.entry(module.clone()).or_default();
    }
    for (module, source) in inside
        .into_iter()
        .filter(|(module, _)| module.as_str() != REPORTER)
    {
        let all = tokens(&source.text);
        for named in named_modules(without_tests(&all)) {
            if named != module && graph.contains_key(named) {
                graph
                    .entry(module.clone())
                    .or_default()
                    .insert(named.to_owned());
            }
        }
    }
    graph
}

/// The top-level module that a file belongs to; the crate root and binaries belong to none.
fn module_of(folder: &str, path: &str) -> Option<String> {
    let below = path.strip_prefix(folder)?.strip_prefix("/src/")?;
    let first = below.split('/').next()?;
    let module = first.strip_suffix(".rs").unwrap_or(first);
    (!matches!(module, "lib" | "main" | "bin")).then(|| module.to_owned())
}

/// Each word that follows `crate ::`, groups included.
fn named_modules<'a>(code: Vec<Token<'a>>) -> BTreeSet<&'a str> {
    let mut named = BTreeSet::new();
    for (at, token) in code.iter().enumerate() {
        if !token.is("crate") || !code.get(at + 1).is_some_and(|t| t.is("::")) {
            continue;
        }
        match code.get(at + 2) {
            Some(open) if open.is("{") => named.extend(first_words_of_group(&code[at + 3..])),
            Some(word) => {
                named.insert(word.text);
            }
            None => {}
        }
    }
    named
}

fn first_words_of_group<'a>(after_brace: &[Token<'a>]) -> Vec<&'a str> {
    let mut depth = 1_usize;
    let mut at_start = true;
    let mut found = Vec::new();
    for token in after_brace {
        match token.text {
            "{" => depth += 1,
            "}" if depth == 1 => break,
            "}" => depth -= 1,
            word if depth == 1 && at_start => found.push(word),
            _ => {}
        }
        at_start = depth == 1 && token.is(",");
    }
    found
}

fn reachable(graph: &Graph, from: &str) -> BTreeSet<String> {
    let mut reached = BTreeSet::new();
    let mut todo = vec![from.to_owned()];
    while let Some(module) = todo.pop() {
        for next in graph.get(&module).into_iter().flatten() {
            if reached.insert(next.clone()) {
                todo.push(next.clone());
            }
        }
    }
    reached
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_circle_over_three_modules_is_found() {
        let sources = [
            Source::sample("kvcache/src/a.rs", "use crate::b::X;"),
            Source::sample("kvcache/src/b/mod.rs", "use crate::{c::Y, error::Error};"),
            Source::sample("kvcache/src/c.rs", "fn f() { crate::a::g() }"),
            Source::sample("kvcache/src/error.rs", ""),
        ];
        let found = circles(&sources);
        assert_eq!(found.len(), 3, "{found:?}");
        assert_eq!(found[0], "kvcache: modules a and b form a circle");
    }

    #[test]
    fn a_knot_may_turn_on_itself_but_draws_in_nobody() {
        let engine = Source::sample("transfer/src/engine.rs", "use crate::{agent::A, desc::D};");
        let agent = Source::sample("transfer/src/agent.rs", "use crate::engine::E;");
        let low = Source::sample("transfer/src/desc.rs", "");
        assert!(circles(&[engine, agent, low]).is_empty());
        let engine = Source::sample("transfer/src/engine.rs", "use crate::desc::D;");
        let desc = Source::sample("transfer/src/desc.rs", "use crate::engine::E;");
        assert_eq!(circles(&[engine, desc]).len(), 1);
    }

    #[test]
    fn tests_and_the_crate_root_do_not_count() {
        let sources = [
            Source::sample("kvcache/src/a.rs", "use crate::b::X;"),
            Source::sample(
                "kvcache/src/b.rs",
                "fn f() {}\n#[cfg(test)]\nmod tests { use crate::a::X; fn g() { if x {} } }\nfn h() {}",
            ),
            Source::sample("kvcache/src/lib.rs", "mod a; mod b; pub use crate::a::X;"),
        ];
        assert!(circles(&sources).is_empty());
    }
}
