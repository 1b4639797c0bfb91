//! What the prefill side tells the decode side about the run before it submits anything, and at its end.
//!
//! Both travel as messages of the agent beside those of the hand-off protocol; one byte in front says
//! which of the two a message is.

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::failure::{Failure, FailureKind};
use super::fault::FaultSpec;
use super::options::Hold;
use super::report::TierWork;
use super::timeline::{self, Span};
use super::turns::{DECODED_TOKENS, TurnOptions};

/// A message of the hand-off protocol follows.
const HANDOFF: u8 = 1;
/// A [`SideMessage`] as JSON follows.
const SIDE: u8 = 2;

/// The whole run, as the prefill side will bring it about.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunPlan {
    /// The process that sends.
    pub prefill_pid: u32,
    /// The boot of its host: spans of another host have another clock.
    pub boot_id: String,
    /// When this was sent, on the monotonic clock of its host.
    pub sent_at_us: u64,
    /// Requests in all.
    pub requests: u32,
    /// Requests in flight.
    pub concurrency: u32,
    /// Tokens of every prompt.
    pub prompt_tokens: u32,
    /// Tokens to decode.
    pub steps: u32,
    /// Tokens per forward pass.
    pub chunk: u32,
    /// Prompts and moments of aborts.
    pub seed: u64,
    /// Share of the requests that is aborted.
    pub cancel_share: f64,
    /// Delay of one layer.
    pub hold: Option<Hold>,
    /// The fault to plant.
    pub fault: Option<FaultSpec>,
    /// Fed one by one after the prompt, whatever the model would say next.
    pub fed_ids: Option<Vec<u32>>,
    /// The requests are turns of conversations; `prompt_tokens` is then that of the longest prompt.
    pub conversations: Option<TurnOptions>,
}

/// What the prefill side measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PrefillSummary {
    /// CPU time.
    pub cpu_ms: u64,
    /// Transfers posted.
    pub transfers: u64,
    /// Whole pages posted.
    pub bytes: Vec<RowBytes>,
    /// Live rows posted.
    pub row_bytes: u64,
    /// Every page of its pools is free again.
    pub pages_conserved: bool,
    /// Bits of the logits of the last prompt token; only with given ids.
    pub last_logits: Option<Vec<u32>>,
    /// Prompt tokens of all requests; only of conversations.
    pub prompt_tokens: u64,
    /// What the tiers did; only of conversations.
    pub tiers: Option<TierWork>,
    /// What it computed when.
    pub spans: Vec<Span>,
    /// When each (layer, segment) was posted.
    pub posts: Vec<Moment>,
}

/// When one segment of one layer was posted, or had landed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// The request, from 0.
    pub request: u32,
    /// From 0.
    pub layer: u16,
    /// From 0.
    pub segment: u16,
    /// On the monotonic clock of the side that says so.
    pub at_us: u64,
}

/// Bytes of one component of one layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowBytes {
    /// From 0.
    pub layer: u16,
    /// The component id.
    pub component: String,
    /// Whole pages.
    pub bytes: u64,
}

/// Beside the hand-off protocol.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum SideMessage {
    /// The first message of the prefill side.
    Plan(RunPlan),
    /// Its last one, after the last request.
    Summary(PrefillSummary),
    /// The decode side is through with a request: another one may follow.
    Ended {
        /// From 0.
        request: u32,
        /// The tokens that it decoded.
        output_ids: Vec<u32>,
    },
    /// The decode side has read a layer in its first step; a planted fault waits for it.
    LayerRead {
        /// From 0.
        request: u32,
        /// From 0.
        layer: u16,
    },
    /// The last message of the decode side: the exit code of the run and its verdict line.
    Finish {
        /// The exit code.
        code: u8,
        /// The verdict line.
        text: String,
    },
    /// The decode side cannot go on.
    Failed(Failure),
}

/// A message as it arrived.
#[derive(Debug)]
pub enum Message {
    /// For the hand-off machines.
    Handoff(Bytes),
    /// About the run.
    Side(Box<SideMessage>),
}

/// Wraps a message of the hand-off protocol.
#[must_use]
pub fn wrap(handoff: &[u8]) -> Bytes {
    let mut bytes = Vec::with_capacity(1 + handoff.len());
    bytes.push(HANDOFF);
    bytes.extend_from_slice(handoff);
    bytes.into()
}

/// Encodes a message about the run.
#[must_use]
pub fn encode(message: &SideMessage) -> Bytes {
    let mut bytes = vec![SIDE];
    // Serialising plain data into memory cannot fail; an empty body would be refused by the peer.
    bytes.extend(serde_json::to_vec(message).unwrap_or_default());
    bytes.into()
}

