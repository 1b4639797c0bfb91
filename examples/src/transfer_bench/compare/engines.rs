//! The engines that a comparison knows, and what each one needs.

use std::path::{Path, PathBuf};

use super::super::options::Backend;
use crate::handoff::failure::Failure;

/// One engine.
#[derive(Clone, Debug)]
pub(super) struct Engine {
    /// Its name in the results.
    pub(super) name: String,
    /// What it is: `kvgate`, `limit` or `peer`.
    pub(super) kind: Kind,
    program: Program,
    args: Vec<String>,
    env: Vec<(&'static str, &'static str)>,
    /// What brings it.
    pub(super) install: &'static str,
    /// More pages than this are not asked of it.
    pub(super) most_pages: u32,
}

/// What an engine is to the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// This product.
    Kvgate,
    /// A bare loop.
    Limit,
    /// Another engine.
    Peer,
}

#[derive(Clone, Debug)]
enum Program {
    /// This program.
    Own,
    /// A program that `examples/peers/setup.sh` has built.
    Built(&'static str),
    /// A script, and the Python package that it drives.
    Script(&'static str, &'static str),
}

const SETUP: &str = "examples/peers/setup.sh (needs gcc)";
const SETUP_UCX: &str = "apt-get install libucx-dev, then examples/peers/setup.sh";
const SETUP_NEW_UCX: &str = "examples/peers/setup.sh (fetches the wheel libucx-cu12)";
const SETUP_OFI: &str = "apt-get install libfabric-dev, then examples/peers/setup.sh";
const SETUP_NIXL: &str = "examples/peers/setup.sh with CPython 3.11 (fetches the wheel nixl-cu12)";
const SETUP_MOONCAKE: &str = "examples/peers/setup.sh with CPython 3.11 (fetches the wheel \
                              mooncake-transfer-engine-non-cuda)";

/// Mooncake's peer may be of no use after a longer request.
const MOONCAKE_MOST_PAGES: u32 = 2048;

/// This product's engines over `backends`, the limits, and the peers.
#[must_use]
pub(super) fn all(backends: &[Backend]) -> Vec<Engine> {
    let own = backends.iter().map(|backend| Engine {
        name: format!("kvgate_{}", backend.id()),
        kind: Kind::Kvgate,
        program: Program::Own,
        args: vec!["xb".to_owned(), backend.id().to_owned()],
        env: Vec::new(),
        install: "",
        most_pages: u32::MAX,
    });
    own.chain(limits()).chain(peers()).collect()
}

fn limits() -> Vec<Engine> {
    let limit = |name, program, args: &[&str]| {
        engine(
            (name, Kind::Limit),
            (Program::Built(program), args),
            &[],
            SETUP,
        )
    };
    vec![
        limit("memcpy", "limits", &["memcpy"]),
        limit("bare_cma", "limits", &["cma"]),
        limit("bare_tcp", "stream", &[]),
    ]
}

fn peers() -> Vec<Engine> {
    let ucx = |name, program, tls, install| {
        let env = [("UCX_TLS", tls)];
        engine(
            (name, Kind::Peer),
            (Program::Built(program), &[name]),
            &env,
            install,
        )
    };
    let ofi = |name, provider| {
        engine(
            (name, Kind::Peer),
            (Program::Built("ofi"), &[name, provider]),
            &[],
            SETUP_OFI,
        )
    };
    let nixl = |name, env: &[_]| {
        let script = Program::Script("nixl_ucx.py", "nixl_cu12");
        engine((name, Kind::Peer), (script, &[name]), env, SETUP_NIXL)
    };
    let mooncake = Program::Script("mooncake_tcp.py", "mooncake");
    let mooncake = engine(
        ("mooncake_tcp", Kind::Peer),
        (mooncake, &["mooncake_tcp"]),
        &[],
        SETUP_MOONCAKE,
    );
    vec![
        ucx("ucx_shm", "ucx-new", "posix,self,cma", SETUP_NEW_UCX),
        ucx("ucx_posix", "ucx-new", "posix,self", SETUP_NEW_UCX),
        ucx("ucx_tcp", "ucx-new", "tcp,self", SETUP_NEW_UCX),
        ucx("ucx113_tcp", "ucx", "tcp,self", SETUP_UCX),
        ofi("ofi_shm", "shm"),
        ofi("ofi_tcp", "tcp;ofi_rxm"),
        nixl("nixl_default", &[]),
        nixl(
            "nixl_shm",
            &[("UCX_TLS", "posix,self,cma"), ("GRID_NIXL_ERRORS", "none")],
        ),
        nixl("nixl_tcp", &[("UCX_TLS", "tcp,self")]),
        Engine {
            most_pages: MOONCAKE_MOST_PAGES,
            ..mooncake
        },
    ]
}

fn engine(
    (name, kind): (&str, Kind),
    (program, args): (Program, &[&str]),
    env: &[(&'static str, &'static str)],
    install: &'static str,
) -> Engine {
    Engine {
        name: name.to_owned(),
        kind,
        program,
        args: args.iter().map(|&arg| arg.to_owned()).collect(),
        env: env.to_vec(),
        install,
        most_pages: u32::MAX,
    }
}

/// Where `examples/peers/setup.sh` puts things, unless it is told otherwise.
#[must_use]
pub fn default_folder() -> PathBuf {
    let named = |variable| std::env::var_os(variable).map(PathBuf::from);
    named("KVGATE_PEERS").unwrap_or_else(|| {
        let cache = named("XDG_CACHE_HOME");
        let cache = cache.or_else(|| Some(named("HOME")?.join(".cache")));
        cache.unwrap_or_default().join("kvgate-peers")
    })
}

impl Engine {
    /// The first thing that it needs and that is not in `folder`.
    #[must_use]
    pub(super) fn missing(&self, folder: &Path) -> Option<String> {
        let absent = |path: PathBuf| (!path.exists()).then(|| path.display().to_string());
        let build = folder.join("build");
        match &self.program {
            Program::Own => None,
            Program::Built(name) => absent(build.join(name)),
            Program::Script(file, package) => absent(build.join(file))
                .or_else(|| absent(python(folder)))
                .or_else(|| match has_package(folder, package) {
                    true => None,
                    false => Some(format!("the Python package {package}")),
                }),
        }
    }

