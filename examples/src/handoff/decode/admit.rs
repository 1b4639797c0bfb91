//! From Submit to Offer: slots for a request, its barrier armed, and only then the peer is told where to
//! write.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, mpsc};

use kvgate_kvcache::canary::ProvenanceTable;
use kvgate_kvcache::{Room, TransferPlan, WriterLayers};
use kvgate_transfer::ArrivalSink;

use super::detector::Detector;
use super::flight::{Flight, LandingSink};
use super::prefixes::Reserved;
use super::session::{Peer, Session};
use super::worker::{self, Task};
use crate::handoff::cancel::CancelMoment;
use crate::handoff::failure::Failure;
use crate::handoff::model::cache_failure;
use crate::handoff::options::Verify;
use crate::handoff::protocol::{FlightId, RANK, Submission};

/// Tokens of a logical page: segments end on its multiples.
const PAGE_TOKENS: u32 = 256;
/// More segments than this overlap no better and cost messages.
const SEGMENTS_WANTED: u32 = 16;

impl Session {
    /// Offers slots to requests that wait, in their order, as long as there are slots.
    pub(super) fn admit_waiting(&mut self) -> Result<(), Failure> {
        while let Some(submission) = self.waiting.front() {
            let tokens = submission.prompt_ids.len() as u32 + self.steps();
            let room = Room(u64::from(submission.request));
            let prompt = &submission.prompt_ids;
            let reserved = match self.keeps_prefixes() {
                true => self.side.prefixes.reserve(prompt, tokens, room),
                false => self.side.pools.reserve(tokens, room).map(|lease| Reserved {
                    lease,
                    start_tokens: 0,
                }),
            };
            match reserved {
                Ok(reserved) => {
                    if let Some(submission) = self.waiting.pop_front() {
                        self.admit(&submission, reserved)?;
                    }
                }
                Err(error) if error.is_retryable() => return Ok(()),
                Err(error) => {
                    let failure = cache_failure(&error);
                    let id = FlightId {
                        request: submission.request,
                        attempt: submission.attempt,
                        epoch: 0,
                    };
                    self.tell(&self.speaker.offer_refused(id, &failure.message))?;
                    return Err(failure);
                }
            }
        }
        Ok(())
    }

