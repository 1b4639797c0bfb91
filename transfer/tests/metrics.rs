//! The numbers of an agent as a scraper reads them: the text is parsed, not searched.

#![cfg(feature = "metrics")]
#![allow(clippy::unwrap_used)]

#[allow(dead_code, unused_macros)] // Only the nodes are used here.
mod contract;

use std::{collections::BTreeMap, io::Write, net::TcpStream};

use contract::{Backend, Node, SLOT_BYTES, STAGE, arrival, done, event, expect, fence, patience};
use kvgate_transfer::*;

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

type Labels = BTreeMap<String, String>;

/// Prometheus text, format 0.0.4, read strictly.
#[derive(Default)]
struct Scrape {
    types: BTreeMap<String, String>,
    samples: BTreeMap<(String, Labels), f64>,
}

impl Scrape {
    fn of(agent: &Agent) -> Self {
        let text = agent.metrics_text();
        let mut scrape = Self::default();
        assert!(text.ends_with('\n'), "the last line has an end");
        let mut family = String::new();
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, help) = rest.split_once(' ').unwrap();
                assert!(is_name(name) && !help.is_empty(), "{line}");
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
                assert_eq!(kind == "counter", name.ends_with("_total"), "{line}");
                let known = scrape.types.insert(name.into(), kind.into());
                assert!(known.is_none(), "one family in two places: {line}");
                family = name.into();
            } else {
                let (name, labels, value) = sample(line);
                let suffix = name
                    .strip_prefix(&family)
                    .unwrap_or_else(|| panic!("{line} in {family}"));
                match scrape.types[&family].as_str() {
                    "histogram" => {
                        assert!(["_bucket", "_sum", "_count"].contains(&suffix), "{line}")
                    }
                    _ => assert_eq!(suffix, "", "{line}"),
                }
                let double = scrape.samples.insert((name, labels), value);
                assert!(double.is_none(), "one series twice: {line}");
            }
        }
        scrape.check_histograms();
        scrape
    }

    /// Buckets grow, and the last one holds everything.
    fn check_histograms(&self) {
        let mut buckets: BTreeMap<(String, Labels), Vec<(f64, f64)>> = BTreeMap::new();
        for ((name, labels), count) in &self.samples {
            let Some(family) = name.strip_suffix("_bucket") else {
                continue;
            };
            let mut labels = labels.clone();
            let bound = match labels.remove("le").unwrap().as_str() {
                "+Inf" => f64::INFINITY,
                bound => bound.parse().unwrap(),
            };
            let series = buckets.entry((family.into(), labels)).or_default();
            series.push((bound, *count));
        }
        for ((family, labels), mut series) in buckets {
            series.sort_by(|a, b| a.0.total_cmp(&b.0));
            assert!(
                series.windows(2).all(|w| w[0].1 <= w[1].1),
                "{family}: {series:?}"
            );
            let total = self.samples[&(format!("{family}_count"), labels)];
            assert_eq!(*series.last().unwrap(), (f64::INFINITY, total), "{family}");
        }
    }

    /// The value of one series, which has exactly these labels.
    fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.find(name, labels)
            .unwrap_or_else(|| panic!("{name} {labels:?} is not among {:?}", self.samples.keys()))
    }

    fn find(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let labels = labels.iter().map(|(l, v)| ((*l).into(), (*v).into()));
        self.samples.get(&(name.into(), labels.collect())).copied()
    }
}

fn is_name(name: &str) -> bool {
    let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    name.starts_with("kvgate_") && name.chars().all(is_word)
}

/// `name{label="value",…} number`; no value here needs an escape.
fn sample(line: &str) -> (String, Labels, f64) {
    let (series, value) = line.rsplit_once(' ').unwrap();
    let (name, labels) = match series.split_once('{') {
        Some((name, labels)) => (name, labels.strip_suffix('}').unwrap()),
        None => (series, ""),
    };
    assert!(is_name(name), "{line}");
    let pair = |pair: &str| {
        let (label, value) = pair.split_once('=').unwrap();
        let value = value.strip_prefix('"').unwrap().strip_suffix('"').unwrap();
        assert!(label.chars().all(|c| c.is_ascii_lowercase()), "{line}");
        assert!(!value.contains(['"', '\\']), "{line}");
        (label.to_owned(), value.to_owned())
    };
    let labels = labels
        .split(',')
        .filter(|pair| !pair.is_empty())
        .map(pair)
        .collect();
    (name.into(), labels, value.parse().unwrap())
}

