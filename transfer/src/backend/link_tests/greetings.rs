//! Who becomes a peer, and who is refused.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::*;
use crate::agent::wire;

/// Says `words` to a listener and returns what it answers until it closes.
fn say(address: &Address, words: &[u8]) -> Vec<u8> {
    let Address::Tcp(socket) = address else {
        panic!("not a TCP address")
    };
    let mut stream = TcpStream::connect(socket).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    stream.write_all(words).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    answer
}

fn hello() -> Vec<u8> {
    let mut words = Vec::new();
    wire::append_hello(&mut words, &[1; 32], false);
    words
}

#[test]
fn strangers_are_refused_by_name_and_the_listener_goes_on() {
    let b = Host::new("b");
    let listener = listen(&addresses("strangers")[1], b.clone()).unwrap();
    let address = listener.address();
    // Somebody who says nothing stays through all of this, and is sent away in the end.
    let Address::Tcp(socket) = address else {
        panic!()
    };
    let silent = TcpStream::connect(socket).unwrap();

    say(address, b"GET / HTTP/1.1\r\n\r\n");
    assert!(b.await_refusal().contains("not a kvgate link"));
    say(address, b"G");
    assert!(b.await_refusal().contains("not a kvgate link"));

    let mut version = hello();
    version[4..6].copy_from_slice(&777u16.to_le_bytes());
    let answer = say(address, &version);
    let reason = b.await_refusal();
    assert!(
        reason.contains("777") && reason.contains("version"),
        "{reason}"
    );
    assert_eq!(
        &answer[..6],
        &hello()[..6],
        "the stranger hears our version"
    );

    let mut oversized = hello();
    oversized[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    say(address, &oversized);
    assert!(b.await_refusal().contains("4294967295 bytes"));

    // A body that its kind allows, but not from a stranger; nothing of it has to come.
    let mut message = Vec::new();
    wire::append_message(&mut message, &[0; 4096]);
    say(address, &message[..wire::HEADER_BYTES]);
    assert!(b.await_refusal().contains("at most 2048"));

    let mut broken = hello();
    broken[20] ^= 1;
    say(address, &broken);
    assert!(b.await_refusal().contains("check sum"));

    let mut out_of_turn = hello();
    wire::append_bye(&mut out_of_turn);
    say(address, &out_of_turn);
    assert!(b.await_refusal().contains("Metadata"));

    let mut no_metadata = hello();
    wire::append_metadata(&mut no_metadata, b"nonsense");
    say(address, &no_metadata);
    assert!(b.await_refusal().contains("metadata"));

    let a = Host::new("a");
    connect(address, soon(), &*a).unwrap();
    b.await_established();
    silent
        .set_read_timeout(Some(Duration::from_secs(10)))
        .unwrap();
    let _ = (&silent).read_to_end(&mut Vec::new());
    assert!(b.await_refusal().contains("deadline passed"));
}

#[test]
fn a_peer_that_dribbles_is_cut_at_the_deadline() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = Address::Tcp(listener.local_addr().unwrap());
    let dribbler = crate::sync::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        // One byte at a time for as long as the other side listens.
        for byte in hello().iter().cycle().take(40) {
            if stream.write_all(&[*byte]).is_err() {
                return;
            }
            pause_ms(20);
        }
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let started = Instant::now();
    let error = connect(&address, Deadline::after_ms(200), &*Host::new("a"))
        .err()
        .unwrap();
    assert_eq!(
        *error.kind(),
        ErrorKind::DeadlineExceeded {
            what: "handshake",
            deadline_ms: 200
        }
    );
    assert!(started.elapsed() < Duration::from_secs(3));
    dribbler.join().unwrap();
}

#[test]
fn the_connector_names_the_version_of_the_listener_too() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = Address::Tcp(listener.local_addr().unwrap());
    let other = crate::sync::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut words = hello();
        words[4..6].copy_from_slice(&2u16.to_le_bytes());
        stream.write_all(&words).unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let error = connect(&address, soon(), &*Host::new("a")).err().unwrap();
    let expected = ErrorKind::VersionMismatch {
        address: address.to_string(),
        ours: wire::VERSION,
        theirs: 2,
    };
    assert_eq!(*error.kind(), expected);
    other.join().unwrap();
}

#[test]
fn only_equal_secrets_meet() {
    let cases = [
        (Some("s"), Some("s"), None),
        (Some("s"), Some("t"), Some("does not know")),
        (None, Some("s"), Some("none is configured here")),
        (Some("s"), None, Some("one is demanded here")),
    ];
    for (index, (ours, theirs, refusal)) in cases.into_iter().enumerate() {
        for address in addresses(&format!("secret-{index}")) {
            let b = Host::with("b", theirs, false);
            let listener = listen(&address, b.clone()).unwrap();
            let outcome = connect(listener.address(), soon(), &*Host::with("a", ours, false));
            let Some(words) = refusal else {
                outcome.unwrap();
                b.await_established();
                continue;
            };
            let error = outcome.err().unwrap();
            let heard = b.await_refusal();
            let said = error.to_string();
            assert!(
                matches!(error.kind(), ErrorKind::HandshakeRefused { .. }),
                "{said}"
            );
            assert!(
                said.contains(words) || heard.contains(words),
                "{said} / {heard}"
            );
            assert!(b.established.lock().is_empty());
        }
    }
}

