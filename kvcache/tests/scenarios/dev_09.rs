//! DEV-09: a prefix is sent before it was written.
//!
//! **Given** prefill sends the pages of a prefix before, or together with, what it computes behind them, and
//! the prefix is still being produced: by the forward before, on a device that the host runs ahead of, or by
//! a load that the tree lists already. **When** the send is to be posted. **Expected** it is refused without
//! a witness for every page and component in it, whatever carries it. **In the field** two of three backends
//! dropped the event that the send had to wait for.
//!
//! Guard: I-7, I-12. A commit leaves no gap (`kvcache/src/lease/write.rs`), a post needs a witness that
//! covers it (`kvcache/src/plan.rs`), a pending prefix is copied only through its gate
//! (`kvcache/src/prefix/lease.rs`). The backends never see an operation without a witness: `Agent::post`
//! takes it by value, and does not compile without one (`transfer/src/source.rs`).

use std::ops::Range;

use kvgate_kvcache::*;
use kvgate_transfer::sync::{Arc, Mutex};
use kvgate_transfer::{Deadline, Status};

use crate::host::stream::{Answer, Delays, Gate, Stream};
use crate::host::{Host, Net, Node, Request, Shape, Target, Writer, patience, rows, seeds};

const PREFIX: Range<u32> = 0..256;
const SUFFIX: Range<u32> = 256..512;

type Written = Result<Vec<WrittenLayer>, Error>;

/// Runs a scenario over each backend with threads.
fn over_each(scenario: impl Fn(Host, u64)) {
    for seed in seeds(6) {
        for net in [Net::Local, Net::Tcp] {
            println!("DEV-09: seed {seed}");
            scenario(Host::new(net, Shape::of(&[0, 4, 128], 6), 1), seed);
        }
    }
}

/// The slots of a request at prefill, for the host and for the kernels that it has queued.
struct Slots {
    pools: PoolSet,
    lease: Mutex<WriteLease>,
    request: Request,
}

impl Slots {
    fn new(host: &Host, request: Request) -> Arc<Slots> {
        let pools = host.writers[0].node.pools.clone();
        let lease = pools.reserve(request.tokens, request.room).unwrap();
        let lease = Mutex::new(lease);
        Arc::new(Slots {
            pools,
            lease,
            request,
        })
    }

    fn commit(&self, tokens: Range<u32>) -> Written {
        let commit = |layer| self.lease.lock().commit_layer(layer, tokens.clone());
        self.pools.schema().layers().map(commit).collect()
    }
}

/// Queues a forward pass over some tokens: every component of every layer after its delay, then the commit
/// by the thread that wrote.
fn forward(
    stream: &Stream,
    slots: &Arc<Slots>,
    tokens: Range<u32>,
    delays: Delays,
) -> Answer<Written> {
    let slots = slots.clone();
    stream.launch(move || {
        let schema = slots.pools.schema();
        for row in schema.rows() {
            delays.pause(row.layer, row.component);
            let (lease, request) = (&mut slots.lease.lock(), slots.request);
            let (layer, component) = (row.layer, row.component);
            rows::write_component(schema, lease, layer, component, request, tokens.clone());
        }
        slots.commit(tokens)
    })
}

/// Sends segments of every layer against these witnesses; the first refusal ends it.
fn send(
    host: &Host,
    flight: &InFlight,
    written: &[WrittenLayer],
    segments: Range<u32>,
) -> Result<(), Error> {
    let (writer, to) = (&host.writers[0], Target::of(flight));
    let plan = host.plan(written[0].source().block_table().tokens());
    for written in written {
        for segment in segments.clone() {
            if let Some(piece) = writer.whole(&plan, segment, written, &to)? {
                let status = writer.send(piece).wait(patience());
                assert!(matches!(status, Status::Done(_)), "{status:?}");
            }
        }
    }
    Ok(())
}

/// Decode has the bytes of the request, in whatever has been sent to it completely.
fn check(host: &Host, flight: &InFlight, request: Request, symptom: &str) {
    let (lease, schema) = (flight.lease().unwrap(), host.receiver.pools.schema());
    for layer in host.layers() {
        let ready = lease.layer(layer, patience()).unwrap();
        assert_eq!(
            rows::foreign(schema, &ready.view(), request),
            None,
            "{symptom}"
        );
    }
}

#[test]
fn dev_09_a_finished_suffix_does_not_speak_for_its_prefix() {
    over_each(|host, seed| {
        let request = Request::new(5, SUFFIX.end);
        let flight = host.flight(request);
        let (slots, delays) = (Slots::new(&host, request), Delays::new(seed));
        let (before, own, gate) = (Stream::new(), Stream::new(), Gate::default());
        before.hold(&gate);
        let prefix = forward(&before, &slots, PREFIX, delays);
        // The host runs ahead: its own forward is through, the one before has not begun.
        let suffix = forward(&own, &slots, SUFFIX, delays).wait();
        let refusal = match suffix {
            Ok(written) => {
                send(&host, &flight, &written, 0..2).unwrap();
                let symptom = "the prefix was sent before it was produced";
                check(&host, &flight, request, symptom);
                None
            }
            Err(refusal) => Some(refusal),
        };
        let refusal = refusal.expect("a suffix without its prefix is no witness");
        assert!(
            matches!(refusal.kind(), ErrorKind::CommitGap { committed: 0, .. }),
            "{refusal}"
        );
        gate.open();
        let prefix = prefix.wait().unwrap();
        send(&host, &flight, &prefix, 0..1).unwrap();
        let suffix = slots.commit(SUFFIX).unwrap();
        send(&host, &flight, &suffix, 1..2).unwrap();
        check(&host, &flight, request, "sent against its witness");
    });
}

