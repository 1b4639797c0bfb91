//! What is posted when: the segments of a layer, as soon as they are written.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kvgate_kvcache::canary::VerifyMode;
use kvgate_kvcache::{KvPost, LayerId, PostTarget, Room, TransferPlan, WriterLayers, WrittenLayer};
use kvgate_transfer::{
    DescriptorList, Epoch, ErrorKind, FlightLedger, Incarnation, Op, PoolId, PostOptions,
    SourceReady, TransferHandle,
};

use super::Side;
use super::flight::Flight;
use super::planter::{Context, Intercepted};
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
    courier: Courier,
    plan: TransferPlan,
    /// Next segment of each layer.
    next_segment: Vec<u16>,
    posted_count: u32,
    /// After so many posts the flight is given up.
    give_up_at: Option<u32>,
}

/// Takes posts of one flight to the agent.
#[derive(Clone)]
pub(super) struct Courier {
    side: Arc<Side>,
    flight: Arc<Flight>,
    ledger: Arc<FlightLedger>,
    peer_incarnation: Incarnation,
    peer_pools: Vec<PoolId>,
}

impl Outbox {
    pub(super) fn new(
        side: &Arc<Side>,
        flight: &Arc<Flight>,
        ledger: &Arc<FlightLedger>,
    ) -> Result<Self, Failure> {
        let schema = &side.host.schema;
        let offer = &flight.offer;
        let layer_count = schema.layer_count();
        let writers = vec![WriterLayers {
            rank: protocol::RANK,
            layers: 0..layer_count,
        }];
        let plan = TransferPlan::compile_from(
            Arc::clone(schema),
            offer.start_tokens,
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
        let give_up_at = match side
            .moments
            .get(flight.request() as usize)
            .copied()
            .flatten()
        {
            Some(CancelMoment::MidSend { permille }) => Some((total * permille / 1_000).max(1)),
            _ => None,
        };
        let courier = Courier {
            side: Arc::clone(side),
            flight: Arc::clone(flight),
            ledger: Arc::clone(ledger),
            peer_incarnation: peer.incarnation,
            peer_pools: peer.pools.iter().map(|remote| remote.pool).collect(),
        };
        Ok(Self {
            courier,
            plan,
            next_segment: vec![0; usize::from(layer_count)],
            posted_count: 0,
            give_up_at,
        })
    }

    /// What is posted from now on is of other slots; what was posted stands.
    pub(super) fn post_from(&mut self, ledger: &Arc<FlightLedger>) {
        self.courier.ledger = Arc::clone(ledger);
    }

    /// Posts every segment of `layer` that ends within what is written.
    pub(super) fn send(
        &mut self,
        layer: LayerId,
        written: &WrittenLayer,
    ) -> Result<Posted, Failure> {
        loop {
            let Some(next) = self.next_segment.get_mut(usize::from(layer.0)) else {
                return Err(Failure::internal(format!("layer {layer} has no plan")));
            };
            let ends = &self.courier.flight.offer.segment_ends;
            let is_written = ends
                .get(usize::from(*next))
                .is_some_and(|end| *end <= written.tokens().end);
            if !is_written {
                return Ok(Posted::All);
            }
            let segment = *next;
            *next += 1;
            let is_last = usize::from(*next) == ends.len();
            if self.courier.flight.is_aborted() {
                return Ok(Posted::Aborted);
            }
            match self.post(layer, segment, is_last, written)? {
                Posted::All => {}
                other => return Ok(other),
            }
            self.posted_count += 1;
            if self.give_up_at == Some(self.posted_count) {
                return Ok(Posted::ReachedItsMoment);
            }
        }
    }

    fn post(
        &self,
        layer: LayerId,
        segment: u16,
        is_last: bool,
        written: &WrittenLayer,
    ) -> Result<Posted, Failure> {
        let Courier { side, flight, .. } = &self.courier;
        let target = PostTarget {
            incarnation: self.courier.peer_incarnation,
            pools: &self.courier.peer_pools,
            table: &flight.offer.table,
            epoch: Epoch(flight.offer.id.epoch),
            room: Room(u64::from(flight.request())),
            verify: VerifyMode::Canary,
        };
        let post = self
            .plan
            .post(&side.pools, u32::from(segment), written, &target)
            .map_err(|error| cache_failure(&error))?;
        if post.is_empty() {
            return Ok(Posted::All);
        }
        side.markers.enter(Phase::Transfer);
        self.courier.count(layer, segment, &post);
        let context = Context {
            courier: &self.courier,
            plan: &self.plan,
            table: &flight.offer.table,
            layer,
            is_last_segment: is_last,
            written,
        };
        let post = match side.planter.intercept(&context, post)? {
            Intercepted::Post(post) => post,
            Intercepted::Handled => return Ok(Posted::All),
            Intercepted::GiveUp => return Ok(Posted::ReachedItsMoment),
        };
        match side
            .plan
            .hold
            .filter(|hold| hold.layer == layer.0 && is_last)
        {
            None => self.courier.send(post),
            Some(hold) => {
                let courier = self.courier.clone();
                let body = move || {
                    thread::sleep(Duration::from_millis(hold.delay_ms));
                    if let Err(failure) = courier.send(post) {
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
}

impl Courier {
    /// Posts, and watches over the operation with the others of the flight.
    fn send(&self, post: KvPost) -> Result<Posted, Failure> {
        Ok(match self.post(post)? {
            Some(handle) => {
                self.flight.posted(handle);
                Posted::All
            }
            None => Posted::Aborted,
        })
    }

    /// Posts; `None` when the flight takes no more.
    pub(super) fn post(&self, post: KvPost) -> Result<Option<TransferHandle>, Failure> {
        let (local, remote) = post.descriptors();
        #[allow(
            clippy::needless_update,
            reason = "the feature fault-injection adds a field"
        )]
        let options = PostOptions {
            arrival: Some(post.arrival),
            keepalive: Some(Box::new(post.keepalive)),
            ledger: Some(Arc::clone(&self.ledger)),
            ..PostOptions::default()
        };
        self.post_lists(&local, &remote, post.source, options)
    }

    fn post_lists(
        &self,
        local: &DescriptorList,
        remote: &DescriptorList,
        mut source: SourceReady,
        mut options: PostOptions,
    ) -> Result<Option<TransferHandle>, Failure> {
        let Side { agent, watch, .. } = &*self.side;
        let prepared = agent
            .prepare(Op::Write, local, remote, watch.peer())
            .map_err(|error| transfer_failure(&error))?;
        let since = Instant::now();
        loop {
            match agent.post_within(&prepared, source, options, link::slice()) {
                Ok(handle) => return Ok(Some(handle)),
                Err(refused) => match refused.error.kind() {
                    ErrorKind::QueueFull { .. } => {
                        watch.check(since, "a full queue")?;
                        (source, options) = (refused.source, refused.options);
                    }
                    ErrorKind::FlightClosed { .. } => return Ok(None),
                    _ => return Err(transfer_failure(&refused.error)),
                },
            }
        }
    }

    fn count(&self, layer: LayerId, segment: u16, post: &KvPost) {
        let moment = Moment {
            request: self.flight.request(),
            layer: layer.0,
            segment,
            at_us: timeline::now_us(),
        };
        self.side.note(|summary| {
            summary.transfers += 1;
            summary.row_bytes += post.row_bytes();
            summary.posts.push(moment);
            for moved in &post.moves {
                let Some(row) = self.side.host.schema.rows().get(moved.pool.index()) else {
                    continue;
                };
                let component = row.component.id();
                let known = summary
                    .bytes
                    .iter_mut()
                    .find(|row| row.layer == layer.0 && row.component == component);
                match known {
                    Some(row) => row.bytes += moved.bytes,
                    None => summary.bytes.push(RowBytes {
                        layer: layer.0,
                        component: component.to_owned(),
                        bytes: moved.bytes,
                    }),
                }
            }
        });
    }
}

/// What only a planted fault does: pages without their witness, arrivals without their bytes.
#[cfg(feature = "fault-injection")]
mod faults {
    use kvgate_kvcache::{PageMove, SourceLease};
    use kvgate_transfer::fault::HoldGate;
    use kvgate_transfer::{Arrival, Visibility};

    use super::*;

    impl Courier {
        pub(crate) fn side(&self) -> &Side {
            &self.side
        }

        pub(crate) fn flight(&self) -> &Flight {
            &self.flight
        }

        /// Writes pages, with or without saying so, and perhaps not before a gate opens.
        pub(crate) fn post_pages(
            &self,
            moves: &[PageMove],
            arrival: Option<Arrival>,
            keepalive: SourceLease,
            hold: Option<Arc<HoldGate>>,
        ) -> Result<Option<TransferHandle>, Failure> {
            let mut local = DescriptorList::new();
            let mut remote = DescriptorList::remote(self.peer_incarnation);
            for moved in moves {
                let here = self.side.pools.pool_id(moved.pool);
                let there = self.peer_pools.get(moved.pool.index());
                let (Some(here), Some(there)) = (here, there) else {
                    return Err(Failure::internal(
                        "a planted fault names a pool that is not registered",
                    ));
                };
                local.push(here, &moved.from);
                remote.push(*there, &moved.to);
            }
            let options = PostOptions {
                arrival,
                keepalive: Some(Box::new(keepalive)),
                ledger: Some(Arc::clone(&self.ledger)),
                hold,
                ..PostOptions::default()
            };
            self.post_lists(&local, &remote, SourceReady::host_written(), options)
        }

        /// Says that something has arrived.
        pub(crate) fn forge(&self, arrival: Arrival, level: Visibility) -> Result<(), Failure> {
            self.side
                .agent
                .forge_arrival(self.side.watch.peer(), arrival, level)
                .map_err(|error| transfer_failure(&error))
        }
    }
}
