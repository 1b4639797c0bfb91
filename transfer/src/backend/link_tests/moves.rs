//! What a link moves, and how it ends.

use std::time::{Duration, Instant};

use super::socket::{Bounds, Socket};
use super::*;
use crate::agent::wire;

#[test]
fn bytes_are_there_when_the_arrival_is_told() {
    each_transport("write", |pair| {
        for round in 1..=100u8 {
            for slot in 0..4 {
                pair.a.fill(slot, round);
            }
            let op = op(&pair.a, u64::from(round), (0, 4), 8);
            let posted = pair.a_link.post(&op).unwrap();
            let level = await_done(&pair.a, posted, u64::from(round)).unwrap();
            assert_eq!(level, Visibility::RemoteVisible);
            let (arrival, level, byte) = pair.b.await_seen(|seen| match seen {
                Seen::Arrived(arrival, level, byte) if arrival.epoch == Epoch(round.into()) => {
                    Some((arrival.clone(), *level, *byte))
                }
                _ => None,
            });
            assert_eq!(Some(arrival), op.arrival);
            assert_eq!((level, byte), (Visibility::RemoteVisible, round));
            assert_eq!(pair.b.byte(8), round);
        }
        assert_eq!(pair.b.byte(12), 0, "nothing beside the run was written");
    });
}

#[test]
fn messages_and_progress_keep_their_order_with_posts() {
    each_transport("order", |pair| {
        pair.a_link.send(b"first").unwrap();
        let posted = pair.a_link.post(&op(&pair.a, 1, (0, 1), 0)).unwrap();
        pair.a_link.send_progress(5).unwrap();
        pair.a_link.send(&vec![7; 3 << 20]).unwrap();
        await_done(&pair.a, posted, 1).unwrap();
        pair.b.await_seen(|seen| {
            matches!(seen, Seen::Message(bytes) if bytes.len() == 3 << 20).then_some(())
        });
        let seen = pair.b.seen.lock();
        assert!(matches!(&seen[0], Seen::Message(bytes) if bytes == "first"));
        assert!(matches!(&seen[1], Seen::Arrived(..)));
        assert_eq!(seen[2], Seen::Progress(5));
    });
}

#[test]
fn a_refused_write_is_drained_and_the_connection_survives() {
    for address in &addresses("refused")[1..3] {
        let pair = pair(address, Host::new("a"), Host::with("b", None, true));
        for id in 1..=3 {
            let posted = pair
                .a_link
                .post(&op(&pair.a, id, (0, SLOT_COUNT), 0))
                .unwrap();
            match await_done(&pair.a, posted, id).unwrap_err() {
                ErrorKind::Refused { reason } => assert!(reason.contains("revoked"), "{reason}"),
                other => panic!("{other:?}"),
            }
        }
        pair.a_link.send(b"still here").unwrap();
        pair.b
            .await_seen(|seen| matches!(seen, Seen::Message(_)).then_some(()));
        let arrived = |seen: &Seen| matches!(seen, Seen::Arrived(..));
        assert!(!pair.b.seen.lock().iter().any(arrived));
        assert_eq!(pair.b.byte(0), 0);
    }
}

#[test]
fn slots_outside_the_peer_are_refused_before_anything_is_stored() {
    let address = &addresses("outside")[0];
    let pair = pair(address, Host::new("a"), Host::new("b"));
    let mut wrong = op(&pair.a, 1, (0, 4), SLOT_COUNT - 3);
    let error = pair.a_link.post(&wrong).unwrap_err();
    assert!(
        matches!(error.kind(), ErrorKind::SlotOutOfRange { .. }),
        "{error}"
    );
    wrong = op(&pair.a, 2, (0, 1), 0);
    Arc::get_mut(&mut wrong.runs).unwrap().groups[0].pools[0].remote = PoolId(99);
    let error = pair.a_link.post(&wrong).unwrap_err();
    assert_eq!(*error.kind(), ErrorKind::UnknownPool { pool: PoolId(99) });
    pair.a_link.send(b"still here").unwrap();
    pair.b
        .await_seen(|seen| matches!(seen, Seen::Message(_)).then_some(()));
}

#[test]
fn both_sides_may_send_more_than_the_sockets_hold() {
    each_transport("both", |pair| {
        let rounds = 200;
        let send = |host: &Arc<Host>, link: &Arc<dyn Link>| {
            let (host, link) = (host.clone(), link.clone());
            crate::sync::thread::spawn(move || {
                for id in 1..=rounds {
                    let posted = link
                        .post(&op(&host, id, (0, SLOT_COUNT / 2), SLOT_COUNT / 2))
                        .unwrap();
                    if id == rounds {
                        await_done(&host, posted, id).unwrap();
                    }
                }
            })
        };
        let threads = [send(&pair.a, &pair.a_link), send(&pair.b, &pair.b_link)];
        for thread in threads {
            thread.join().unwrap();
        }
        for host in [&pair.a, &pair.b] {
            let arrived = |seen: &Seen| matches!(seen, Seen::Arrived(arrival, ..) if arrival.epoch == Epoch(rounds));
            host.await_seen(|seen| arrived(seen).then_some(()));
        }
    });
}