const WRITE: [(&str, &str); 2] = [("op", "write"), ("backend", "local")];
const READ: [(&str, &str); 2] = [("op", "read"), ("backend", "local")];
const LOCAL: [(&str, &str); 1] = [("backend", "local")];

fn ended(op: &'static str, outcome: &'static str) -> [(&'static str, &'static str); 3] {
    [("op", op), ("backend", "local"), ("outcome", outcome)]
}

#[test]
fn a_transfer_is_counted_on_both_sides() {
    let (a, b) = (Node::new(&Local, "a"), Node::new(&Local, "b"));
    let (to_b, from_a) = Local.connect(&a.agent, &b.agent);
    let (barrier, flight) = expect(&b, from_a, 1, 2);
    // The gate is shut: this one sleeps.
    assert!(barrier.wait(STAGE, Deadline::after_ms(1)).is_err());
    for chunk in [0, 1] {
        done(
            &Local,
            &a.send(to_b, 0, u32::from(chunk), arrival(1, 0, chunk)),
        );
    }
    barrier.wait(STAGE, patience()).unwrap();
    fence(&Local, &a, to_b, &b);
    assert!(flight.close().wait(patience()).is_ok());

    let sender = Scrape::of(&a.agent);
    let bytes = 2.0 * SLOT_BYTES as f64;
    assert_eq!(sender.value("kvgate_transfer_bytes_total", &WRITE), bytes);
    assert_eq!(sender.value("kvgate_transfer_bytes_total", &READ), 0.0);
    assert_eq!(sender.value("kvgate_descriptors_total", &WRITE), 2.0);
    assert_eq!(
        sender.value("kvgate_transfers_total", &ended("write", "done")),
        2.0
    );
    assert_eq!(
        sender.value("kvgate_transfers_total", &ended("write", "failed")),
        0.0
    );
    for histogram in ["kvgate_transfer_seconds", "kvgate_post_seconds"] {
        assert_eq!(sender.types[histogram], "histogram");
        assert_eq!(sender.value(&format!("{histogram}_count"), &WRITE), 2.0);
        let sum = sender.value(&format!("{histogram}_sum"), &WRITE);
        assert!(sum > 0.0 && sum < 40.0, "{sum} s");
    }
    assert_eq!(sender.value("kvgate_notifications_sent_total", &LOCAL), 2.0);
    assert_eq!(sender.value("kvgate_peers", &LOCAL), 1.0);

    let receiver = Scrape::of(&b.agent);
    assert_eq!(
        receiver.value("kvgate_notifications_received_total", &LOCAL),
        2.0
    );
    assert_eq!(receiver.value("kvgate_chunks_landed_total", &[]), 2.0);
    let outcome = [("outcome", "delivered")];
    assert_eq!(receiver.value("kvgate_messages_total", &outcome), 1.0);
    let place = [("where", "stage")];
    assert!(receiver.value("kvgate_barrier_wait_seconds_count", &place) >= 1.0);
    assert!(receiver.value("kvgate_barrier_wait_seconds_sum", &place) >= 0.001);
    let quiet = [("outcome", "quiet")];
    assert_eq!(receiver.value("kvgate_drain_seconds_count", &quiet), 1.0);
    assert_eq!(
        receiver.value("kvgate_transfers_total", &ended("write", "done")),
        0.0
    );
}

#[test]
fn what_is_refused_is_counted_by_its_reason() {
    let (a, b) = (Node::new(&Local, "a"), Node::new(&Local, "b"));
    let (to_b, from_a) = Local.connect(&a.agent, &b.agent);
    let (_barrier, _flight) = expect(&b, from_a, 7, 1);
    done(&Local, &a.send(to_b, 0, 0, arrival(6, 0, 0)));
    done(&Local, &a.send(to_b, 0, 0, arrival(7, 0, 9)));
    done(&Local, &a.send(to_b, 0, 0, arrival(7, 0, 0)));
    done(&Local, &a.send(to_b, 0, 0, arrival(7, 0, 0)));
    fence(&Local, &a, to_b, &b);
    let receiver = Scrape::of(&b.agent);
    for reason in ["stale", "unknown", "duplicate"] {
        let count = receiver.value("kvgate_barrier_late_total", &[("reason", reason)]);
        assert_eq!(count, 1.0, "{reason}");
    }
    let nobody = [("kind", "nobody_waits")];
    assert_eq!(receiver.value("kvgate_stale_epoch_total", &nobody), 1.0);
    assert_eq!(receiver.value("kvgate_chunks_landed_total", &[]), 1.0);

    // A read on nobody's word.
    let info = a.agent.peer(to_b).unwrap();
    let (mut local, mut remote) = (
        DescriptorList::new(),
        DescriptorList::remote(info.incarnation),
    );
    local.push(a.pool, &[0]);
    remote.push(info.pools[0].pool, &[0]);
    let read = a.agent.prepare(Op::Read, &local, &remote, to_b).unwrap();
    let witness = SourceReady::host_written();
    let refusal = a.agent.post(&read, witness, PostOptions::default());
    assert!(matches!(
        refusal.unwrap_err().error.kind(),
        ErrorKind::SourceMismatch { .. }
    ));
    let sender = Scrape::of(&a.agent);
    let cause = [("cause", "not_announced")];
    assert_eq!(sender.value("kvgate_source_not_ready_total", &cause), 1.0);
    assert_eq!(sender.value("kvgate_post_seconds_count", &READ), 0.0);
}

