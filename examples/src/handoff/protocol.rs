//! What the two sides say to each other about one request.

use kvgate_kvcache::{BlockTable, CacheSchema, FieldDifference, PageId};
use kvgate_transfer::WriterRank;
use serde::{Deserialize, Serialize};

use super::failure::{Failure, FailureKind};

/// The only writer of a run.
pub const RANK: WriterRank = WriterRank(0);

/// The schema of a side.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Hello {
    /// Canonical fields.
    pub fields: Vec<(String, String)>,
}

/// A request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Submission {
    /// From 0.
    pub request: u32,
    /// From 0; another one follows a given up one.
    pub attempt: u32,
    /// The prompt.
    pub prompt_ids: Vec<u32>,
}

/// Slots for a request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Offer {
    /// From 0.
    pub request: u32,
    /// That of the submission.
    pub attempt: u32,
    /// The flight.
    pub epoch: u64,
    /// Tokens that are handed over.
    pub prompt_tokens: u32,
    /// Tokens that the slots are for.
    pub total_tokens: u32,
    /// Ends of the segments.
    pub segment_ends: Vec<u32>,
    pages: Vec<(u32, u32)>,
    windows: Vec<(u32, u32)>,
    request_slot: (u32, u32),
}

/// From prefill to decode.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum FromPrefill {
    /// First.
    Hello(Hello),
    /// A request.
    Submit(Submission),
    /// The first token.
    Aux {
        /// The flight.
        epoch: u64,
        /// Drawn from the last logits of the prompt.
        first_token: u32,
    },
    /// The request is given up; nothing more is posted.
    Abort {
        /// From 0.
        request: u32,
        /// The flight, once there is one.
        epoch: Option<u64>,
        /// Why.
        reason: String,
    },
    /// Everything posted for the flight is terminal.
    AbortAck {
        /// The flight.
        epoch: u64,
        /// Who says so.
        rank: u16,
    },
}

/// From decode to prefill.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum FromDecode {
    /// The schemas are equal.
    Hello(Hello),
    /// They are not.
    HelloRefused(Failure),
    /// Slots.
    Offer(Offer),
    /// None.
    OfferRefused {
        /// From 0.
        request: u32,
        /// Why.
        reason: String,
    },
    /// The request is decoded to its end.
    Done {
        /// From 0.
        request: u32,
    },
    /// The request is given up.
    Abort {
        /// From 0.
        request: u32,
        /// Why.
        reason: String,
    },
}

impl Offer {
    /// An offer of the slots of `table`.
    #[must_use]
    pub fn new(
        submission: &Submission,
        epoch: u64,
        segment_ends: Vec<u32>,
        table: &BlockTable,
    ) -> Self {
        let pair = |id: PageId| (id.index, id.generation);
        Self {
            request: submission.request,
            attempt: submission.attempt,
            epoch,
            prompt_tokens: submission.prompt_ids.len() as u32,
            total_tokens: table.tokens(),
            segment_ends,
            pages: table.pages().iter().copied().map(pair).collect(),
            windows: table.windows().iter().copied().map(pair).collect(),
            request_slot: pair(table.request()),
        }
    }

    /// The slots.
    #[must_use]
    pub fn table(&self, schema: &CacheSchema) -> BlockTable {
        let id = |(index, generation): (u32, u32)| PageId { index, generation };
        let ids = |pairs: &[(u32, u32)]| pairs.iter().copied().map(id).collect();
        BlockTable::new(
            schema,
            self.total_tokens,
            ids(&self.pages),
            ids(&self.windows),
            id(self.request_slot),
        )
    }
}

impl Hello {
    /// The hello of a side.
    #[must_use]
    pub fn of(schema: &CacheSchema) -> Self {
        Self {
            fields: schema.fields(),
        }
    }

    /// Compares the peer's schema with ours.
    pub fn check(&self, schema: &CacheSchema) -> Result<(), Failure> {
        schema
            .first_difference(&self.fields)
            .map_or(Ok(()), |difference| Err(mismatch(&difference)))
    }
}

fn mismatch(
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

/// Encodes a message.
#[must_use]
pub fn encode<T: Serialize>(message: &T) -> Vec<u8> {
    // Plain data into memory; an empty message would be refused.
    serde_json::to_vec(message).unwrap_or_default()
}

/// Parses a message.
pub fn parse<T: serde::de::DeserializeOwned>(bytes: &[u8]) -> Result<T, Failure> {
    serde_json::from_slice(bytes).map_err(|error| {
        Failure::new(
            FailureKind::BadInput,
            format!("message of the peer: {error}"),
        )
    })
}