#[test]
fn an_address_beyond_this_host_needs_a_secret() {
    for text in ["0.0.0.0:0", "[::]:0"] {
        let address = Address::Tcp(text.parse().unwrap());
        let error = listen(&address, Host::new("a")).err().unwrap();
        let expected = ErrorKind::AuthRequired {
            address: address.to_string(),
        };
        assert_eq!(*error.kind(), expected);
        listen(&address, Host::with("a", Some("s"), false)).unwrap();
    }
}

#[test]
fn an_address_in_use_and_one_without_a_listener_are_named() {
    for address in addresses("in-use") {
        let first = listen(&address, Host::new("a")).unwrap();
        let bound = first.address().clone();
        let error = listen(&bound, Host::new("b")).err().unwrap();
        let text = bound.to_string();
        assert_eq!(
            *error.kind(),
            ErrorKind::AddressInUse {
                address: text.clone()
            }
        );
        drop(first);
        let error = connect(&bound, soon(), &*Host::new("b")).err().unwrap();
        assert!(matches!(error.kind(), ErrorKind::Unreachable { address, .. } if *address == text));
        listen(&bound, Host::new("c")).unwrap();
    }
}

/// Nobody has refused anything: the other side is gone, before its first word or inside one.
#[test]
fn a_peer_that_ends_in_the_handshake_is_lost() {
    for spoken in [0, 1, hello().len() / 2, hello().len()] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Address::Tcp(listener.local_addr().unwrap());
        let peer = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(&hello()[..spoken]).unwrap();
        });
        let error = connect(&address, soon(), &*Host::new("a")).err().unwrap();
        peer.join().unwrap();
        assert!(
            matches!(error.kind(), ErrorKind::PeerLost { reason } if reason.contains(&address.to_string())),
            "{spoken}: {error}"
        );
    }
}

#[test]
fn memory_that_does_not_fit_the_metadata_is_refused() {
    struct Liar(Arc<Host>);
    impl LinkHost for Liar {
        fn introduction(&self) -> Introduction {
            let mut introduction = self.0.introduction();
            introduction.metadata.regions[0].len_bytes += 4096;
            introduction
        }
        fn secret(&self) -> Option<Vec<u8>> {
            None
        }
        fn established(&self, _: Established) {}
        fn refused(&self, _: String, _: crate::obs::RefusedField, _: String) {}
    }
    let b = Host::new("b");
    let listener = listen(&addresses("liar")[0], b.clone()).unwrap();
    let liar = Liar(Host::new("liar"));
    let error = connect(listener.address(), soon(), &liar).err().unwrap();
    assert!(
        error.to_string().contains("does not fit the metadata"),
        "{error}"
    );
    assert!(b.await_refusal().contains("does not fit the metadata"));
}

/// One name, two ways to the memory behind it: whoever comes the other way is told so.
#[test]
fn mapped_memory_and_copies_by_the_kernel_do_not_meet() {
    let hints = ["(shm)", "(cma)"];
    let Address::Shm(socket) = &addresses("ways")[0] else {
        panic!("not a shm address")
    };
    let both = [Address::Shm(socket.clone()), Address::Cma(socket.clone())];
    for (listens, connects) in [(0, 1), (1, 0)] {
        let b = Host::new("b");
        let _listener = listen(&both[listens], b.clone()).unwrap();
        let error = connect(&both[connects], soon(), &*Host::new("a"))
            .err()
            .unwrap();
        let ErrorKind::HandshakeRefused { reason, .. } = error.kind() else {
            panic!("{error}")
        };
        assert!(reason.contains(hints[connects]), "{reason}");
        let reason = b.await_refusal();
        assert!(reason.contains(hints[connects]), "{reason}");
    }
}

/// Places that do not fit what was said about the regions.
#[test]
fn places_of_another_registration_are_refused() {
    struct Liar(Arc<Host>);
    impl LinkHost for Liar {
        fn introduction(&self) -> Introduction {
            let mut introduction = self.0.introduction();
            introduction.regions[0].generation += 1;
            introduction
        }
        fn secret(&self) -> Option<Vec<u8>> {
            None
        }
        fn established(&self, _: Established) {}
        fn refused(&self, _: String, _: crate::obs::RefusedField, _: String) {}
    }
    let b = Host::new("b");
    let address = &addresses("places")[3];
    let _listener = listen(address, b.clone()).unwrap();
    assert!(connect(address, soon(), &Liar(Host::new("liar"))).is_err());
    let reason = b.await_refusal();
    assert!(reason.contains("does not fit the metadata"), "{reason}");
}