#[test]
fn a_lost_peer_and_a_second_connection_are_counted() {
    let (a, b) = (Node::new(&Local, "a"), Node::new(&Local, "b"));
    let nothing = Scrape::of(&a.agent);
    assert_eq!(
        nothing.find("kvgate_peers", &LOCAL),
        None,
        "no connection, no backend"
    );
    Local.connect(&a.agent, &b.agent);
    let (to_b, _) = Local.connect(&a.agent, &b.agent);
    let scrape = Scrape::of(&a.agent);
    assert_eq!(scrape.value("kvgate_peers", &LOCAL), 2.0);
    assert_eq!(scrape.value("kvgate_reconnects_total", &LOCAL), 1.0);

    let _ = b.agent.shutdown(patience());
    for _ in 0..2 {
        event(&Local, &a.agent, |event| {
            matches!(event, AgentEvent::PeerDown { .. }).then_some(())
        });
    }
    assert!(a.prepare(to_b, &[0], &[0]).is_err());
    let scrape = Scrape::of(&a.agent);
    assert_eq!(scrape.value("kvgate_peers", &LOCAL), 0.0);
    let proven = [("backend", "local"), ("proof", "proven")];
    assert_eq!(scrape.value("kvgate_peers_lost_total", &proven), 2.0);
    let unproven = [("backend", "local"), ("proof", "none")];
    assert_eq!(scrape.value("kvgate_peers_lost_total", &unproven), 0.0);
}

/// Operations that are in flight have an age, which ends with them.
#[cfg(feature = "fault-injection")]
#[test]
fn the_oldest_operation_in_flight_is_named_by_its_state() {
    let (a, b) = (Node::new(&Local, "a"), Node::new(&Local, "b"));
    let (to_b, _) = Local.connect(&a.agent, &b.agent);
    let gate = fault::HoldGate::new();
    let transfer = a.prepare(to_b, &[0], &[0]).unwrap();
    let options = PostOptions {
        hold: Some(gate.clone()),
        ..PostOptions::default()
    };
    let source = SourceReady::host_written();
    let handle = a.agent.post(&transfer, source, options).unwrap();
    let waited = handle.wait(Deadline::after_ms(20));
    assert!(matches!(waited, Status::InFlight));
    let name = "kvgate_oldest_inflight_seconds";
    let age = Scrape::of(&a.agent).value(name, &[("state", "running")]);
    assert!((0.02..20.0).contains(&age), "{age} s");
    gate.open();
    done(&Local, &handle);
    let scrape = Scrape::of(&a.agent);
    for state in ["queued", "running", "ending", "unknown"] {
        assert_eq!(scrape.value(name, &[("state", state)]), 0.0);
    }
}

#[test]
fn a_stranger_is_counted_by_what_is_wrong_with_it() {
    let agent = Agent::builder("a").build().unwrap();
    let address = Address::Tcp("127.0.0.1:0".parse().unwrap());
    let Address::Tcp(bound) = agent.listen(&address).unwrap() else {
        panic!("another kind of address");
    };
    let mut stranger = TcpStream::connect(bound).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    event(&Local, &agent, |event| {
        matches!(event, AgentEvent::Refused { .. }).then_some(())
    });
    let scrape = Scrape::of(&agent);
    let field = [("field", "frames")];
    assert_eq!(scrape.value("kvgate_handshake_refused_total", &field), 1.0);
}
