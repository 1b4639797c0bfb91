//! Functions that the sources export, compared by name with the header and with the tests of arguments.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

fn sources(folder: &Path, into: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, into);
        } else {
            into.push(fs::read_to_string(&path).unwrap());
        }
    }
}

/// The words behind `before`, up to what no name holds.
fn names<'a>(text: &'a str, before: &str) -> Vec<&'a str> {
    let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
    let pieces = text.split(before).skip(1);
    pieces
        .map(|rest| &rest[..rest.find(|letter| !is_part(letter)).unwrap_or(rest.len())])
        .collect()
}

#[test]
fn the_header_declares_every_function_and_no_other() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut texts = Vec::new();
    sources(&root.join("src"), &mut texts);
    let exported: BTreeSet<&str> = texts
        .iter()
        .flat_map(|text| names(text, "extern \"C\" fn "))
        .collect();
    let header = fs::read_to_string(root.join("include/kvgate.h")).unwrap();
    let code: String = header
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .flat_map(|line| [line, "\n"])
        .collect();
    let start = code
        .find("extern \"C\" {")
        .expect("functions stand behind the types");
    let declared: BTreeSet<&str> = code[start..]
        .split(';')
        .filter_map(|declaration| declaration.split('(').next())
        .filter_map(|head| head.rsplit(|letter: char| " *\n".contains(letter)).next())
        .filter(|name| name.starts_with("kv_"))
        .collect();
    assert!(exported.len() > 40, "{exported:?}");
    assert_eq!(exported, declared, "cargo xtask header");
}

#[test]
fn every_function_catches_its_panics() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut texts = Vec::new();
    sources(&root.join("src"), &mut texts);
    // These read one value each and have nothing to catch.
    let plain = ["kv_abi_version", "kv_last_error_message", "kv_status_name"];
    for text in &texts {
        for function in text.split("extern \"C\" fn ").skip(1) {
            let name = &function[..function.find('(').unwrap()];
            let body = &function[function.find('{').unwrap()..];
            let first = body[1..].trim_start();
            assert!(
                first.starts_with("guard(||") || plain.contains(&name),
                "{name} does not begin with the guard"
            );
        }
    }
}

#[test]
fn every_function_is_named_in_the_tests_of_arguments() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut texts = Vec::new();
    sources(&root.join("src"), &mut texts);
    let tests: String = ["arguments", "cache_arguments"]
        .iter()
        .map(|name| fs::read_to_string(root.join(format!("tests/{name}.rs"))).unwrap())
        .collect();
    // These take no argument that could be wrong.
    let plain = ["kv_abi_version", "kv_last_error_message", "kv_status_name"];
    for name in texts
        .iter()
        .flat_map(|text| names(text, "extern \"C\" fn "))
    {
        let is_called = tests.contains(&format!("{name}("));
        assert!(
            is_called || plain.contains(&name),
            "{name} is in neither arguments.rs nor cache_arguments.rs"
        );
    }
}

#[test]
fn the_library_is_named_after_its_interface() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let script = fs::read_to_string(root.join("build.rs")).unwrap();
    let version = kvgate::KV_ABI_VERSION;
    assert!(script.contains(&format!("ABI_VERSION: u32 = {version};")));
    assert_eq!(kvgate::kv_abi_version(), version);
}
