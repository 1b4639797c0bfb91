//! The messages of a hand-off between the library's wire and the sessions of both sides.
//!
//! A message of another life of the peer, or one that the side cannot get at all, is refused here, so a
//! session sees only what it can answer.

use kvgate_kvcache::handoff::{Envelope, Identity, Message};
use kvgate_kvcache::{Attempt, BlockTable, CacheSchema, FieldDifference, PageId, Room};
use kvgate_transfer::{Epoch, Incarnation, WriterRank};

use super::failure::{Failure, FailureKind};

/// The only writer of a run.
pub const RANK: WriterRank = WriterRank(0);

/// A flight: a request, its attempt, and the receiver's number of it (0 where there is none yet).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlightId {
    /// From 0.
    pub request: u32,
    /// From 0; another one follows a given up one.
    pub attempt: u32,
    /// The receiver's number.
    pub epoch: u64,
}

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Submission {
    /// From 0.
    pub request: u32,
    /// From 0.
    pub attempt: u32,
    /// The prompt.
    pub prompt_ids: Vec<u32>,
    /// Tokens to decode.
    pub steps: u32,
}

/// Slots for a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The flight.
    pub id: FlightId,
    /// Tokens whose pages the receiver has ready and keeps: they do not cross.
    pub start_tokens: u32,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Ends of the segments.
    pub segment_ends: Vec<u32>,
    /// The receiver's slots.
    pub table: BlockTable,
}

/// From prefill to decode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromPrefill {
    /// First: the fields of its schema.
    Hello(Vec<(String, String)>),
    /// A request.
    Submit(Submission),
    /// The first token, drawn from the last logits of the prompt.
    Aux {
        /// The flight.
        id: FlightId,
        /// The token.
        first_token: u32,
    },
    /// The flight is given up; nothing more is posted.
    Abort {
        /// The flight.
        id: FlightId,
        /// Why.
        reason: String,
    },
    /// Everything posted for the flight is terminal.
    AbortAck {
        /// The flight.
        id: FlightId,
        /// Who says so.
        rank: WriterRank,
    },
}

/// From decode to prefill.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromDecode {
    /// The schemas are equal.
    Hello,
    /// They are not.
    HelloRefused(Failure),
    /// Slots.
    Offer(Offer),
    /// None.
    OfferRefused {
        /// The flight that there would have been.
        id: FlightId,
        /// Why.
        reason: String,
    },
    /// Every layer has landed and the first token is there.
    Done {
        /// The flight.
        id: FlightId,
    },
    /// The flight is given up.
    Abort {
        /// The flight.
        id: FlightId,
        /// Why.
        reason: String,
    },
}

/// Says things in the name of one life of a process.
#[derive(Clone, Copy, Debug)]
pub struct Speaker {
    /// This life.
    pub incarnation: Incarnation,
}

const NO_FLIGHT: FlightId = FlightId {
    request: 0,
    attempt: 0,
    epoch: 0,
};

impl Speaker {
    fn say(&self, id: FlightId, message: Message) -> Vec<u8> {
        let identity = Identity {
            incarnation: self.incarnation,
            room: Room(u64::from(id.request)),
            attempt: Attempt(id.attempt),
            epoch: Epoch(id.epoch),
        };
        Envelope { identity, message }.encode()
    }

    /// The schema of this side, which delivers or takes every layer.
    #[must_use]
    pub fn hello(&self, schema: &CacheSchema) -> Vec<u8> {
        let message = Message::Hello {
            fingerprint: schema.fingerprint(),
            fields: schema.fields(),
            writer: RANK,
            writer_count: 1,
            first_layer: 0,
            end_layer: schema.layer_count(),
        };
        self.say(NO_FLIGHT, message)
    }

    /// The peer's schema is another one.
    #[must_use]
    pub fn hello_refused(&self, difference: &FieldDifference) -> Vec<u8> {
        let FieldDifference {
            field,
            ours,
            theirs,
        } = difference.clone();
        self.say(
            NO_FLIGHT,
            Message::HelloRefused {
                field,
                ours,
                theirs,
            },
        )
    }

    /// A request.
    #[must_use]
    pub fn submit(&self, submission: Submission) -> Vec<u8> {
        let Submission {
            request,
            attempt,
            prompt_ids,
            steps,
        } = submission;
        let total_tokens = prompt_ids.len() as u32 + steps;
        self.say(
            FlightId {
                request,
                attempt,
                epoch: 0,
            },
            Message::Submit {
                total_tokens,
                steps,
                prompt: prompt_ids,
            },
        )
    }