/// Parses what a peer sent.
pub fn parse(bytes: &Bytes) -> Result<Message, Failure> {
    let refuse = |what: String| {
        Failure::new(
            FailureKind::BadInput,
            format!("message of the peer: {what}"),
        )
    };
    match bytes.split_first() {
        Some((&HANDOFF, _)) => Ok(Message::Handoff(bytes.slice(1..))),
        Some((&SIDE, body)) => match serde_json::from_slice(body) {
            Ok(message) => Ok(Message::Side(Box::new(message))),
            Err(error) => Err(refuse(error.to_string())),
        },
        Some((other, _)) => Err(refuse(format!("unknown class {other}"))),
        None => Err(refuse("empty".to_owned())),
    }
}

impl RunPlan {
    /// What takes the sender's clock to the clock here. On one host both have the same; from another one,
    /// the time that this message took is not known and counts as nothing.
    #[must_use]
    pub fn clock_shift_us(&self) -> i64 {
        if self.boot_id == boot_id() {
            0
        } else {
            timeline::now_us().wrapping_sub(self.sent_at_us) as i64
        }
    }

    /// Checks what a peer wants this side to do: a peer can be wrong as well as a user.
    pub fn check(&self, context_tokens: u32) -> Result<(), Failure> {
        check_length(self.prompt_tokens, self.steps, context_tokens)?;
        for (field, value, limit) in [
            ("requests", self.requests, 1_000_000),
            ("concurrency", self.concurrency, 1_024),
            ("chunk", self.chunk, u32::MAX),
        ] {
            if value == 0 || value > limit {
                return Err(Failure::input(field, value, &format!("1 to {limit}")));
            }
        }
        if self.fault.is_some() && !cfg!(feature = "fault-injection") {
            return Err(Failure::new(
                FailureKind::BadInput,
                "prefill plants a fault, and this build cannot",
            )
            .with_field("fault", "fault-injection"));
        }
        if let Some(fed) = self
            .fed_ids
            .as_ref()
            .filter(|fed| fed.len() != self.steps as usize)
        {
            return Err(Failure::input(
                "fed ids",
                fed.len(),
                &format!("one per step, {}", self.steps),
            ));
        }
        if let Some(turns) = &self.conversations {
            check_turns(turns, self)?;
        }
        if !(0.0..=1.0).contains(&self.cancel_share) {
            return Err(Failure::input("cancel_share", self.cancel_share, "0 to 1"));
        }
        Ok(())
    }
}

/// The requests of conversations are their turns.
fn check_turns(turns: &TurnOptions, plan: &RunPlan) -> Result<(), Failure> {
    let requests = u64::from(turns.sessions) * u64::from(turns.turns);
    if requests != u64::from(plan.requests) {
        let expected = format!("{requests}, a request for each turn");
        return Err(Failure::input("requests", plan.requests, &expected));
    }
    if plan.steps != DECODED_TOKENS {
        let expected = format!("{DECODED_TOKENS}, the tokens of an answer");
        return Err(Failure::input("steps", plan.steps, &expected));
    }
    Ok(())
}

/// Prompt and output must fit into the context of the model.
pub fn check_length(tokens: u32, steps: u32, context_tokens: u32) -> Result<(), Failure> {
    let limit = i64::from(context_tokens) - i64::from(steps);
    if limit < 1 {
        return Err(Failure::input(
            "steps",
            steps,
            &format!(
                "at most {} (context {context_tokens} - 1)",
                i64::from(context_tokens) - 1
            ),
        ));
    }
    if tokens == 0 || i64::from(tokens) > limit {
        return Err(Failure::input(
            "tokens",
            tokens,
            &format!("1 to {limit} (context {context_tokens} - steps {steps})"),
        ));
    }
    Ok(())
}

/// This boot of this host.
#[must_use]
pub fn boot_id() -> String {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_classes_of_messages_are_told_apart_and_junk_is_refused() {
        assert!(matches!(parse(&wrap(b"xyz")), Ok(Message::Handoff(bytes)) if bytes == b"xyz"[..]));
        let finish = SideMessage::Finish {
            code: 1,
            text: "verdict".to_owned(),
        };
        assert!(
            matches!(parse(&encode(&finish)), Ok(Message::Side(message)) if *message == finish)
        );
        for junk in [&b""[..], b"\x02", b"\x02{}", b"\x07abc"] {
            assert!(parse(&Bytes::copy_from_slice(junk)).is_err());
        }
    }

    #[test]
    fn lengths_are_checked_at_both_ends() {
        assert!(check_length(1, 64, 65_536).is_ok());
        assert!(check_length(65_472, 64, 65_536).is_ok());
        assert_eq!(
            check_length(65_473, 64, 65_536)
                .unwrap_err()
                .field
                .as_deref(),
            Some("tokens")
        );
        assert!(check_length(0, 64, 65_536).is_err());
        assert_eq!(
            check_length(1, 65_536, 65_536)
                .unwrap_err()
                .field
                .as_deref(),
            Some("steps")
        );
        assert!(check_length(1, u32::MAX, 65_536).is_err());
    }
}