#[test]
fn dev_09_a_finished_prefix_does_not_speak_for_what_follows() {
    over_each(|host, seed| {
        let request = Request::new(6, SUFFIX.end);
        let flight = host.flight(request);
        let (slots, delays) = (Slots::new(&host, request), Delays::new(seed));
        let (stream, gate) = (Stream::new(), Gate::default());
        let prefix = forward(&stream, &slots, PREFIX, delays).wait().unwrap();
        stream.hold(&gate);
        let suffix = forward(&stream, &slots, SUFFIX, delays);
        // The early send of what is there goes through, that of the rest with the same witness does not.
        send(&host, &flight, &prefix, 0..1).unwrap();
        let refused = send(&host, &flight, &prefix, 1..2);
        if refused.is_ok() {
            let symptom = "the suffix was sent before it was produced";
            check(&host, &flight, request, symptom);
        }
        let refusal = refused.expect_err("the witness covers the prefix only");
        let needed = matches!(
            refusal.kind(),
            ErrorKind::NotWritten {
                needed_tokens: 512,
                written_tokens: 256,
                ..
            }
        );
        assert!(needed, "{refusal}");
        gate.open();
        let suffix = suffix.wait().unwrap();
        send(&host, &flight, &suffix, 1..2).unwrap();
        check(&host, &flight, request, "sent against its witness");
    });
}

/// The same process as receiver of a load and as sender to decode.
fn behind_a_load(load: &Host, net: Net) -> Host {
    let shape = load.shape.clone();
    let decode = Node::new(&net, "decode behind", &shape);
    let node = load.receiver.clone();
    let (to_receiver, at_receiver) = net.connect(&node, &decode);
    let writer = Writer {
        node,
        to_receiver,
        at_receiver,
        rank: kvgate_transfer::WriterRank(0),
        layers: 0..3,
    };
    Host {
        net,
        shape,
        receiver: decode,
        writers: vec![writer],
    }
}

/// Copies the two pages of a prefix into slots of a request.
fn copy(prefix: &PrefixLease, slots: &Slots, deadline: Deadline) -> Result<(), Error> {
    let mut lease = slots.lease.lock();
    (0..2).try_for_each(|page| prefix.copy_page(page, &mut lease, page, deadline))
}

#[test]
fn dev_09_a_prefix_under_load_is_not_sent() {
    over_each(|load, seed| {
        let net = match load.net {
            Net::Tcp => Net::Tcp,
            _ => Net::Local,
        };
        let host = behind_a_load(&load, net);
        let request = Request::new(7, 600);
        let flight = host.flight(request);
        let slots = Slots::new(&host, request);
        // The tree lists the prefix as soon as its load is promised.
        let loaded = Request {
            room: Room(70),
            tokens: 512,
            ..request
        };
        let loading = load.flight(loaded);
        let tree = PrefixTree::new(&load.receiver.pools);
        let prompt: Vec<u32> = (0..request.tokens).collect();
        assert_eq!(tree.insert(&prompt[..512], &loading).unwrap(), 2);
        let (Hit::Pending { lease, .. } | Hit::Ready { lease, .. }) = tree.lookup(&prompt) else {
            panic!("the tree lists it")
        };
        let early = copy(&lease, &slots, Deadline::now());
        let own = Stream::new();
        // The rest is computed here, windows and states included; a host that has "copied" sends.
        let pools = slots.pools.clone();
        let mine = slots.clone();
        let rest = own.launch(move || {
            for layer in pools.schema().layers() {
                Delays::new(seed).pause(layer, Component::SwaLatent);
                let mut lease = mine.lease.lock();
                rows::write(pools.schema(), &mut lease, layer, request, 512..600);
            }
        });
        rest.wait();
        if early.is_ok() {
            let written = slots.commit(0..600).unwrap();
            send(&host, &flight, &written, 0..3).unwrap();
            let symptom = "a prefix was sent while it was still being loaded";
            check(&host, &flight, request, symptom);
        }
        let refusal = early.expect_err("nothing of the load has landed");
        assert!(
            matches!(refusal.kind(), ErrorKind::Gate { .. }),
            "{refusal}"
        );
        load.hand_over(loaded, &loading);
        copy(&lease, &slots, patience()).unwrap();
        let written = slots.commit(0..600).unwrap();
        send(&host, &flight, &written, 0..3).unwrap();
        check(&host, &flight, request, "sent after its load");
    });
}
