//! Which paths can be taken here, and why not.

use std::fs;

use std::time::Duration;

use kvgate_transfer::bare::View;
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use serde::Serialize;

use super::layout::{Layout, PoolShape};
use super::options::Backend;
use super::pair::Pair;
use super::route::Route;
use crate::handoff::failure::{Failure, FailureKind};

/// Bound of a trial.
const TRIAL_DEADLINE: Duration = Duration::from_secs(5);

/// One path.
#[derive(Clone, Debug, Serialize)]
pub struct Usable {
    /// Its name.
    pub name: &'static str,
    /// Whether a run with it can begin.
    pub usable: bool,
    /// What it rests on, or what is missing.
    pub why: String,
}

/// Every path that `--backend` names.
#[must_use]
pub fn list() -> Vec<Usable> {
    let all = [
        Backend::Local,
        Backend::Shm,
        Backend::Cma,
        Backend::Tcp,
        Backend::Ucx,
        Backend::Libfabric,
    ];
    all.into_iter().map(look).collect()
}

/// Refuses a path that was asked for by name and cannot be taken here.
///
/// # Errors
/// With what was tried.
pub fn check(asked: Backend) -> Result<(), Failure> {
    if asked == Backend::Auto {
        return Ok(());
    }
    let found = look(asked);
    if found.usable {
        return Ok(());
    }
    let message = format!("--backend {} is not usable here: {}", found.name, found.why);
    Err(Failure::new(FailureKind::Unavailable, message).with_field("backend", found.name))
}

fn look(backend: Backend) -> Usable {
    let found = match backend {
        Backend::Local => Ok("two agents of one process".to_owned()),
        Backend::Auto | Backend::Shm => shm(),
        Backend::Tcp => Ok("stream sockets of the host".to_owned()),
        Backend::Cma => cma(),
        Backend::Ucx => library(backend, cfg!(feature = "ucx")),
        Backend::Libfabric => library(backend, cfg!(feature = "libfabric")),
    };
    let usable = found.is_ok();
    let (Ok(why) | Err(why)) = found;
    Usable {
        name: backend.id(),
        usable,
        why,
    }
}

/// What the mapped path needs of the kernel, tried.
fn shm() -> Result<String, String> {
    let memory = View::shared("kvgate-probe", 4096, 0).map_err(|error| error.to_string())?;
    let sealed = memory.descriptor().is_some();
    pidfd_open(getpid(), PidfdFlags::empty()).map_err(|errno| format!("pidfd_open: {errno}"))?;
    match sealed {
        true => Ok("sealed memfds, abstract Unix sockets, pidfds".to_owned()),
        false => Err("no memfd behind a shared memory".to_owned()),
    }
}

/// Two processes meet: only that shows what Yama, a sandbox or a container forbids.
fn cma() -> Result<String, String> {
    trial(Backend::Cma).map(|()| {
        let scope = ptrace_scope();
        format!("process_vm_writev and process_vm_readv; {scope}")
    })
}

/// Two processes meet over the library: it was found, it is new enough, and it has the transport.
fn library(backend: Backend, is_built_in: bool) -> Result<String, String> {
    let name = backend.id();
    if !is_built_in {
        return Err(format!(
            "this build has no feature {name}, so no library was looked for"
        ));
    }
    let variable = match backend {
        Backend::Ucx => "KVGATE_UCX_LIBRARY",
        _ => "KVGATE_LIBFABRIC_LIBRARY",
    };
    let from = match std::env::var_os(variable) {
        Some(path) => format!("{variable} ({}), then the system's", path.to_string_lossy()),
        None => format!("the system's; {variable} can name another one"),
    };
    trial(backend).map(|()| format!("two processes met over its tcp transport; library: {from}"))
}

fn trial(backend: Backend) -> Result<(), String> {
    let pool = PoolShape {
        offset_bytes: 0,
        slot_bytes: 4096,
        slot_count: 1,
    };
    let layout = Layout { pools: vec![pool] };
    let met = Pair::start(&Route::here(backend, TRIAL_DEADLINE), layout);
    met.map(drop).map_err(|failure| failure.to_string())
}

fn ptrace_scope() -> String {
    match fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope") {
        Ok(scope) => format!("kernel.yama.ptrace_scope is {}", scope.trim()),
        Err(_) => "the kernel has no Yama restriction".to_owned(),
    }
}
