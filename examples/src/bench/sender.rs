//! The sending process: a producer that has computed everything, and posts it layer by layer.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use kvgate_kvcache::canary::VerifyMode;
use kvgate_kvcache::{
    BlockTable, CacheSchema, PageId, PoolSet, PostTarget, Room, TransferPlan, WriteLease,
    WrittenLayer,
};
use kvgate_transfer::{
    Address, Agent, Deadline, Epoch, Op, PeerId, PostOptions, Status, TransferHandle,
};
use serde_json::{Value, json};

use super::copy::Copy;
use super::receiver::{LIMIT, lost};
use super::{FromReceiver, Heap, ToReceiver, median, shape};
use crate::handoff::channel::{self, ChannelReceiver, ChannelSender};
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::link::transfer_failure;
use crate::handoff::model::cache_failure;
use crate::handoff::timeline;

/// Slices of the transfer and of the copy, in alternating order: A B B A A B B A …
const PAIRS: usize = 15;

/// What one prompt length showed.
#[derive(Clone, Debug)]
pub struct Measured {
    /// `ratio`, `memcpy_gbps`, `transfer_gbps`, `bytes`.
    pub ratio: Value,
    /// Both processes between Offer and landed: the most heap beyond what there was.
    pub extra_bytes: u64,
    /// Pools of one process.
    pub pool_bytes: u64,
}

struct Sender {
    tokens: u32,
    schema: Arc<CacheSchema>,
    pools: PoolSet,
    agent: Agent,
    peer: PeerId,
    plan: TransferPlan,
    lease: WriteLease,
    written: Vec<WrittenLayer>,
    control: ChannelSender,
    replies: ChannelReceiver,
    heap: Heap,
}