    fn admit(&mut self, submission: &Submission, reserved: Reserved) -> Result<(), Failure> {
        let keeps_prefixes = self.keeps_prefixes();
        let Reserved {
            lease,
            start_tokens,
        } = reserved;
        let Some(Peer {
            id,
            watch,
            plan,
            moments,
            fault,
            ..
        }) = &self.peer
        else {
            return Err(Failure::internal("a request without a peer"));
        };
        let schema = &self.side.host.schema;
        let prompt_tokens = submission.prompt_ids.len() as u32;
        let segment_ends = segment_ends(start_tokens, prompt_tokens);
        let writers = vec![WriterLayers {
            rank: RANK,
            layers: 0..schema.layer_count(),
        }];
        let transfer = TransferPlan::compile_from(
            Arc::clone(schema),
            start_tokens,
            prompt_tokens,
            segment_ends.clone(),
            writers,
        )
        .map_err(|error| cache_failure(&error))?;
        let epoch = lease.number();
        let id_of_flight = FlightId {
            request: submission.request,
            attempt: submission.attempt,
            epoch: epoch.0,
        };
        let offer = self.speaker.offer(
            id_of_flight,
            start_tokens,
            prompt_tokens,
            segment_ends,
            lease.block_table(),
        );
        let planted = fault
            .as_ref()
            .and_then(|fault| fault.place_in(submission.request, schema, lease.block_table()));
        let reader = fault
            .as_ref()
            .map(|fault| fault.reader(submission.request, &transfer))
            .unwrap_or_default();
        let mut in_flight = lease
            .into_inflight(&transfer, epoch, &[(*id, RANK)])
            .map_err(|refused| cache_failure(&refused.1))?;
        let provenance = (self.side.options.verify != Verify::Off)
            .then(|| Arc::new(ProvenanceTable::new(Room(u64::from(submission.request)))));
        if let Some(table) = &provenance {
            let (blocks, room) = (in_flight.block_table(), in_flight.room());
            let prefixes = &self.side.prefixes;
            prefixes.recall(start_tokens, blocks, table, room, *id);
        }
        let sink = LandingSink {
            side: Arc::clone(&self.side),
            is_kept: keeps_prefixes,
            request: submission.request,
            plan: transfer,
            next: provenance
                .clone()
                .map(|table| table as Arc<dyn ArrivalSink>),
        };
        in_flight
            .arm(&self.side.agent, Some(Arc::new(sink)))
            .map_err(|error| cache_failure(&error))?;
        if keeps_prefixes {
            let prefixes = &self.side.prefixes;
            prefixes.count(start_tokens);
            prefixes
                .expect(&submission.prompt_ids, &in_flight)
                .map_err(|error| cache_failure(&error))?;
        }
        let moment = moments.get(submission.request as usize).copied().flatten();
        let (first_token, from_aux) = mpsc::channel();
        let stop = Arc::new(AtomicBool::new(false));
        let task = Task {
            request: submission.request,
            flight: epoch.0,
            prompt_tokens,
            steps: plan.steps,
            fed_ids: plan.fed_ids.clone(),
            lease: in_flight.lease().map_err(|error| cache_failure(&error))?,
            append: in_flight
                .append_lease()
                .map_err(|error| cache_failure(&error))?,
            detector: provenance
                .map(|table| Detector::new(table, self.side.options.verify, submission.request)),
            first_token: from_aux,
            stop: Arc::clone(&stop),
            moment: moment.filter(is_ours),
            watch: watch.clone(),
            reader,
        };
        worker::start(Arc::clone(&self.side), task, self.inbox.clone())?;
        self.held_by_workers.insert(epoch.0);
        self.tell(&offer)?;
        if planted.is_some() {
            self.planted = planted;
        }
        let flight = Flight::new(id_of_flight, in_flight, first_token, stop);
        self.flights.insert(epoch.0, flight);
        Ok(())
    }

    /// Pages of prompts are kept where later prompts begin with them.
    pub(super) fn keeps_prefixes(&self) -> bool {
        let peer = self.peer.as_ref();
        peer.is_some_and(|peer| peer.plan.conversations.is_some())
    }

    fn steps(&self) -> u32 {
        self.peer.as_ref().map_or(0, |peer| peer.plan.steps)
    }
}

/// Moments at which the decode side is the one that gives up.
fn is_ours(moment: &CancelMoment) -> bool {
    matches!(
        moment,
        CancelMoment::AfterLanding | CancelMoment::MidDecode { .. }
    )
}

/// Ends of the segments of a prompt behind what does not cross: whole pages, not too many.
fn segment_ends(start_tokens: u32, prompt_tokens: u32) -> Vec<u32> {
    let pages = (prompt_tokens - start_tokens).div_ceil(PAGE_TOKENS).max(1);
    let step = pages.div_ceil(SEGMENTS_WANTED) * PAGE_TOKENS;
    let mut ends: Vec<u32> = (1..)
        .map(|count| start_tokens + count * step)
        .take_while(|end| *end < prompt_tokens)
        .collect();
    ends.push(prompt_tokens);
    ends
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_whole_pages_and_end_with_the_prompt() {
        assert_eq!(segment_ends(0, 1), [1]);
        assert_eq!(segment_ends(0, 256), [256]);
        assert_eq!(segment_ends(0, 257), [256, 257]);
        assert_eq!(segment_ends(0, 2_147).len(), 9);
        assert_eq!(segment_ends(512, 1_000), [768, 1_000]);
        // Only the window and the states are left.
        assert_eq!(segment_ends(512, 512), [512]);
        let long = segment_ends(0, 9_800);
        assert!(long.len() <= 16 && long.last() == Some(&9_800), "{long:?}");
        assert!(
            long.iter().rev().skip(1).all(|end| end % 256 == 0),
            "{long:?}"
        );
    }
}
