//! An agent beyond the contract of its backends: futures, events, configuration, foreign code that fails.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unused_macros)] // Only the nodes are used here.
mod contract;

use std::{
    future::Future,
    pin::pin,
    sync::{Mutex, mpsc},
    task::{Context, Poll, Wake, Waker},
};

use contract::{Backend, Node, STAGE, WRITER, arrival, barrier, event, expect, fence, patience};
use kvgate_transfer::{arc_dyn, sync::Arc, *};

struct Local;

impl Backend for Local {
    fn new() -> Self {
        Self
    }

    fn agent(&self, name: &str, config: TransferConfig) -> Agent {
        Agent::builder(name).config(config).build().unwrap()
    }

    fn memory(&self, len_bytes: u64) -> Memory {
        Memory::host(len_bytes).unwrap()
    }

    fn connect(&self, a: &Agent, b: &Agent) -> (PeerId, PeerId) {
        Agent::connect_local(a, b).unwrap()
    }
}

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.unpark();
    }
}

/// A runtime of one line: a lost wake-up hangs it.
fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(std::sync::Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

#[test]
fn a_handle_is_a_future_and_a_gate_can_be_polled() {
    let (a, b) = (Node::new(&Local, "a"), Node::new(&Local, "b"));
    let (to_b, from_a) = Local.connect(&a.agent, &b.agent);
    for epoch in 1..=200 {
        let (barrier, _flight) = expect(&b, from_a, epoch, 1);
        let handle = a.send(to_b, 0, 0, arrival(epoch, 0, 0));
        block_on(std::future::poll_fn(|cx| barrier.poll(STAGE, cx))).unwrap();
        assert!(matches!(
            block_on(handle),
            Status::Done(Visibility::RemoteVisible)
        ));
    }
}

struct PanickingSink;

impl ArrivalSink for PanickingSink {
    fn arrived(&self, _: PeerId, _: &Arrival) {
        std::panic::resume_unwind(Box::new("a sink that fails"));
    }
}

#[test]
fn a_sink_that_panics_costs_the_connection_and_opens_nothing() {
    let (a, b) = (Node::new(&Local, "a"), Node::new(&Local, "b"));
    let (to_b, from_a) = Local.connect(&a.agent, &b.agent);
    let barrier = barrier(1, &[0]);
    let sink = arc_dyn!(PanickingSink => dyn ArrivalSink);
    let flight = b
        .agent
        .expect(&barrier, &[(from_a, WRITER)], Some(sink))
        .unwrap();
    barrier.arm().unwrap();
    drop(a.send(to_b, 0, 0, arrival(1, 0, 0)));
    event(&Local, &a.agent, |event| {
        matches!(event, AgentEvent::PeerDown { .. }).then_some(())
    });
    assert!(matches!(
        barrier.wait(STAGE, patience()),
        Err(BarrierError::Failed(_))
    ));
    assert_eq!(a.agent.shutdown(patience()).running_threads, 0);
    drop(flight);
}

#[derive(Default)]
struct Tape(Mutex<Vec<Event>>);

struct Taping(Arc<Tape>);

impl Recorder for Taping {
    fn record(&self, event: &Event) {
        self.0.0.lock().unwrap().push(event.clone());
    }
}

#[test]
fn events_tell_the_story_of_a_flight() {
    let tape = Arc::new(Tape::default());
    let recorder = arc_dyn!(Taping(tape.clone()) => dyn Recorder);
    let agent = Agent::builder("b").recorder(recorder).build().unwrap();
    let (a, b) = (Node::new(&Local, "a"), Node::of(&Local, agent));
    let (to_b, from_a) = Local.connect(&a.agent, &b.agent);
    let (barrier, flight) = expect(&b, from_a, 1, 1);
    drop(a.send(to_b, 0, 0, arrival(1, 0, 0)));
    barrier.wait(STAGE, patience()).unwrap();
    fence(&Local, &a, to_b, &b);
    assert!(flight.close().wait(patience()).is_ok());
    let epoch = Epoch(1);
    let story = [
        Event::PeerUp {
            peer: from_a,
            incarnation: a.agent.incarnation(),
            backend: BackendKind::Local,
        },
        Event::Arrived {
            peer: from_a,
            epoch,
            ticket_count: 1,
        },
        Event::Landed {
            epoch,
            stage: STAGE,
            chunk: ChunkId(0),
        },
        Event::Draining { epoch },
        Event::Quiesced { epoch },
    ];
    assert_eq!(*tape.0.lock().unwrap(), story);
}

#[test]
fn waiting_for_an_event_ends_with_the_agent_and_with_the_deadline() {
    let agent = Agent::builder("a").build().unwrap();
    assert!(agent.next_event(Deadline::after_ms(1)).is_none());
    let (started, has_started) = mpsc::channel();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            started.send(()).unwrap();
            agent.next_event(patience())
        });
        has_started.recv().unwrap();
        assert!(agent.shutdown(patience()).is_clean());
        assert!(waiter.join().unwrap().is_none());
    });
    assert_eq!(*agent.register_nothing().kind(), ErrorKind::Closed);
}

trait RegisterNothing {
    fn register_nothing(&self) -> Error;
}

impl RegisterNothing for Agent {
    fn register_nothing(&self) -> Error {
        self.register(Arc::new(Memory::host(1).unwrap()), &[])
            .unwrap_err()
    }
}

#[test]
fn what_cannot_work_is_refused_at_the_door() {
    let kind = |builder: AgentBuilder| builder.build().unwrap_err().kind().clone();
    let unnamed = ErrorKind::InvalidArgument {
        what: "agent name",
        value: String::new(),
    };
    assert_eq!(kind(Agent::builder("")), unnamed);
    let config = TransferConfig {
        queue_capacity: 0,
        ..TransferConfig::default()
    };
    let empty = ErrorKind::InvalidArgument {
        what: "queue_capacity",
        value: "0".into(),
    };
    assert_eq!(kind(Agent::builder("a").config(config)), empty);
    let agent = Agent::builder("a").build().unwrap();
    let pool = PoolGeometry {
        offset_bytes: 0,
        stride_bytes: 8,
        slot_bytes: 8,
        slot_count: 3,
    };
    let error = agent
        .register(Arc::new(Memory::host(23).unwrap()), &[pool])
        .unwrap_err();
    let outside = ErrorKind::InvalidGeometry {
        pool_index: 0,
        end_bytes: Some(24),
        len_bytes: 23,
    };
    assert_eq!(*error.kind(), outside);
    assert_eq!(error.to_string(), "pool 0 ends at byte 24 of 23");
    let none = agent.register_nothing();
    let pools = ErrorKind::InvalidArgument {
        what: "number of pools",
        value: "0".into(),
    };
    assert_eq!(*none.kind(), pools);
    assert!(agent.peer(PeerId(0)).is_none());
    let unknown = ErrorKind::UnknownPeer { peer: PeerId(4) };
    assert_eq!(*agent.send(PeerId(4), "x").unwrap_err().kind(), unknown);
}