    /// How it is started.
    pub(super) fn command(&self, folder: &Path) -> Result<std::process::Command, Failure> {
        let build = folder.join("build");
        let mut command = match &self.program {
            Program::Own => {
                let own = std::env::current_exe()
                    .map_err(|error| Failure::internal(format!("this program: {error}")))?;
                std::process::Command::new(own)
            }
            Program::Built(name) => std::process::Command::new(build.join(name)),
            Program::Script(file, _) => {
                let mut command = std::process::Command::new(python(folder));
                command.arg(build.join(file));
                command
            }
        };
        command
            .args(&self.args)
            .env("GRID_BUILD", &build)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .env("UCX_NET_DEVICES", "lo")
            .env("UCX_LOG_LEVEL", "error")
            .env("UCX_WARN_UNUSED_ENV_VARS", "n")
            .envs(self.env.iter().copied());
        Ok(command)
    }
}

fn python(folder: &Path) -> PathBuf {
    folder.join("venv/bin/python")
}

fn has_package(folder: &Path, package: &str) -> bool {
    let versions = std::fs::read_dir(folder.join("venv/lib"));
    let mut versions = versions.into_iter().flatten().flatten();
    versions.any(|version| version.path().join("site-packages").join(package).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_built_is_named_with_what_brings_it() {
        let nowhere = Path::new("/no/such/folder");
        for engine in all(&[Backend::Shm]) {
            match engine.kind {
                Kind::Kvgate => assert_eq!(engine.missing(nowhere), None),
                _ => {
                    let missing = engine.missing(nowhere).unwrap();
                    assert!(missing.contains("/no/such/folder"), "{missing}");
                    assert!(engine.install.contains("setup.sh"), "{}", engine.name);
                }
            }
        }
    }
}