    /// Slots for it, behind the pages that are there.
    #[must_use]
    pub fn offer(
        &self,
        id: FlightId,
        start_tokens: u32,
        prompt_tokens: u32,
        segment_ends: Vec<u32>,
        table: &BlockTable,
    ) -> Vec<u8> {
        let (pages, windows) = (table.pages().to_vec(), table.windows().to_vec());
        let request = table.request();
        let message = match start_tokens {
            0 => Message::Offer {
                prompt_tokens,
                segment_ends,
                pages,
                windows,
                request,
            },
            _ => Message::OfferBehind {
                start_tokens,
                prompt_tokens,
                segment_ends,
                pages,
                windows,
                request,
            },
        };
        self.say(id, message)
    }

    /// No slots for it.
    #[must_use]
    pub fn offer_refused(&self, id: FlightId, reason: &str) -> Vec<u8> {
        self.say(
            id,
            Message::OfferRefused {
                reason: reason.to_owned(),
            },
        )
    }

    /// The first token.
    #[must_use]
    pub fn aux(&self, id: FlightId, prompt_tokens: u32, first_token: u32) -> Vec<u8> {
        self.say(
            id,
            Message::Aux {
                prompt_tokens,
                first_token,
            },
        )
    }

    /// Everything is here.
    #[must_use]
    pub fn done(&self, id: FlightId) -> Vec<u8> {
        self.say(id, Message::Done)
    }

    /// The flight is given up.
    #[must_use]
    pub fn abort(&self, id: FlightId, reason: &str) -> Vec<u8> {
        self.say(
            id,
            Message::Abort {
                cause: reason.to_owned(),
            },
        )
    }

    /// Nothing of the flight is under way.
    #[must_use]
    pub fn abort_ack(&self, id: FlightId) -> Vec<u8> {
        self.say(id, Message::AbortAck { writer: RANK })
    }
}

/// Opens an envelope; `None` for a message of another life of the peer, which has no effect.
fn open(bytes: &[u8], peer: Incarnation) -> Result<Option<(FlightId, Message)>, Failure> {
    let envelope = Envelope::decode(bytes).map_err(|error| {
        Failure::new(
            FailureKind::BadInput,
            format!("message of the peer: {error}"),
        )
        .with_field("protocol", &error)
    })?;
    let Identity {
        incarnation,
        room,
        attempt,
        epoch,
    } = envelope.identity;
    if incarnation != peer {
        tracing::warn!(
            message = envelope.message.name(),
            "a message of another life of the peer was dropped"
        );
        return Ok(None);
    }
    let request = u32::try_from(room.0).map_err(|_| {
        Failure::new(
            FailureKind::BadInput,
            format!("message of the peer: request {room} is none of a run"),
        )
    })?;
    Ok(Some((
        FlightId {
            request,
            attempt: attempt.0,
            epoch: epoch.0,
        },
        envelope.message,
    )))
}

fn out_of_turn(message: &Message) -> Failure {
    Failure::new(
        FailureKind::BadInput,
        format!(
            "message of the peer: {} is not for this side",
            message.name()
        ),
    )
}

/// What a decode side can be told.
pub fn from_prefill(bytes: &[u8], peer: Incarnation) -> Result<Option<FromPrefill>, Failure> {
    let Some((id, message)) = open(bytes, peer)? else {
        return Ok(None);
    };
    Ok(Some(match message {
        Message::Hello { fields, .. } => FromPrefill::Hello(fields),
        Message::Submit { steps, prompt, .. } => {
            let FlightId {
                request, attempt, ..
            } = id;
            FromPrefill::Submit(Submission {
                request,
                attempt,
                prompt_ids: prompt,
                steps,
            })
        }
        Message::Aux { first_token, .. } => FromPrefill::Aux { id, first_token },
        Message::Abort { cause } => FromPrefill::Abort { id, reason: cause },
        Message::AbortAck { writer } => FromPrefill::AbortAck { id, rank: writer },
        other => return Err(out_of_turn(&other)),
    }))
}

