//! Addresses of libraries: what is said when one is absent, or when two sides want different transports.

#![allow(clippy::unwrap_used)]

use kvgate_transfer::{Address, Agent, AgentEvent, BackendKind, Deadline, ErrorKind};

fn soon() -> Deadline {
    Deadline::after_ms(10_000)
}

fn agent(name: &str) -> Agent {
    Agent::builder(name).build().unwrap()
}

fn address(text: &str) -> Address {
    Address::resolve(text).unwrap().remove(0)
}

/// Whether this build and this machine have the backend; otherwise what is said must name it.
fn is_there(backend: BackendKind) -> bool {
    let wanted = address(&format!("{backend}:127.0.0.1:0"));
    let Err(error) = agent("probe").listen(&wanted) else {
        return true;
    };
    match error.kind() {
        ErrorKind::BackendUnavailable {
            backend: found,
            tried,
        } => {
            assert_eq!(*found, backend);
            assert!(!tried.is_empty() && tried.iter().all(|place| !place.is_empty()));
            assert!(error.to_string().contains(&tried[0]), "{error}");
            println!("SKIP: {error}");
        }
        other => panic!("{other:?}"),
    }
    let refused = agent("connector").connect(&wanted, soon()).unwrap_err();
    assert_eq!(
        refused.kind(),
        error.kind(),
        "asked before anybody connects"
    );
    false
}

#[test]
fn a_backend_that_is_not_there_says_what_was_tried() {
    let has = [cfg!(feature = "ucx"), cfg!(feature = "libfabric")];
    for (backend, has_feature) in [BackendKind::Ucx, BackendKind::Libfabric]
        .into_iter()
        .zip(has)
    {
        assert!(has_feature || !is_there(backend), "{backend}");
    }
}

/// A side that speaks only tcp, and one that wants a library, part at once and with a reason.
#[test]
fn two_sides_that_want_different_transports_part_with_a_reason() {
    let all = [BackendKind::Ucx, BackendKind::Libfabric];
    for backend in all.into_iter().filter(|backend| is_there(*backend)) {
        let listener = agent("listener");
        let bound = listener.listen(&address("tcp:127.0.0.1:0")).unwrap();
        let Address::Tcp(socket) = bound else {
            panic!("{bound}")
        };
        let wrong = address(&format!("{backend}:{socket}"));
        let refused = agent("connector").connect(&wrong, soon()).unwrap_err();
        assert!(
            matches!(refused.kind(), ErrorKind::HandshakeRefused { reason, .. } if !reason.is_empty()),
            "{refused}"
        );

        let listener = agent("listener");
        let bound = listener
            .listen(&address(&format!("{backend}:127.0.0.1:0")))
            .unwrap();
        let (Address::Ucx(socket) | Address::Libfabric(socket)) = bound else {
            panic!("{bound}")
        };
        // The tcp side finds no frame of its own, closes, and the listener names it.
        let connector = agent("connector");
        let _peer = connector.connect(&Address::Tcp(socket), soon()).unwrap();
        match listener.next_event(soon()).expect("an event in time") {
            AgentEvent::Refused { reason, .. } => {
                assert!(reason.contains(&backend.to_string()), "{reason}");
            }
            other => panic!("{other:?}"),
        }
    }
}
