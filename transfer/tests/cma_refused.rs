//! What forbids copies between processes is found when the two meet, and named: here a sandbox that
//! answers EPERM, as Yama and other users' processes do.
//!
//! The second process is this executable again, asked for the one test `child`, with its role in the
//! environment. It puts itself into the sandbox.

#![allow(clippy::unwrap_used)]

use std::process::{Child, Command, Stdio};

use kvgate_transfer::{
    Address, Agent, AgentEvent, Deadline, ErrorKind, Memory, MemoryRegion, PoolGeometry, sync::Arc,
};

const ROLE: &str = "KVGATE_TEST_ROLE";
const ADDRESS: &str = "KVGATE_TEST_ADDRESS";
const OTHER: &str = "KVGATE_TEST_OTHER";

fn soon() -> Deadline {
    Deadline::after_ms(20_000)
}

fn side(name: &str) -> (Agent, MemoryRegion) {
    let agent = Agent::builder(name).build().unwrap();
    let pool = PoolGeometry {
        offset_bytes: 0,
        stride_bytes: 64,
        slot_bytes: 64,
        slot_count: 4,
    };
    let memory = Arc::new(Memory::host(256).unwrap());
    let region = agent.register(memory, &[pool]).unwrap();
    (agent, region)
}

fn address(name: &str) -> Address {
    Address::Cma(name.to_owned())
}

/// From now on this thread, and the threads that it starts, cannot read the memory of any process.
fn enter_sandbox() {
    let rule = |code: u32, jt, jf, k| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let mut rules = [
        // The number of the call stands first in what a filter sees.
        rule(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        rule(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            0,
            1,
            libc::SYS_process_vm_readv as u32,
        ),
        rule(
            libc::BPF_RET | libc::BPF_K,
            0,
            0,
            libc::SECCOMP_RET_ERRNO | libc::EPERM as u32,
        ),
        rule(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: rules.len() as u16,
        filter: rules.as_mut_ptr(),
    };
    // SAFETY: I-16: numbers, and a program of the stated length that outlives the call.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        let entered = libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program);
        assert_eq!(entered, 0, "{}", std::io::Error::last_os_error());
    }
}

struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(role: &str, name: &str) -> Other {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env(ROLE, role)
        .env(ADDRESS, name)
        .env(OTHER, std::process::id().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    Other(child)
}

/// The role of the second process; nothing in the first one.
#[test]
fn child() {
    let (Ok(role), Ok(name)) = (std::env::var(ROLE), std::env::var(ADDRESS)) else {
        return;
    };
    enter_sandbox();
    let (agent, _region) = side("child");
    if role == "connector" {
        let error = agent.connect(&address(&name), soon()).unwrap_err();
        let ErrorKind::ProbeFailed {
            address: found,
            pid,
            errno,
            ptrace_scope,
        } = error.kind()
        else {
            panic!("{error}")
        };
        assert_eq!(*found, address(&name).to_string());
        assert_eq!(pid.to_string(), std::env::var(OTHER).unwrap());
        assert_eq!(*errno, Some(libc::EPERM));
        let yama = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
        let expected = yama.ok().map(|text| text.trim().parse::<u32>().unwrap());
        assert_eq!(*ptrace_scope, expected);
        let text = error.to_string();
        assert!(text.contains("process_vm_readv"), "{text}");
        return;
    }
    agent.listen(&address(&name)).unwrap();
    let refused = agent.next_event(soon());
    let Some(AgentEvent::Refused { reason, .. }) = refused else {
        panic!("{refused:?}")
    };
    assert!(reason.contains("process_vm_readv"), "{reason}");
}

fn name(test: &str) -> String {
    format!("kvgate-refused-{}-{test}", std::process::id())
}

#[test]
fn a_connector_that_cannot_copy_is_told_why_and_nobody_becomes_a_peer() {
    let name = name("connector");
    let (agent, _region) = side("parent");
    agent.listen(&address(&name)).unwrap();
    let mut other = start("connector", &name);
    let event = agent.next_event(soon());
    let Some(AgentEvent::Refused { reason, .. }) = event else {
        panic!("{event:?}")
    };
    assert!(
        reason.contains("refused by the peer") && reason.contains("process_vm_readv"),
        "{reason}"
    );
    assert!(other.0.wait().unwrap().success(), "the child saw its error");
}

#[test]
fn a_listener_that_cannot_copy_refuses_with_the_reason() {
    let name = name("listener");
    let (agent, _region) = side("parent");
    let mut other = start("listener", &name);
    let deadline = soon();
    let error = loop {
        match agent.connect(&address(&name), deadline) {
            // It has not begun to listen yet.
            Err(error) if error.is_retryable() && !deadline.has_passed() => {
                std::thread::yield_now();
            }
            other => break other.unwrap_err(),
        }
    };
    let ErrorKind::HandshakeRefused { reason, .. } = error.kind() else {
        panic!("{error}")
    };
    assert!(
        reason.contains("refused by the peer") && reason.contains("process_vm_readv"),
        "{reason}"
    );
    assert!(other.0.wait().unwrap().success(), "the child heard of it");
}