/// What a prefill side can be told.
pub fn from_decode(
    bytes: &[u8],
    peer: Incarnation,
    schema: &CacheSchema,
    steps: u32,
) -> Result<Option<FromDecode>, Failure> {
    let Some((id, message)) = open(bytes, peer)? else {
        return Ok(None);
    };
    Ok(Some(match message {
        Message::Hello { fields, .. } => match schema.first_difference(&fields) {
            None => FromDecode::Hello,
            Some(difference) => FromDecode::HelloRefused(mismatch(&difference)),
        },
        // The peer's view: what is theirs there is ours here.
        Message::HelloRefused {
            field,
            ours,
            theirs,
        } => FromDecode::HelloRefused(mismatch(&FieldDifference {
            field,
            ours: theirs,
            theirs: ours,
        })),
        Message::Offer {
            prompt_tokens,
            segment_ends,
            pages,
            windows,
            request,
        } => {
            let tokens = prompt_tokens.saturating_add(steps);
            FromDecode::Offer(Offer {
                id,
                start_tokens: 0,
                prompt_tokens,
                segment_ends,
                table: offered_table(schema, tokens, pages, windows, request),
            })
        }
        Message::OfferBehind {
            start_tokens,
            prompt_tokens,
            segment_ends,
            pages,
            windows,
            request,
        } => {
            let tokens = prompt_tokens.saturating_add(steps);
            FromDecode::Offer(Offer {
                id,
                start_tokens,
                prompt_tokens,
                segment_ends,
                table: offered_table(schema, tokens, pages, windows, request),
            })
        }
        Message::OfferRefused { reason } => FromDecode::OfferRefused { id, reason },
        Message::Done => FromDecode::Done { id },
        Message::Abort { cause } => FromDecode::Abort { id, reason: cause },
        other => return Err(out_of_turn(&other)),
    }))
}

/// The plan checks the slots against the schema before anything is posted to them.
fn offered_table(
    schema: &CacheSchema,
    tokens: u32,
    pages: Vec<PageId>,
    windows: Vec<PageId>,
    request: PageId,
) -> BlockTable {
    BlockTable::new(schema, tokens, pages, windows, request)
}

/// Two sides that have other bytes in mind.
#[must_use]
pub fn mismatch(
    FieldDifference {
        field,
        ours,
        theirs,
    }: &FieldDifference,
) -> Failure {
    Failure::new(
        FailureKind::SchemaMismatch,
        format!("schema mismatch: {field} is {ours} here and {theirs} at the peer"),
    )
    .with_field(field, theirs)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPEAKER: Speaker = Speaker {
        incarnation: Incarnation(7),
    };
    const ID: FlightId = FlightId {
        request: 3,
        attempt: 1,
        epoch: 9,
    };

    #[test]
    fn what_is_said_is_heard_by_the_right_side() {
        let submission = Submission {
            request: 3,
            attempt: 1,
            prompt_ids: vec![5, 6],
            steps: 2,
        };
        let heard = from_prefill(&SPEAKER.submit(submission.clone()), SPEAKER.incarnation).unwrap();
        assert_eq!(heard, Some(FromPrefill::Submit(submission)));
        let heard = from_prefill(&SPEAKER.aux(ID, 2, 77), SPEAKER.incarnation).unwrap();
        assert_eq!(
            heard,
            Some(FromPrefill::Aux {
                id: ID,
                first_token: 77
            })
        );
        assert!(from_prefill(&SPEAKER.done(ID), SPEAKER.incarnation).is_err());
    }

    #[test]
    fn an_offer_says_what_need_not_cross() {
        let config = kvgate_model::Config::tiny_v4();
        let options = crate::handoff::options::tests::host();
        let schema = crate::handoff::model::schema(&config, &options, [0; 32]).unwrap();
        let page = |index| PageId {
            index,
            generation: 4,
        };
        let table = BlockTable::new(
            &schema,
            520,
            vec![page(1), page(2), page(3)],
            vec![page(1); 3],
            page(1),
        );
        for start_tokens in [0, 256, 512] {
            let bytes = SPEAKER.offer(ID, start_tokens, 512, vec![512], &table);
            let heard = from_decode(&bytes, SPEAKER.incarnation, &schema, 8).unwrap();
            let Some(FromDecode::Offer(offer)) = heard else {
                panic!("{heard:?}");
            };
            assert_eq!((offer.start_tokens, offer.id), (start_tokens, ID));
            assert_eq!(offer.table.pages(), table.pages());
            // Of another life of the receiver it is no offer.
            let stale = from_decode(&bytes, Incarnation(8), &schema, 8).unwrap();
            assert_eq!(stale, None);
        }
    }

    #[test]
    fn another_life_of_the_peer_has_no_effect_and_junk_is_an_error() {
        assert_eq!(
            from_prefill(&SPEAKER.abort_ack(ID), Incarnation(8)).unwrap(),
            None
        );
        let mut bytes = SPEAKER.abort_ack(ID);
        if let Some(last) = bytes.last_mut() {
            *last ^= 1;
        }
        assert_eq!(
            from_prefill(&bytes, SPEAKER.incarnation)
                .unwrap_err()
                .exit_code(),
            2
        );
    }
}
