//! What is posted when: the segments of a layer, as soon as they are written.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kvgate_kvcache::canary::VerifyMode;
use kvgate_kvcache::{
    BlockTable, KvPost, LayerId, PostTarget, Room, TransferPlan, WriterLayers, WrittenLayer,
};
use kvgate_transfer::{
    Epoch, ErrorKind, FlightLedger, Incarnation, Op, PoolId, PostOptions, PreparedTransfer,
    SourceReady,
};

use super::Side;
use super::flight::Flight;
use crate::handoff::cancel::CancelMoment;
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::link::{self, transfer_failure};
use crate::handoff::model::cache_failure;
use crate::handoff::observer::Phase;
use crate::handoff::plan::{Moment, RowBytes};
use crate::handoff::protocol;
use crate::handoff::timeline;

/// How far a call came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Posted {
    /// Everything that was ready.
    All,
    /// The flight is given up.
    Aborted,
    /// The moment is there at which this side gives the flight up.
    ReachedItsMoment,
}

/// Posts the segments of one flight.
pub(super) struct Outbox {
    side: Arc<Side>,
    flight: Arc<Flight>,
    plan: TransferPlan,
    peer_incarnation: Incarnation,
    peer_pools: Vec<PoolId>,
    table: BlockTable,
    /// Next segment of each layer.
    next_segment: Vec<u16>,
    posted_count: u32,
    /// After so many posts the flight is given up.
    give_up_at: Option<u32>,
}

impl Outbox {
    pub(super) fn new(side: &Arc<Side>, flight: &Arc<Flight>) -> Result<Self, Failure> {
        let schema = &side.host.schema;
        let offer = &flight.offer;
        let layer_count = schema.layer_count();
        let writers = vec![WriterLayers {
            rank: protocol::RANK,
            layers: 0..layer_count,
        }];
        let plan = TransferPlan::compile(
            Arc::clone(schema),
            offer.prompt_tokens,
            offer.segment_ends.clone(),
            writers,
        )
        .map_err(|error| cache_failure(&error))?;
        let peer = side
            .agent
            .peer(side.watch.peer())
            .ok_or_else(|| Failure::new(FailureKind::PeerLost, "decode was lost"))?;
        let total = u32::from(layer_count) * offer.segment_ends.len() as u32;
        let give_up_at = match side.moments.get(flight.request as usize).copied().flatten() {
            Some(CancelMoment::MidSend { permille }) => Some((total * permille / 1_000).max(1)),
            _ => None,
        };
        Ok(Self {
            side: Arc::clone(side),
            flight: Arc::clone(flight),
            plan,
            peer_incarnation: peer.incarnation,
            peer_pools: peer.pools.iter().map(|remote| remote.pool).collect(),
            table: offer.table(schema),
            next_segment: vec![0; usize::from(layer_count)],
            posted_count: 0,
            give_up_at,
        })
    }

    /// Posts every segment of `layer` that ends within what is written.
    pub(super) fn send(
        &mut self,
        layer: LayerId,
        written: &WrittenLayer,
        ledger: &Arc<FlightLedger>,
    ) -> Result<Posted, Failure> {
        let segments = self.flight.offer.segment_ends.clone();
        loop {
            let Some(next) = self.next_segment.get_mut(usize::from(layer.0)) else {
                return Err(Failure::internal(format!("layer {layer} has no plan")));
            };
            let is_written = segments
                .get(usize::from(*next))
                .is_some_and(|end| *end <= written.tokens().end);
            if !is_written {
                return Ok(Posted::All);
            }
            let segment = *next;
            *next += 1;
            let is_last = usize::from(*next) == segments.len();
            if self.flight.is_aborted() {
                return Ok(Posted::Aborted);
            }
            let target = PostTarget {
                incarnation: self.peer_incarnation,
                pools: &self.peer_pools,
                table: &self.table,
                epoch: Epoch(self.flight.offer.epoch),
                room: Room(u64::from(self.flight.request)),
                verify: VerifyMode::Canary,
            };
            let post = self
                .plan
                .post(&self.side.pools, u32::from(segment), written, &target)
                .map_err(|error| cache_failure(&error))?;
            if !post.is_empty()
                && self.post(layer, segment, is_last, post, ledger)? == Posted::Aborted
            {
                return Ok(Posted::Aborted);
            }
            self.posted_count += 1;
            if self.give_up_at == Some(self.posted_count) {
                return Ok(Posted::ReachedItsMoment);
            }
        }
    }

