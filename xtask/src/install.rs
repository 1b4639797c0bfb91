//! `cargo xtask install`: the C interface where a C compiler finds it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::Outcome;
use crate::exec::{Failure, Workspace};
use crate::header::{CAPI, HEADER};
use crate::metadata::Metadata;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Folder that gets include/, lib/ and lib/pkgconfig/.
    #[arg(long, value_name = "DIR")]
    prefix: PathBuf,
    /// Features of kvgate-capi, such as ucx,libfabric.
    #[arg(long, value_name = "NAMES", default_value = "")]
    features: String,
}

pub(crate) fn run(workspace: &Workspace, args: &Args) -> Result<Outcome, Failure> {
    let prefix =
        std::path::absolute(&args.prefix).map_err(|error| Failure::io(&args.prefix, &error))?;
    let built = workspace
        .cargo("install", ["build", "--release", "-p", "kvgate-capi"])
        .args(["--features", &args.features])
        .run()?;
    if !built.succeeded() {
        built.show_tail(40);
        return Ok(Outcome::Found);
    }
    let (include, lib) = (prefix.join("include"), prefix.join("lib"));
    let release = workspace.target.join("release");
    put(&workspace.root.join(HEADER), &include.join("kvgate.h"))?;
    put(&release.join("libkvgate.a"), &lib.join("libkvgate.a"))?;
    let soname = soname(&workspace.read(HEADER)?)?;
    put(&release.join("libkvgate.so"), &lib.join(&soname))?;
    link(&soname, &lib.join("libkvgate.so"))?;
    let description = lib.join("pkgconfig/kvgate.pc");
    let template = workspace.read(format!("{CAPI}/kvgate.pc.in"))?;
    let text = fill(&template, &values(workspace, &prefix)?)?;
    make_folder_of(&description)?;
    fs::write(&description, text).map_err(|error| Failure::io(&description, &error))?;
    println!("installed: {}", prefix.display());
    Ok(Outcome::Clean)
}

/// The name that programs record, as `build.rs` of the crate sets it: that of the binary interface.
fn soname(header: &str) -> Result<String, Failure> {
    header
        .lines()
        .find_map(|line| line.strip_prefix("#define KV_ABI_VERSION "))
        .map(|version| format!("libkvgate.so.{version}"))
        .ok_or_else(|| Failure::new(format!("{HEADER} defines no KV_ABI_VERSION")))
}

/// What the description for pkg-config is filled with.
fn values(workspace: &Workspace, prefix: &Path) -> Result<[(&'static str, String); 3], Failure> {
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
    Ok([
        ("PREFIX", prefix.display().to_string()),
        ("URL", url.to_owned()),
        ("VERSION", capi.version.clone()),
    ])
}

/// The template with a value for each `@NAME@`.
fn fill(template: &str, values: &[(&str, String)]) -> Result<String, Failure> {
    let mut filled = String::new();
    for (index, piece) in template.split('@').enumerate() {
        let is_name = index % 2 == 1;
        let value = values.iter().find(|(name, _)| is_name && *name == piece);
        match value {
            Some((_, value)) => filled.push_str(value),
            None if is_name => {
                let message = format!("kvgate.pc.in: unknown name {piece:?}");
                return Err(Failure::new(message));
            }
            None => filled.push_str(piece),
        }
    }
    Ok(filled)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_template_is_filled_and_unknown_names_are_refused() {
        let values = [
            ("PREFIX", "/some@where".to_owned()),
            ("URL", "u".to_owned()),
        ];
        let filled = fill("prefix=@PREFIX@\nlib=${prefix}/lib @URL@\n", &values).unwrap();
        assert_eq!(filled, "prefix=/some@where\nlib=${prefix}/lib u\n");
        assert!(fill("Version: @VERSION@\n", &values).is_err());
    }

    #[test]
    fn the_name_of_the_library_is_that_of_its_interface() {
        let name = soname("#ifndef X\n#define KV_ABI_VERSION 12\n").unwrap();
        assert_eq!(name, "libkvgate.so.12");
        assert!(soname("#define KV_ADDRESS_BYTES 128\n").is_err());
    }
}
