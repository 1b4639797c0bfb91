//! `cargo xtask install`: the C interface where a C compiler finds it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::Outcome;
use crate::exec::{Failure, Workspace};
use crate::header::{CAPI, HEADER};
use crate::metadata::Metadata;

/// The name that programs record: as `build.rs` of the crate sets it.
const SONAME: &str = "libkvgate.so.1";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder that gets include/, lib/ and lib/pkgconfig/.
    #[arg(long, value_name = "DIR")]
    prefix: PathBuf,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<Outcome, Failure> {
    let prefix =
        std::path::absolute(&args.prefix).map_err(|error| Failure::io(&args.prefix, &error))?;
    let built = workspace
        .cargo("install", ["build", "--release", "-p", "kvgate-capi"])
        .run()?;
    if !built.succeeded() {
        built.show_tail(40);
        return Ok(Outcome::Found);
    }
    let (include, lib) = (prefix.join("include"), prefix.join("lib"));
    let release = workspace.target.join("release");
    put(&workspace.root.join(HEADER), &include.join("kvgate.h"))?;
    put(&release.join("libkvgate.a"), &lib.join("libkvgate.a"))?;
    put(&release.join("libkvgate.so"), &lib.join(SONAME))?;
    link(SONAME, &lib.join("libkvgate.so"))?;
    let description = lib.join("pkgconfig/kvgate.pc");
    let text = fill(
        &workspace.read(format!("{CAPI}/kvgate.pc.in"))?,
        &prefix,
        workspace,
    )?;
    make_folder_of(&description)?;
    fs::write(&description, text).map_err(|error| Failure::io(&description, &error))?;
    println!("installed: {}", prefix.display());
    Ok(Outcome::Clean)
}

/// The description for pkg-config with its values.
fn fill(template: &str, prefix: &Path, workspace: &Workspace) -> Result<String, Failure> {
    let metadata = Metadata::load(workspace, false)?;
    let capi = metadata
        .members()
        .find(|package| package.name == "kvgate-capi");
    let capi = capi.ok_or_else(|| Failure::new("the workspace has no kvgate-capi"))?;
    let manifest = workspace.read("Cargo.toml")?;
    let url = manifest
        .lines()
        .find_map(|line| line.strip_prefix("homepage = \""))
        .and_then(|rest| rest.strip_suffix('"'))
        .ok_or_else(|| Failure::new("Cargo.toml names no homepage"))?;
    let text = template
        .replace("@PREFIX@", &prefix.display().to_string())
        .replace("@URL@", url)
        .replace("@VERSION@", &capi.version);
    match text.find('@') {
        None => Ok(text),
        Some(at) => Err(Failure::new(format!(
            "kvgate.pc.in: unknown name at byte {at}"
        ))),
    }
}

fn make_folder_of(file: &Path) -> Result<(), Failure> {
    let folder = file.parent().unwrap_or(file);
    fs::create_dir_all(folder).map_err(|error| Failure::io(folder, &error))
}

/// Copies a file beside its place and moves it there: a program that has the old one open keeps it.
fn put(from: &Path, to: &Path) -> Result<(), Failure> {
    make_folder_of(to)?;
    let beside = to.with_extension("new");
    fs::copy(from, &beside).map_err(|error| Failure::io(from, &error))?;
    fs::rename(&beside, to).map_err(|error| Failure::io(to, &error))
}

fn link(name: &str, at: &Path) -> Result<(), Failure> {
    if fs::symlink_metadata(at).is_ok() {
        fs::remove_file(at).map_err(|error| Failure::io(at, &error))?;
    }
    symlink(name, at).map_err(|error| Failure::io(at, &error))
}