    fn post(
        &mut self,
        layer: LayerId,
        segment: u16,
        is_last: bool,
        post: KvPost,
        ledger: &Arc<FlightLedger>,
    ) -> Result<Posted, Failure> {
        self.side.markers.enter(Phase::Transfer);
        self.count(layer, segment, &post);
        let (local, remote) = post.descriptors();
        let prepared = self
            .side
            .agent
            .prepare(Op::Write, &local, &remote, self.side.watch.peer())
            .map_err(|error| transfer_failure(&error))?;
        let options = PostOptions {
            arrival: Some(post.arrival),
            keepalive: Some(Box::new(post.keepalive)),
            ledger: Some(Arc::clone(ledger)),
            ..PostOptions::default()
        };
        match self
            .side
            .plan
            .hold
            .filter(|hold| hold.layer == layer.0 && is_last)
        {
            None => post_now(&self.side, &self.flight, &prepared, post.source, options),
            Some(hold) => {
                let (side, flight) = (Arc::clone(&self.side), Arc::clone(&self.flight));
                let delay = Duration::from_millis(hold.delay_ms);
                let body = move || {
                    thread::sleep(delay);
                    if let Err(failure) = post_now(&side, &flight, &prepared, post.source, options)
                    {
                        tracing::error!(%failure, "a held post failed");
                    }
                };
                thread::Builder::new()
                    .name("hold".to_owned())
                    .spawn(body)
                    .map_err(|error| {
                        Failure::internal(format!("cannot start a thread: {error}"))
                    })?;
                Ok(Posted::All)
            }
        }
    }

    fn count(&self, layer: LayerId, segment: u16, post: &KvPost) {
        let moment = Moment {
            request: self.flight.request,
            layer: layer.0,
            segment,
            at_us: timeline::now_us(),
        };
        self.side.note(|summary| {
            summary.transfers += 1;
            summary.row_bytes += post.row_bytes();
            summary.posts.push(moment);
            for page_move in &post.moves {
                let Some(row) = self.side.host.schema.rows().get(page_move.pool.index()) else {
                    continue;
                };
                let component = row.component.id();
                let known = summary
                    .bytes
                    .iter_mut()
                    .find(|row| row.layer == layer.0 && row.component == component);
                match known {
                    Some(row) => row.bytes += page_move.bytes,
                    None => summary.bytes.push(RowBytes {
                        layer: layer.0,
                        component: component.to_owned(),
                        bytes: page_move.bytes,
                    }),
                }
            }
        });
    }
}

/// Posts, and waits while the queue towards the peer is full.
fn post_now(
    side: &Side,
    flight: &Flight,
    prepared: &PreparedTransfer,
    mut source: SourceReady,
    mut options: PostOptions,
) -> Result<Posted, Failure> {
    let since = Instant::now();
    loop {
        match side
            .agent
            .post_within(prepared, source, options, link::slice())
        {
            Ok(handle) => {
                flight.posted(handle);
                return Ok(Posted::All);
            }
            Err(refused) => match refused.error.kind() {
                ErrorKind::QueueFull { .. } => {
                    side.watch.check(since, "a full queue")?;
                    (source, options) = (refused.source, refused.options);
                }
                ErrorKind::FlightClosed { .. } => return Ok(Posted::Aborted),
                _ => return Err(transfer_failure(&refused.error)),
            },
        }
    }
}
