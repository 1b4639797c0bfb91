//! The first words on a connection: which caches may be exchanged, and by whom.
#![cfg(not(kv_loom))]
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::ops::Range;

use common::small_schema;
use kvgate_kvcache::handoff::*;
use kvgate_kvcache::{CacheSchema, FieldDifference, Formats, IndexKFormat, V4Geometry};
use kvgate_transfer::{Incarnation, WriterRank, sync::Arc};

fn of(incarnation: u128, writer: u16, writer_count: u16, layers: Range<u16>) -> PeerHello {
    PeerHello {
        incarnation: Incarnation(incarnation),
        writer: WriterRank(writer),
        writer_count,
        layers,
    }
}

fn pair(ours: Arc<CacheSchema>, theirs: Arc<CacheSchema>) -> (Greeting, Greeting) {
    let prefill = Greeting::new(ours, of(1, 0, 1, 0..3), Incarnation(2));
    let decode = Greeting::new(theirs, of(2, 0, 1, 0..3), Incarnation(1));
    (prefill, decode)
}

fn heard(bytes: &[u8]) -> Envelope {
    Envelope::decode(bytes).unwrap()
}

#[test]
fn equal_schemas_are_welcome_on_both_sides() {
    let (mut prefill, mut decode) = pair(small_schema(), small_schema());
    let hello = prefill.hello();
    let answer = decode.handle(&heard(&hello)).unwrap().unwrap();
    assert_eq!(prefill.handle(&heard(&answer)).unwrap(), None);
    assert_eq!(*decode.state(), GreetingState::Welcome(of(1, 0, 1, 0..3)));
    assert_eq!(*prefill.state(), GreetingState::Welcome(of(2, 0, 1, 0..3)));
    let again = decode.handle(&heard(&hello)).unwrap_err();
    assert!(matches!(again, MachineError::OutOfTable { .. }));
}

#[test]
fn another_index_k_is_refused_on_both_sides_and_named() {
    let formats = |index_k| Formats {
        index_k,
        ..Formats::default()
    };
    let schema = |index_k| {
        Arc::new(CacheSchema::deepseek_v4(&V4Geometry::flash(), &formats(index_k)).unwrap())
    };
    let (mut prefill, mut decode) = pair(schema(IndexKFormat::Fp8), schema(IndexKFormat::Bf16));
    let refusal = decode.handle(&heard(&prefill.hello())).unwrap().unwrap();
    assert_eq!(prefill.handle(&heard(&refusal)).unwrap(), None);
    let difference = |ours: &str, theirs: &str| {
        GreetingState::Refused(FieldDifference {
            field: "index_k.encoding".to_owned(),
            ours: ours.to_owned(),
            theirs: theirs.to_owned(),
        })
    };
    assert_eq!(*decode.state(), difference("bf16", "fp8"));
    assert_eq!(*prefill.state(), difference("fp8", "bf16"));
}

#[test]
fn equal_fields_under_another_hash_are_refused() {
    let (mut prefill, mut decode) = pair(small_schema(), small_schema());
    let mut hello = heard(&prefill.hello());
    let Message::Hello { fingerprint, .. } = &mut hello.message else {
        panic!("no hello")
    };
    fingerprint[0] ^= 1;
    decode.handle(&hello).unwrap().unwrap();
    let GreetingState::Refused(difference) = decode.state() else {
        panic!("{:?}", decode.state())
    };
    assert_eq!(difference.field, "fingerprint");
}

#[test]
fn another_life_of_the_peer_is_not_heard() {
    let (mut prefill, mut decode) = pair(small_schema(), small_schema());
    let mut hello = heard(&prefill.hello());
    hello.identity.incarnation = Incarnation(3);
    let error = decode.handle(&hello).unwrap_err();
    assert!(matches!(error, MachineError::Foreign { .. }));
    assert_eq!(*decode.state(), GreetingState::Waiting);
}

#[test]
fn writers_deliver_each_layer_once() {
    let covered = cover(&[of(8, 1, 2, 0..1), of(7, 0, 2, 1..3)], 3).unwrap();
    let ranks: Vec<_> = covered
        .iter()
        .map(|writer| (writer.rank.0, writer.layers.clone()))
        .collect();
    assert_eq!(ranks, [(0, 1..3), (1, 0..1)]);
    for wrong in [
        vec![],
        vec![of(7, 0, 2, 0..3)],
        vec![of(7, 0, 2, 0..2), of(8, 1, 2, 1..3)],
        vec![of(7, 0, 2, 0..1), of(8, 1, 2, 2..3)],
        vec![of(7, 0, 2, 0..1), of(8, 0, 2, 1..3)],
        vec![of(7, 0, 1, 0..2)],
        vec![of(7, 0, 1, 0..4)],
    ] {
        assert!(cover(&wrong, 3).is_err(), "{wrong:?}");
    }
}
