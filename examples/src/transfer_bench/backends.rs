//! Which paths can be taken here, and why not.

use std::fs;

use std::time::Duration;

use kvgate_transfer::bare::View;
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use serde::Serialize;

use super::layout::{Layout, PoolShape};
use super::options::Backend;
use super::pair::Pair;
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

/// The path that is taken for what was asked.
///
/// # Errors
/// The path was asked for by name and cannot be taken here.
pub fn choose(asked: Backend) -> Result<Backend, Failure> {
    let chosen = match asked {
        Backend::Auto => Backend::Shm,
        named => named,
    };
    let found = look(chosen);
    if found.usable {
        return Ok(chosen);
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
        Backend::Ucx => Err(unmeasured("ucx", cfg!(feature = "ucx"))),
        Backend::Libfabric => Err(unmeasured("libfabric", cfg!(feature = "libfabric"))),
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
    let pool = PoolShape {
        offset_bytes: 0,
        slot_bytes: 4096,
        slot_count: 1,
    };
    let layout = Layout { pools: vec![pool] };
    match Pair::start(Backend::Cma, layout, TRIAL_DEADLINE) {
        Ok(_) => Ok(format!(
            "process_vm_writev and process_vm_readv; {}",
            ptrace_scope()
        )),
        Err(failure) => Err(failure.to_string()),
    }
}

/// The engine has these paths, this tool does not.
fn unmeasured(name: &str, is_built_in: bool) -> String {
    let engine = match is_built_in {
        true => "is in this build",
        false => "is not in this build",
    };
    format!(
        "transfer-bench does not measure this path yet, and no library was looked for; the engine's feature \
         {name}, over which pd-handoff --transport {name} moves, {engine}"
    )
}

fn ptrace_scope() -> String {
    match fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope") {
        Ok(scope) => format!("kernel.yama.ptrace_scope is {}", scope.trim()),
        Err(_) => "the kernel has no Yama restriction".to_owned(),
    }
}