/// Measures one prompt length against the receiver at the other end of `control`.
pub fn measure(tokens: u32, control: UnixStream, heap: Heap) -> Result<Measured, Failure> {
    let mut sender = Sender::start(tokens, control, heap)?;
    // The first hand-off maps and warms everything.
    let (_, table) = sender.hand_over()?;
    let mut copy = Copy::new(
        &sender.schema,
        &sender.plan,
        sender.lease.block_table(),
        &table,
        sender.pools.memory_bytes(),
    );
    copy.run();
    let (mut transfers, mut copies, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    let mut extra_bytes = 0;
    for pair in 0..PAIRS {
        let (transfer, copied) = if pair % 2 == 0 {
            let transfer = sender.hand_over()?.0;
            (transfer, copy.run())
        } else {
            let copied = copy.run();
            (sender.hand_over()?.0, copied)
        };
        let gbps = copy.bytes() as f64 / transfer.elapsed_us.max(1) as f64 / 1e3;
        transfers.push(gbps);
        copies.push(copied);
        ratios.push(gbps / copied);
        extra_bytes = extra_bytes.max(transfer.extra_bytes);
    }
    Ok(Measured {
        ratio: json!({
            "ratio": median(ratios), "memcpy_gbps": median(copies), "transfer_gbps": median(transfers),
            "bytes": copy.bytes(), "slices": PAIRS,
        }),
        extra_bytes,
        pool_bytes: sender.pools.memory_bytes(),
    })
}

struct HandedOver {
    elapsed_us: u64,
    extra_bytes: u64,
}

impl Sender {
    fn start(tokens: u32, control: UnixStream, heap: Heap) -> Result<Self, Failure> {
        let (control, mut replies) =
            channel::split(control, LIMIT).map_err(|error| lost(&error))?;
        control
            .send(&ToReceiver::Start { tokens })
            .map_err(|error| lost(&error))?;
        let schema = shape::schema().map_err(|error| cache_failure(&error))?;
        let pools = shape::pools(&schema, tokens).map_err(|error| cache_failure(&error))?;
        let agent = Agent::builder("sender")
            .build()
            .map_err(|error| transfer_failure(&error))?;
        pools
            .register(&agent)
            .map_err(|error| cache_failure(&error))?;
        let FromReceiver::Listening { name } = reply(&mut replies)? else {
            return Err(Failure::internal("an answer out of turn"));
        };
        let peer = agent
            .connect(&Address::Shm(name), Deadline::after(LIMIT))
            .map_err(|error| transfer_failure(&error))?;
        let plan = shape::plan(&schema, tokens).map_err(|error| cache_failure(&error))?;
        let mut lease = pools
            .reserve(tokens, Room(1))
            .map_err(|error| cache_failure(&error))?;
        let written = produce(&schema, &mut lease, tokens)?;
        Ok(Self {
            tokens,
            schema,
            pools,
            agent,
            peer,
            plan,
            lease,
            written,
            control,
            replies,
            heap,
        })
    }

    /// One hand-off, from the first post to the last layer.
    fn hand_over(&mut self) -> Result<(HandedOver, BlockTable), Failure> {
        self.control
            .send(&ToReceiver::Next)
            .map_err(|error| lost(&error))?;
        let FromReceiver::Offer {
            epoch,
            pages,
            windows,
            request,
        } = reply(&mut self.replies)?
        else {
            return Err(Failure::internal("an answer out of turn"));
        };
        let id = |(index, generation): (u32, u32)| PageId { index, generation };
        let ids = |pairs: Vec<(u32, u32)>| pairs.into_iter().map(id).collect();
        let table = BlockTable::new(
            &self.schema,
            self.tokens,
            ids(pages),
            ids(windows),
            id(request),
        );
        let begin = self.heap.begin();
        let began_us = timeline::now_us();
        let handles = self.post_all(Epoch(epoch), &table)?;
        let FromReceiver::Landed { at_us, extra_bytes } = reply(&mut self.replies)? else {
            return Err(Failure::internal("an answer out of turn"));
        };
        let extra_bytes = extra_bytes + self.heap.extra_since(begin);
        for handle in handles {
            let Status::Done(_) = handle.wait(Deadline::after(LIMIT)) else {
                return Err(Failure::new(
                    FailureKind::PeerLost,
                    "a transfer did not end well",
                ));
            };
        }
        Ok((
            HandedOver {
                elapsed_us: at_us.saturating_sub(began_us),
                extra_bytes,
            },
            table,
        ))
    }

    fn post_all(&self, epoch: Epoch, table: &BlockTable) -> Result<Vec<TransferHandle>, Failure> {
        let info = self
            .agent
            .peer(self.peer)
            .ok_or_else(|| Failure::new(FailureKind::PeerLost, "the receiver was lost"))?;
        let pools: Vec<_> = info.pools.iter().map(|pool| pool.pool).collect();
        let target = PostTarget {
            incarnation: info.incarnation,
            pools: &pools,
            table,
            epoch,
            room: Room(1),
            verify: VerifyMode::Off,
        };
        let mut handles = Vec::new();
        for written in &self.written {
            for segment in 0..self.plan.segment_ends().len() as u32 {
                let post = self
                    .plan
                    .post(&self.pools, segment, written, &target)
                    .map_err(|error| cache_failure(&error))?;
                if post.is_empty() {
                    continue;
                }
                let (local, remote) = post.descriptors();
                let transfer = self
                    .agent
                    .prepare(Op::Write, &local, &remote, self.peer)
                    .map_err(|error| transfer_failure(&error))?;
                #[allow(
                    clippy::needless_update,
                    reason = "the feature fault-injection adds a field"
                )]
                let options = PostOptions {
                    arrival: Some(post.arrival),
                    keepalive: Some(Box::new(post.keepalive)),
                    ledger: Some(self.lease.ledger().clone()),
                    ..PostOptions::default()
                };
                let posted =
                    self.agent
                        .post_within(&transfer, post.source, options, Deadline::after(LIMIT));
                handles.push(posted.map_err(|refused| transfer_failure(&refused.error))?);
            }
        }
        Ok(handles)
    }
}

/// Fills every row, so that real bytes travel.
fn produce(
    schema: &CacheSchema,
    lease: &mut WriteLease,
    tokens: u32,
) -> Result<Vec<WrittenLayer>, Failure> {
    let mut written = Vec::new();
    for layer in schema.layers() {
        let view = lease
            .layer_mut(layer)
            .map_err(|error| cache_failure(&error))?;
        for row in schema.rows_of(layer) {
            let Some(mut component) = view.component(row.component) else {
                continue;
            };
            let mut image = vec![0; component.row_image_bytes()];
            let live = row.live_entries(tokens, schema.geometry().window_tokens);
            let is_one_row = row.entries_per_page == u32::MAX;
            for entry in live.take(if is_one_row { 1 } else { usize::MAX }) {
                let seed = entry.wrapping_mul(31).wrapping_add(u32::from(layer.0));
                image
                    .iter_mut()
                    .zip(seed..)
                    .for_each(|(byte, value)| *byte = value as u8);
                component
                    .write_row(entry, &image)
                    .map_err(|error| cache_failure(&error))?;
            }
        }
        written.push(
            lease
                .commit_layer(layer, 0..tokens)
                .map_err(|error| cache_failure(&error))?,
        );
    }
    Ok(written)
}

fn reply(replies: &mut ChannelReceiver) -> Result<FromReceiver, Failure> {
    match replies
        .receive::<FromReceiver>()
        .map_err(|error| lost(&error))?
    {
        Some((message, _)) => Ok(message),
        None => Err(Failure::new(
            FailureKind::PeerLost,
            "the receiver has ended",
        )),
    }
}
