//! Rules over the text of one source: which words may stand where.

use crate::lexer::{Kind, Token, tokens, without_tests, words_of};

use super::sources::Source;

/// Longest file, in lines.
const MAX_LINES: usize = 600;

/// Files, or folders when they end in `/`, in which `unsafe` may stand.
const UNSAFE_FILES: [&str; 18] = [
    "transfer/src/mem/",
    "transfer/src/backend/shm.rs",
    "transfer/src/backend/cma.rs",
    "transfer/src/backend/ucx.rs",
    "transfer/src/backend/libfabric.rs",
    "transfer/tests/",
    "transfer/ucx-sys/",
    "transfer/libfabric-sys/",
    "kvcache/src/page/raw.rs",
    "kvcache/src/lease/view.rs",
    "kvcache/tests/",
    "kvcache/capi/src/",
    "kvcache/capi/tests/",
    "kernels/src/paged.rs",
    "kernels/src/cpu/simd.rs",
    "kernels/tests/",
    "model/src/bridge.rs",
    "loom-tests/src/",
];

/// The one file that names the real synchronisation primitives.
const SYNC_FACADE: &str = "transfer/src/sync.rs";

/// Identifiers of transfer that hold a forbidden word in another sense.
const OTHER_SENSE: [(&str, &str); 3] = [
    ("auth_token", "the secret of the challenge and response"),
    ("page_size", "the size of a page of the operating system"),
    (
        "host_page_bytes",
        "the size of a page of the operating system",
    ),
];

/// Files that may look at which component a row belongs to.
const COMPONENT_MATCHES: [&str; 2] = ["kvcache/src/schema.rs", "kvcache/src/schema/"];

