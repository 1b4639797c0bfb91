//! The C examples, compiled by the C compiler of this machine and run.
#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Programs of `examples/c`, by what they print last.
const PROGRAMS: [(&str, &str); 2] = [("slots", "decode: done\n"), ("pd", "decode: done\n")];

/// What a static library of Rust needs on Linux.
const SYSTEM_LIBRARIES: [&str; 6] = ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl"];

const SANITIZERS: &str = "-fsanitize=address,undefined";

enum Link {
    Static,
    Shared,
}

fn manifest() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn source(program: &str) -> PathBuf {
    manifest().join(format!("../../examples/c/{program}.c"))
}

/// Where cargo has put the libraries that it built for this test.
fn libraries() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().unwrap().to_owned()
}

/// A C compiler with the flags that every program of ours must pass.
fn cc() -> Command {
    let mut command = Command::new("cc");
    command
        .args([
            "-std=c11",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wpedantic",
            "-g",
        ])
        .arg("-I")
        .arg(manifest().join("include"));
    command
}

fn succeeded(what: &str, output: &Output) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{what}: {}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
}

fn compile_and_run(program: &str, last_line: &str, link: &Link, flags: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let binary = folder.path().join(program);
    let mut compiler = cc();
    compiler
        .args(flags)
        .arg("-o")
        .arg(&binary)
        .arg(source(program));
    match link {
        Link::Static => {
            let library = libraries().join("libkvgate.a");
            compiler.arg(library).args(SYSTEM_LIBRARIES);
        }
        Link::Shared => {
            let library = libraries().join("libkvgate.so");
            // Programs ask for the name that the library gives itself.
            std::os::unix::fs::symlink(&library, folder.path().join("libkvgate.so.1")).unwrap();
            let rpath = format!("-Wl,-rpath,{}", folder.path().display());
            compiler.arg(&library).arg(rpath);
        }
    }
    succeeded("cc", &compiler.output().unwrap());
    let run = Command::new(&binary).output().unwrap();
    succeeded(program, &run);
    let printed = String::from_utf8(run.stdout).unwrap();
    assert!(printed.ends_with(last_line), "{printed}");
    let complaints = String::from_utf8_lossy(&run.stderr).into_owned();
    assert_eq!(complaints, "", "{program} is quiet on standard error");
}

#[test]
fn programs_run_with_the_static_library() {
    for (program, last_line) in PROGRAMS {
        compile_and_run(program, last_line, &Link::Static, &[]);
    }
}

#[test]
fn programs_run_with_the_shared_library() {
    for (program, last_line) in PROGRAMS {
        compile_and_run(program, last_line, &Link::Shared, &[]);
    }
}

#[test]
fn programs_run_under_the_sanitizers() {
    if let Err(why) = sanitizers() {
        skip("sanitizers", &why);
        return;
    }
    for (program, last_line) in PROGRAMS {
        let flags = [
            SANITIZERS,
            "-fno-sanitize-recover=all",
            "-fno-omit-frame-pointer",
        ];
        compile_and_run(program, last_line, &Link::Static, &flags);
    }
}

/// Says what is not tested here. Past the harness, which shows what a test prints only when it fails.
fn skip(what: &str, why: &str) {
    let line = format!("SKIP {what}: {why}\n");
    std::io::stderr().write_all(line.as_bytes()).unwrap();
}

/// Whether this machine can build and start a program with the sanitizers.
fn sanitizers() -> Result<(), String> {
    let folder = tempfile::tempdir().unwrap();
    let (source, binary) = (folder.path().join("empty.c"), folder.path().join("empty"));
    std::fs::write(&source, "int main(void) { return 0; }\n").unwrap();
    let built = Command::new("cc")
        .arg(SANITIZERS)
        .arg("-o")
        .arg(&binary)
        .arg(&source)
        .output();
    if !built.unwrap().status.success() {
        return Err("the C compiler has no address sanitizer".into());
    }
    match Command::new(&binary).output().unwrap().status.success() {
        true => Ok(()),
        false => Err("programs with the address sanitizer do not start here".into()),
    }
}

#[test]
fn wrong_usage_is_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let binary = folder.path().join("pd");
    let library = libraries().join("libkvgate.a");
    let mut compiler = cc();
    compiler
        .arg("-o")
        .arg(&binary)
        .arg(source("pd"))
        .arg(library)
        .args(SYSTEM_LIBRARIES);
    succeeded("cc", &compiler.output().unwrap());
    let wrong = Command::new(&binary).arg("decode").output().unwrap();
    assert_eq!(wrong.status.code(), Some(2));
    let nobody = Command::new(&binary)
        .args(["prefill", "shm:kvgate-nobody"])
        .output()
        .unwrap();
    assert_eq!(nobody.status.code(), Some(1));
    let complaint = String::from_utf8(nobody.stderr).unwrap();
    assert!(
        complaint.contains("unreachable: cannot reach shm:kvgate-nobody"),
        "{complaint}"
    );
}

#[test]
fn the_header_is_good_for_both_languages() {
    let folder = tempfile::tempdir().unwrap();
    for (name, language, standard) in [("c", "c", "-std=c11"), ("cpp", "c++", "-std=c++17")] {
        let source = folder.path().join(format!("only.{name}"));
        std::fs::write(&source, "#include \"kvgate.h\"\n").unwrap();
        let object = folder.path().join("only.o");
        let built = Command::new("cc")
            .args([
                "-x",
                language,
                standard,
                "-Wall",
                "-Wextra",
                "-Werror",
                "-Wpedantic",
                "-c",
            ])
            .arg("-I")
            .arg(manifest().join("include"))
            .arg(&source)
            .arg("-o")
            .arg(&object)
            .output()
            .unwrap();
        let complaint = String::from_utf8_lossy(&built.stderr).into_owned();
        if language == "c++" && complaint.contains("cc1plus") {
            skip("c++", "the compiler is not installed");
            continue;
        }
        succeeded(language, &built);
    }
}
