//! I-19: a layer of a landed page is written by one holder, and only once it has landed.
#![cfg(kv_loom)]
#![allow(clippy::unwrap_used)]

use kvgate_kvcache::{ErrorKind, LayerId};
use kvgate_loom_tests::{Cell, ModelLink, deadline, flight, model, model_peer, pools, still_agent};
use kvgate_transfer::Visibility;
use kvgate_transfer::sync::{Arc, thread};

/// Two threads want to append; they never write at the same time.
#[test]
fn one_appends_at_a_time() {
    model("one_appends_at_a_time", || {
        let (agent, pools) = (still_agent("decode"), pools(1));
        let link = ModelLink::receiver();
        let peer = agent
            .attach_link(ModelLink::object(&link), &model_peer(1))
            .unwrap();
        let landed = Arc::new(flight(&pools, &agent, peer, 1).unwrap());
        link.arrive(1, 0, 0, Visibility::RemoteVisible);
        let page = Arc::new(Cell::new());
        let other = {
            let (landed, page) = (landed.clone(), page.clone());
            thread::spawn(move || append(&landed, &page))
        };
        append(&landed, &page);
        other.join().unwrap();
        let _left = agent.shutdown(deadline());
        link.forget();
    });
}

fn append(flight: &kvgate_kvcache::InFlight, page: &Cell) {
    match flight.append_lease() {
        Ok(mut append) => {
            let lease = flight.lease().unwrap();
            let ready = lease.layer(LayerId(0), deadline()).unwrap();
            assert!(append.layer(&ready).is_ok());
            page.write(8);
        }
        Err(error) => assert!(matches!(error.kind(), ErrorKind::AppendTaken { .. })),
    }
}

/// A transfer writes the page until it has landed, the holder of the append right after that.
#[test]
fn appending_waits_for_the_layer() {
    model("appending_waits_for_the_layer", || {
        let (agent, pools) = (still_agent("decode"), pools(1));
        let link = ModelLink::receiver();
        let peer = agent
            .attach_link(ModelLink::object(&link), &model_peer(1))
            .unwrap();
        let landing = flight(&pools, &agent, peer, 1).unwrap();
        let page = Arc::new(Cell::new());
        let nic = {
            let (link, page) = (link.clone(), page.clone());
            thread::spawn(move || {
                page.write(7);
                link.arrive(1, 0, 0, Visibility::RemoteVisible);
            })
        };
        append(&landing, &page);
        assert_eq!(page.read(), 8);
        nic.join().unwrap();
        drop(landing.close());
        let _left = agent.shutdown(deadline());
        link.forget();
    });
}

/// The witness of one flight is no right to append to another.
#[test]
fn the_witness_is_of_one_flight() {
    model("the_witness_is_of_one_flight", || {
        let (agent, pools) = (still_agent("decode"), pools(2));
        let link = ModelLink::receiver();
        let peer = agent
            .attach_link(ModelLink::object(&link), &model_peer(1))
            .unwrap();
        let (one, other) = (
            flight(&pools, &agent, peer, 1).unwrap(),
            flight(&pools, &agent, peer, 2).unwrap(),
        );
        link.arrive(1, 0, 0, Visibility::RemoteVisible);
        let lease = one.lease().unwrap();
        let ready = lease.layer(LayerId(0), deadline()).unwrap();
        let mut append = other.append_lease().unwrap();
        let refused = append.layer(&ready).map(drop).unwrap_err();
        assert!(matches!(refused.kind(), ErrorKind::OtherFlight { .. }));
        drop((append, lease, one, other));
        let _left = agent.shutdown(deadline());
        link.forget();
    });
}
