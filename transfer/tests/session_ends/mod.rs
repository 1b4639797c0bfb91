//! Sessions that are ended while they have no connection.

use kvgate_transfer::{Deadline, TransferConfig};

use crate::contract::patience;
use crate::session_pair::{Proxied, message, pair, pair_of, suspended};

/// What was given to a session without a connection is sent within the deadline of the shutdown, or named.
#[test]
fn a_shutdown_drops_no_message_without_a_word() {
    const SENT: u64 = 3;
    for (comes_back, is_listener) in [(true, false), (true, true), (false, false)] {
        let pair = pair();
        let (from, to, peer) = match is_listener {
            false => (&pair.a, &pair.b, pair.b_at_a),
            true => (&pair.b, &pair.a, pair.a_at_b),
        };
        pair.proxy.turn_away(u64::MAX);
        pair.proxy.cut();
        for node in [&pair.a, &pair.b] {
            suspended(&node.agent);
        }
        for number in 0..SENT {
            let text = format!("message {number}");
            from.agent.send(peer, &text).unwrap();
        }
        let deadline = match comes_back {
            true => {
                pair.proxy.turn_away(0);
                patience()
            }
            false => Deadline::after_ms(200),
        };
        let report = from.agent.shutdown(deadline);
        match comes_back {
            true => {
                assert_eq!(report.unsent_messages, 0);
                for number in 0..SENT {
                    let text = format!("message {number}").into_bytes();
                    assert_eq!(message(&to.agent, &mut 0), text);
                }
            }
            false => {
                assert_eq!(report.unsent_messages, SENT);
                assert!(!report.is_clean(), "{report:?}");
            }
        }
        drop(pair);
    }
}

/// A session whose window is over before the deadline takes its messages with it, and the report still has them.
#[test]
fn a_session_that_ends_within_a_shutdown_names_its_messages() {
    let pair = pair_of(Proxied::within(2_000), TransferConfig::default());
    pair.proxy.turn_away(u64::MAX);
    pair.proxy.cut();
    suspended(&pair.a.agent);
    for text in ["one", "two"] {
        pair.a.agent.send(pair.b_at_a, text).unwrap();
    }
    let report = pair.a.agent.shutdown(patience());
    assert_eq!(report.unsent_messages, 2);
    assert!(!report.is_clean(), "{report:?}");
}
