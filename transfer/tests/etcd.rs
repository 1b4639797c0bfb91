//! Agents that find each other in a real etcd. Without the program the tests say SKIP.
#![cfg(feature = "etcd")]
#![allow(clippy::unwrap_used)]

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use kvgate_transfer::*;
use tempfile::TempDir;

const LIFE: Duration = Duration::from_secs(1);

fn soon() -> Deadline {
    Deadline::after_ms(20_000)
}

/// A server of its own, which ends with the test.
struct Server {
    child: Child,
    port: u16,
    folder: TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Server {
    /// `None`, after a word about it, without the program.
    fn start() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let port = free_port();
        match spawn(&folder, port) {
            Ok(child) => Some(Self {
                child,
                port,
                folder,
            }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                eprintln!("SKIP: etcd: apt-get install etcd-server");
                None
            }
            Err(error) => panic!("etcd: {error}"),
        }
    }

    fn stop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// The same server with the same data.
    fn start_again(&mut self) {
        self.child = spawn(&self.folder, self.port).unwrap();
    }

    fn etcd(&self) -> Etcd {
        // The first endpoint answers to nobody.
        let endpoints = [free_port(), self.port].map(|port| format!("http://127.0.0.1:{port}/"));
        Etcd::new(endpoints, "/kvgate/test/").unwrap()
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

fn spawn(folder: &TempDir, port: u16) -> std::io::Result<Child> {
    let client = format!("http://127.0.0.1:{port}");
    let peer = format!("http://127.0.0.1:{}", free_port());
    Command::new("etcd")
        .arg("--data-dir")
        .arg(folder.path())
        .args([
            "--listen-client-urls",
            &client,
            "--advertise-client-urls",
            &client,
        ])
        .args([
            "--listen-peer-urls",
            &peer,
            "--initial-advertise-peer-urls",
            &peer,
        ])
        .args(["--initial-cluster", &format!("default={peer}")])
        .args(["--unsafe-no-fsync"])
        .env("ETCD_UNSUPPORTED_ARCH", std::env::consts::ARCH)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
}

fn listening(name: &str) -> Agent {
    let agent = Agent::builder(name).build().unwrap();
    agent
        .listen(&Address::Tcp(([127, 0, 0, 1], 0).into()))
        .unwrap();
    agent
}

/// Asks until it is so.
fn until<T>(what: &str, ask: impl Fn() -> Option<T>) -> T {
    let deadline = soon();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(!deadline.has_passed(), "{what}: not in time");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn agents_find_each_other_by_name() {
    let Some(server) = Server::start() else {
        return;
    };
    let etcd = server.etcd();
    let decode = listening("decode 0");
    let contact = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| etcd.wait_for("decode 0", soon()));
        let published = until("the first answer", || etcd.find("nobody", soon()).ok());
        assert_eq!(published, None);
        let publication = decode.publish(&etcd, LIFE, soon()).unwrap();
        let contact = waiting.join().unwrap().unwrap();
        assert_eq!(contact, decode.contact());
        // Longer than its life: it is kept.
        std::thread::sleep(LIFE * 3);
        assert_eq!(
            etcd.find("decode 0", soon()).unwrap().as_ref(),
            Some(&contact)
        );
        assert_eq!(publication.failure().map(|error| error.to_string()), None);
        contact
    });
    assert_eq!(
        etcd.find("decode 0", soon()).unwrap(),
        None,
        "it goes with its publication"
    );
    let prefill = listening("prefill");
    let tcp = PathChoice::Only(BackendKind::Tcp);
    let peer = prefill.connect_to(&contact, tcp, soon()).unwrap();
    assert_eq!(
        prefill.peer(peer).unwrap().incarnation,
        decode.incarnation()
    );
}

#[test]
fn a_new_life_takes_the_place_and_the_end_of_the_old_one_leaves_it() {
    let Some(server) = Server::start() else {
        return;
    };
    let etcd = server.etcd();
    let (old, new) = (listening("decode"), listening("decode"));
    until("etcd", || etcd.find("decode", soon()).ok());
    let first = old.publish(&etcd, LIFE, soon()).unwrap();
    let second = new.publish(&etcd, LIFE, soon()).unwrap();
    drop(first);
    assert_eq!(etcd.wait_for("decode", soon()).unwrap(), new.contact());
    drop(second);
    let gone = etcd
        .wait_for("decode", Deadline::after_ms(100))
        .unwrap_err();
    assert!(
        matches!(gone.kind(), ErrorKind::DeadlineExceeded { .. }),
        "{gone}"
    );
}

#[test]
fn an_entry_outlives_a_restart_of_the_server() {
    let Some(mut server) = Server::start() else {
        return;
    };
    let etcd = server.etcd();
    until("etcd", || etcd.find("decode", soon()).ok());
    let agent = listening("decode");
    let publication = agent.publish(&etcd, LIFE, soon()).unwrap();
    server.stop();
    let failure = until("the failure", || publication.failure());
    assert!(
        matches!(failure.kind(), ErrorKind::Directory { .. }),
        "{failure}"
    );
    assert!(failure.is_retryable());
    let error = etcd.find("decode", soon()).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::Directory { .. }),
        "{error}"
    );
    std::thread::sleep(LIFE * 2);
    server.start_again();
    until("the recovery", || {
        publication.failure().is_none().then_some(())
    });
    assert_eq!(etcd.wait_for("decode", soon()).unwrap(), agent.contact());
}

const CHILD: &str = "KVGATE_TEST_ETCD_PORT";

/// The other process of the test below: publishes until it is killed.
#[test]
fn child() {
    let Ok(port) = std::env::var(CHILD) else {
        return;
    };
    let etcd = Etcd::new([format!("http://127.0.0.1:{port}")], "/kvgate/test/").unwrap();
    let agent = listening("killed");
    let name = format!("kvgate-etcd-test-{}", std::process::id());
    agent.listen(&Address::Shm(name)).unwrap();
    let _publication = agent.publish(&etcd, LIFE, soon()).unwrap();
    std::thread::sleep(Duration::from_secs(120));
}

#[test]
fn an_entry_ends_with_its_process() {
    let Some(server) = Server::start() else {
        return;
    };
    let etcd = server.etcd();
    until("etcd", || etcd.find("killed", soon()).ok());
    let mut other = Command::new(std::env::current_exe().unwrap())
        .args(["child", "--exact"])
        .env(CHILD, server.port.to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let contact = etcd.wait_for("killed", soon());
    other.kill().unwrap();
    other.wait().unwrap();
    let agent = listening("survivor");
    let tcp = PathChoice::Only(BackendKind::Tcp);
    let error = agent
        .connect_to(&contact.unwrap(), tcp, soon())
        .unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::NoPath { .. }), "{error}");
    until("its end", || {
        etcd.find("killed", soon()).unwrap().is_none().then_some(())
    });
}

#[test]
fn what_is_no_directory_is_refused() {
    for wrong in [
        vec![],
        vec!["https://127.0.0.1:1"],
        vec!["http://a", "127.0.0.1:1"],
    ] {
        let error = Etcd::new(wrong.clone(), "/").unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::InvalidArgument { .. }),
            "{wrong:?}"
        );
    }
    let etcd = Etcd::new(["http://127.0.0.1:1"], "/").unwrap();
    let agent = Agent::builder("short").build().unwrap();
    let error = agent.publish(&etcd, LIFE / 2, soon()).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::InvalidArgument { .. }),
        "{error}"
    );
}