type Rule = fn(&Source, &[Token<'_>]) -> Vec<String>;

/// Rules for what is compiled into a library; tests inside it are left out.
const LIBRARY_RULES: [Rule; 4] = [foreign_words, sync_facade, component_matches, library_reach];

/// Rules for every line.
const GENERAL_RULES: [Rule; 4] = [unsafe_files, unfinished, ungated_faults, file_length];

/// Runs every rule of this file on one source.
pub(super) fn check(source: &Source) -> Vec<String> {
    let all = tokens(&source.text);
    let mut found: Vec<_> = GENERAL_RULES
        .iter()
        .flat_map(|rule| rule(source, &all))
        .collect();
    if !source.holds_tests_only() {
        let code = without_tests(&all);
        found.extend(LIBRARY_RULES.iter().flat_map(|rule| rule(source, &code)));
    }
    found
}

fn complaint(source: &Source, line: usize, text: impl std::fmt::Display) -> String {
    format!("{}:{line}: {text}", source.path)
}

/// The transfer engine has stages and chunks: no identifier of it may say page, layer or token.
/// In the same way the kernels do not say lease, and the cache does not say HTTP.
fn foreign_words(source: &Source, all: &[Token<'_>]) -> Vec<String> {
    let forbidden: &[&str] = if source.is_in_src_of(&["transfer"]) {
        &["page", "pages", "layer", "layers", "token", "tokens"]
    } else if source.is_in_src_of(&["kernels"]) {
        &["lease", "leases", "flight", "flights"]
    } else if source.is_in_src_of(&["kvcache"]) {
        &["http", "url"]
    } else {
        return Vec::new();
    };
    let other_sense = |text: &str| OTHER_SENSE.iter().any(|(name, _)| text.contains(name));
    all.iter()
        .filter(|token| token.kind == Kind::Word && !other_sense(token.text))
        .filter_map(|token| {
            let word = words_of(token.text)
                .into_iter()
                .find(|w| forbidden.contains(&w.as_str()))?;
            let text = format!("`{}` says {word:?}, a word of another crate", token.text);
            Some(complaint(source, token.line, text))
        })
        .collect()
}

/// Locks, atomics and `Arc` come from the facade, so that the model checker sees them all.
fn sync_facade(source: &Source, all: &[Token<'_>]) -> Vec<String> {
    if !source.is_in_src_of(&["transfer", "kvcache", "hicache"]) || source.path == SYNC_FACADE {
        return Vec::new();
    }
    let mut found = Vec::new();
    for (at, token) in all.iter().enumerate() {
        let path = |offset: usize, text: &str| all.get(at + offset).is_some_and(|t| t.is(text));
        let in_std = (token.is("std") || token.is("core"))
            && path(1, "::")
            && (path(2, "sync") || path(2, "cell") && path(4, "UnsafeCell"));
        let in_group = (token.is("std") || token.is("core"))
            && path(1, "::")
            && path(2, "{")
            && group_names(&all[at + 3..], "sync");
        let other = token.is("parking_lot") || token.is("loom");
        if in_std || in_group || other {
            let text = format!("`{}` belongs into {SYNC_FACADE}", token.text);
            found.push(complaint(source, token.line, text));
        }
    }
    found
}

/// Whether a `{…}` group of a use declaration has a first-level entry that starts with `name`.
fn group_names(after_brace: &[Token<'_>], name: &str) -> bool {
    let mut depth = 1_usize;
    let mut at_start = true;
    for token in after_brace {
        match token.text {
            "{" => depth += 1,
            "}" if depth == 1 => return false,
            "}" => depth -= 1,
            _ if depth == 1 && at_start && token.is(name) => return true,
            _ => {}
        }
        at_start = depth == 1 && token.is(",");
    }
    false
}

/// Unsafe code stands in named files only.
fn unsafe_files(source: &Source, all: &[Token<'_>]) -> Vec<String> {
    let allowed = UNSAFE_FILES.iter().any(|place| {
        source.path == *place || place.ends_with('/') && source.path.starts_with(place)
    });
    if allowed {
        return Vec::new();
    }
    all.iter()
        .filter(|token| token.is("unsafe"))
        .map(|token| {
            complaint(
                source,
                token.line,
                "`unsafe` in a file that may not have any",
            )
        })
        .collect()
}

/// A `match` on `Component` outside the schema is a place that a new component can be forgotten.
fn component_matches(source: &Source, all: &[Token<'_>]) -> Vec<String> {
    let exempt = COMPONENT_MATCHES.iter().any(|place| {
        source.path == *place || place.ends_with('/') && source.path.starts_with(place)
    });
    if exempt || !source.is_in_src_of(&["kvcache"]) {
        return Vec::new();
    }
    let mut found = Vec::new();
    for (at, token) in all.iter().enumerate() {
        let next = |offset: usize| all.get(at + offset).map_or("", |t| t.text);
        if !token.is("Component") || next(1) != "::" {
            continue;
        }
        // `x == Component::A => …` is a guard over a value, not a pattern.
        let is_compared = at >= 1 && all[at - 1].is("=");
        let is_arm = !is_compared && matches!(next(3), "=>" | "|" | "if");
        let is_pattern = at >= 1 && (all[at - 1].is("|") || in_matches_macro(&all[..at]));
        if next(2) == "*" || is_arm || is_pattern {
            let text = "a pattern over `Component` outside the schema";
            found.push(complaint(source, token.line, text));
        }
    }
    found
}

/// Whether the tokens end inside the pattern part of a `matches!(value, …`.
fn in_matches_macro(before: &[Token<'_>]) -> bool {
    let mut depth = 0_isize;
    for (at, token) in before.iter().enumerate().rev() {
        match token.text {
            ")" | "]" | "}" if token.kind == Kind::Mark => depth += 1,
            ";" if token.kind == Kind::Mark => return false,
            "(" | "[" | "{" if token.kind == Kind::Mark => {
                depth -= 1;
                if depth < 0 {
                    let named = at >= 2 && before[at - 1].is("!") && before[at - 2].is("matches");
                    return named && before[at..].iter().any(|t| t.is(","));
                }
            }
            _ => {}
        }
    }
    false
}

/// The one place with a runtime, behind a feature.
const RUNTIME: &str = "hicache/src/tier/object/";

/// The libraries read no environment and bring no runtime.
fn library_reach(source: &Source, all: &[Token<'_>]) -> Vec<String> {
    if !source.is_in_src_of(&["transfer", "kvcache", "hicache", "kernels"]) {
        return Vec::new();
    }
    let mut found = Vec::new();
    for window in all.windows(3) {
        let [a, b, c] = window else { continue };
        if a.is("std") && b.is("::") && c.is("env") {
            found.push(complaint(source, a.line, "a library reads no environment"));
        }
        let is_client = a.is("tokio") && source.path.starts_with(RUNTIME);
        if (a.is("tokio") || a.is("anyhow")) && b.is("::") && !is_client {
            let text = format!("`{}` has no place in a library", a.text);
            found.push(complaint(source, a.line, text));
        }
    }
    found
}

/// No placeholders and no tests that are switched off.
fn unfinished(source: &Source, all: &[Token<'_>]) -> Vec<String> {
    let mut found = Vec::new();
    for window in all.windows(3) {
        let [a, b, c] = window else { continue };
        if (a.is("todo") || a.is("unimplemented")) && b.is("!") {
            found.push(complaint(
                source,
                a.line,
                format!("`{}!`: finish it or delete it", a.text),
            ));
        }
        if a.is("#") && b.is("[") && c.is("ignore") {
            found.push(complaint(source, a.line, "a test that is switched off"));
        }
    }
    found
}

/// A module of fault hooks must not exist without its feature.
fn ungated_faults(source: &Source, all: &[Token<'_>]) -> Vec<String> {
    if !source.is_in_src_of(&["transfer", "kvcache"]) {
        return Vec::new();
    }
    let mut found = Vec::new();
    for (at, window) in all.windows(3).enumerate() {
        let [a, b, c] = window else { continue };
        let declares = a.is("mod") && (b.is("fault") || b.is("faults")) && (c.is(";") || c.is("{"));
        if declares && !has_feature_gate(&all[..at]) {
            let text = "the fault module is not behind the feature `fault-injection`";
            found.push(complaint(source, a.line, text));
        }
    }
    found
}

/// Whether the attributes right before an item hold `cfg(… feature = "fault-injection" …)`.
fn has_feature_gate(before: &[Token<'_>]) -> bool {
    let item_start = before
        .iter()
        .rposition(|t| t.kind == Kind::Mark && matches!(t.text, ";" | "}" | "{"))
        .map_or(0, |at| at + 1);
    let attributes = &before[item_start..];
    attributes.iter().any(|t| t.is("cfg"))
        && attributes
            .iter()
            .any(|t| t.kind == Kind::Text && t.text == "fault-injection")
}

fn file_length(source: &Source, _: &[Token<'_>]) -> Vec<String> {
    let lines = source.text.lines().count();
    if lines <= MAX_LINES {
        return Vec::new();
    }
    vec![complaint(
        source,
        lines,
        format!("{lines} lines, at most {MAX_LINES}"),
    )]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The complaints about a sample.
    fn of(path: &str, text: &str) -> Vec<String> {
        check(&Source::sample(path, text))
    }

    #[test]
    fn transfer_says_neither_page_nor_layer_nor_token() {
        for name in ["page_bytes", "LayerId", "tokens", "nextPage"] {
            let text = format!("fn f({name}: u32) {{}}");
            assert_eq!(of("transfer/src/desc.rs", &text).len(), 1, "{name}");
            assert!(of("kvcache/src/plan.rs", &text).is_empty(), "{name}");
        }
        let fine = "// a page\nfn f(percentage: u32, auth_token: &str) { g(\"layer\"); }";
        assert!(of("transfer/src/desc.rs", fine).is_empty());
    }

    #[test]
    fn kernels_know_no_lease() {
        assert_eq!(of("kernels/src/lib.rs", "struct PageLease;").len(), 1);
    }

    #[test]
    fn primitives_come_from_the_facade() {
        for text in [
            "use std::sync::Arc;",
            "use core::sync::atomic::AtomicU64;",
            "use parking_lot::Mutex;",
            "use std::{fmt, sync::Arc};",
            "fn f() { loom::thread::yield_now() }",
        ] {
            assert_eq!(of("kvcache/src/lib.rs", text).len(), 1, "{text}");
            assert!(of(SYNC_FACADE, text).is_empty(), "{text}");
            assert!(of("examples/src/lib.rs", text).is_empty(), "{text}");
        }
        let fine = "use crate::sync::Arc; use std::{fmt, io::{sync, self}};";
        assert!(of("kvcache/src/lib.rs", fine).is_empty());
    }

    #[test]
    fn tests_inside_a_library_may_say_anything_but_their_neighbours_may_not() {
        let text = "#[cfg(test)]\nmod tests { use std::sync::Arc; fn page() {} }\nfn token() {}";
        assert_eq!(of("transfer/src/desc.rs", text).len(), 1);
        assert!(of("transfer/src/desc_tests.rs", text).is_empty());
    }

    #[test]
    fn unsafe_stands_in_named_files_only() {
        let text = "fn f() { unsafe { g() } }";
        assert_eq!(of("kvcache/src/plan.rs", text).len(), 1);
        assert_eq!(of("xtask/src/main.rs", text).len(), 1);
        assert!(of("kvcache/src/page/raw.rs", text).is_empty());
        assert!(of("transfer/src/mem/shm.rs", text).is_empty());
        assert!(of("kvcache/src/lib.rs", "#![deny(unsafe_code)] // unsafe").is_empty());
    }

    #[test]
    fn components_are_told_apart_in_the_schema_only() {
        for text in [
            "match c { Component::IndexK => 1, _ => 2 }",
            "match c { Component::IndexK | Component::C4Latent => 1, _ => 2 }",
            "fn f(c: Component) -> bool { matches!(c, Component::IndexK) }",
            "use crate::schema::Component::*;",
        ] {
            assert!(!of("kvcache/src/plan.rs", text).is_empty(), "{text}");
            assert!(of("kvcache/src/schema.rs", text).is_empty(), "{text}");
        }
        let fine =
            "fn f() { g(Component::IndexK); let a = [Component::C4Latent, Component::IndexK]; }";
        assert!(of("kvcache/src/plan.rs", fine).is_empty());
    }

    #[test]
    fn libraries_read_no_environment() {
        assert_eq!(
            of("transfer/src/agent/mod.rs", "let a = std::env::var(\"X\");").len(),
            1
        );
        assert_eq!(
            of(
                "hicache/src/tier/object/worker.rs",
                "use tokio::sync::mpsc;"
            )
            .len(),
            0
        );
        assert_eq!(
            of("kvcache/src/lib.rs", "use tokio::net::TcpStream;").len(),
            1
        );
        assert!(of("examples/src/lib.rs", "let a = std::env::var(\"X\");").is_empty());
    }

    #[test]
    fn placeholders_and_sleeping_tests_are_complaints() {
        for (word, what) in [("todo", ""), ("unimplemented", "\"x\"")] {
            let text = format!("fn f() {{ {word}!({what}) }}");
            assert_eq!(of("model/src/lib.rs", &text).len(), 1, "{text}");
        }
        let (word, why) = ("ignore", "slow");
        let text = format!("#[test]\n#[{word} = \"{why}\"]\nfn f() {{}}");
        assert_eq!(of("model/tests/a.rs", &text).len(), 1, "{text}");
    }

    #[test]
    fn fault_hooks_stand_behind_their_feature() {
        assert_eq!(
            of(
                "kvcache/src/lib.rs",
                "mod a;\n#[doc(hidden)]\npub mod fault;"
            )
            .len(),
            1
        );
        let gated = "#[cfg(feature = \"fault-injection\")]\n#[doc(hidden)]\npub mod fault;";
        assert!(of("kvcache/src/lib.rs", gated).is_empty());
        let other = "#[cfg(feature = \"fault-injection\")]\nmod other;\npub mod fault;";
        assert_eq!(of("kvcache/src/lib.rs", other).len(), 1);
    }

    #[test]
    fn long_files_are_complaints() {
        let lines = |n: usize| "\n".repeat(n);
        assert!(of("model/src/lib.rs", &lines(MAX_LINES)).is_empty());
        assert_eq!(of("model/src/lib.rs", &lines(MAX_LINES + 1)).len(), 1);
    }
}