/// As when an agent is shut down while it takes a connection into service.
#[test]
fn a_link_that_is_closed_before_it_is_started_hears_the_goodbye() {
    for address in addresses("early-close") {
        let (a, b) = (Host::new("a"), Host::new("b"));
        let listener = listen(&address, b.clone()).unwrap();
        let at_a = connect(listener.address(), soon(), &*a).unwrap();
        let at_b = b.await_established();
        at_a.link.start(PEER, a.clone()).unwrap();
        at_a.link.send(b"nobody hears this").unwrap();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    at_b.link.close();
                    assert_eq!(at_b.link.quiesce(), Quiesce::Proven, "{address}");
                });
            }
        });
        assert!(at_b.link.start(PEER, b.clone()).is_err(), "{address}");
        let end = a.await_seen(|seen| match seen {
            Seen::Down(quiesce) => Some(quiesce.clone()),
            _ => None,
        });
        assert_eq!(end, Quiesce::Proven, "{address}");
        assert_eq!(*b.seen.lock(), [], "{address}");
    }
}

#[test]
fn a_closed_link_is_down_and_quiet_on_both_sides() {
    each_transport("close", |pair| {
        let started = Instant::now();
        pair.a_link.close();
        assert_eq!(pair.a_link.quiesce(), Quiesce::Proven);
        let quiesce = pair.b.await_seen(|seen| match seen {
            Seen::Down(quiesce) => Some(quiesce.clone()),
            _ => None,
        });
        assert_eq!(quiesce, Quiesce::Proven);
        assert!(
            pair.a.seen.lock().is_empty(),
            "no event for what was asked for"
        );
        let error = pair.a_link.send(b"late").unwrap_err();
        assert_eq!(*error.kind(), ErrorKind::Closed);
        assert!(pair.b_link.send(b"late").is_err());
        pair.b_link.close();
        pair.a_link.close();
        assert!(started.elapsed() < Duration::from_secs(5));
    });
}

/// A peer that leaves without a goodbye while its process lives on: this one.
#[test]
fn a_closed_socket_of_a_living_process_proves_nothing() {
    use std::io::{Read, Write};
    use std::os::linux::net::SocketAddrExt;

    let b = Host::new("b");
    let address = addresses("no-goodbye")[0].clone();
    let _listener = listen(&address, b.clone()).unwrap();
    let Address::Shm(name) = address else {
        panic!("not a shm address")
    };
    let socket = std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap();
    let mut stream = std::os::unix::net::UnixStream::connect_addr(&socket).unwrap();
    let mut introduction = b.introduction();
    introduction.metadata.regions.clear();
    introduction.metadata.pools.clear();
    let mut words = Vec::new();
    wire::append_hello(&mut words, &[1; 32], false);
    wire::append_metadata(&mut words, &introduction.metadata.encode());
    stream.write_all(&words).unwrap();
    words.clear();
    wire::append_ring(&mut words, crate::mem::ring::RING_BYTES);
    wire::append_ready(&mut words, None);
    let ring = crate::mem::ring::memory().unwrap();
    let socket = Socket::new(stream.try_clone().unwrap().into()).unwrap();
    let bounds = Bounds {
        stop: None,
        deadline: Some(soon()),
        process: None,
        writable: None,
    };
    let sent = socket.send_with_fd(&words, ring.file().unwrap(), bounds);
    assert_eq!(sent, Ok(words.len()));
    let at_b = b.await_established();
    at_b.link.start(PEER, b.clone()).unwrap();
    // Everything it was told is read, so that the close is an end and no reset.
    stream.set_nonblocking(true).unwrap();
    while stream.read(&mut [0; 4096]).is_ok_and(|count| count > 0) {}
    drop((stream, socket));
    let quiesce = b.await_seen(|seen| match seen {
        Seen::Down(quiesce) => Some(quiesce.clone()),
        _ => None,
    });
    assert!(matches!(quiesce, Quiesce::Unprovable(_)), "{quiesce:?}");
    assert!(matches!(at_b.link.quiesce(), Quiesce::Unprovable(_)));
}

#[test]
fn close_ends_a_worker_that_waits_for_a_peer_that_does_not_read() {
    for address in &addresses("blocked")[1..3] {
        let b = Host::new("b");
        let a = Host::new("a");
        let listener = listen(address, b.clone()).unwrap();
        let at_a = connect(listener.address(), soon(), &*a).unwrap();
        let _at_b = b.await_established(); // never started: it does not read
        at_a.link.start(PEER, a.clone()).unwrap();
        let link = at_a.link.clone();
        let posts = Arc::new(AtomicU64::new(0));
        let counted = posts.clone();
        let worker = crate::sync::thread::spawn(move || {
            loop {
                if let Err(error) = link.post(&op(&a, 1, (0, SLOT_COUNT), 0)) {
                    return error;
                }
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        // The sockets are full when no post has ended for a while.
        let mut last = u64::MAX;
        while last != posts.load(Ordering::Relaxed) {
            last = posts.load(Ordering::Relaxed);
            pause_ms(300);
        }
        let started = Instant::now();
        at_a.link.close();
        assert_eq!(*worker.join().unwrap().kind(), ErrorKind::Closed);
        assert!(started.elapsed() < Duration::from_secs(2));
    }
}
