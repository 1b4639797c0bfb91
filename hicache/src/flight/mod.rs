//! Prefixes on their way between two tiers of memory: the same flights, behind the same barrier, as those
//! between two processes.
//!
//! A move is decided before a byte is sent: the slots are reserved, the flight is armed, and its nodes stand
//! in the tree of the receiving side as pending ones. A second move of the same prefix finds them and is
//! dropped before it is posted. The source is pinned by the operations that read it, each until it is
//! terminal. What has landed is taken over by the tree; what failed disappears from it, and its
//! slots come back when every operation that may still write them is terminal, never by time.

pub(crate) mod backup;
pub(crate) mod loadback;
mod poster;
mod posts;

use std::time::{Duration, Instant};

use kvgate_kvcache::{
    DrainingFlight, Hit, InFlight, LayerId, PrefixLease, Room, TransferPlan, WriterLayers,
};
use kvgate_transfer::sync::Arc;
use kvgate_transfer::{
    Barrier, Cause, Epoch, PeerId, Priority, Side as Whose, StageId, StageState, Status,
    TransferHandle, WriterRank,
};

use poster::PostJob;
pub(crate) use poster::Poster;
pub use posts::Posts;

use crate::side::Side;

/// The one writer of a move.
const WRITER: WriterRank = WriterRank(0);
/// Epochs of moves have this bit set; a host that shares the device agent gives its flights others.
pub const TIER_EPOCHS: u64 = 1 << 62;

/// The two ends of a move.
#[derive(Clone, Copy)]
pub(crate) struct Ends<'a> {
    pub(crate) from: &'a Side,
    pub(crate) into: &'a Side,
    /// The receiving side, as the sending one knows it.
    pub(crate) to_into: PeerId,
    /// The sending side, as the receiving one knows it.
    pub(crate) to_from: PeerId,
    pub(crate) poster: &'a Poster,
}

/// What became of an attempt to begin a move.
// Guards of the model checker are larger than those they stand for.
#[cfg_attr(kv_loom, allow(clippy::large_enum_variant))]
pub(crate) enum Begun {
    /// It is under way.
    Started(Move),
    /// The prefix is there, or another move brings it.
    Taken,
    /// There is no room, and nothing can go.
    NoRoom,
}

/// A prefix on its way.
#[derive(Debug)]
pub(crate) struct Move {
    begun_at: Instant,
    tokens: Vec<u32>,
    to_from: PeerId,
    posts: Arc<Posts<TransferHandle>>,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Its gates open one after the other. `None` only while it changes.
    Flying(Option<InFlight>),
    /// It has failed; its slots wait for the ends of its operations.
    Draining(Option<DrainingFlight>),
}

/// What a look at a move found.
#[derive(Debug)]
pub(crate) enum Progress {
    /// It goes on.
    UnderWay,
    /// Everything has landed, and the tree has taken it over.
    Landed,
    /// It failed just now: its prefix has left the tree.
    Failed(Cause),
    /// It failed before, and its slots are free or in the care of the pools.
    Over,
}

/// Begins to move the prefix that `pin` keeps, whose tokens are `tokens`.
///
/// # Errors
/// The cache or the engine refused; nothing is entered then.
pub(crate) fn begin(
    ends: Ends<'_>,
    tokens: &[u32],
    pin: &Arc<PrefixLease>,
    epoch: Epoch,
    priority: Priority,
) -> Result<Begun, kvgate_kvcache::Error> {
    let schema = ends.into.pools().schema();
    let end = pin.tokens();
    let held = match ends.into.tree().lookup(tokens) {
        Hit::Ready { lease, .. } | Hit::Pending { lease, .. } => Some(lease),
        Hit::Miss => None,
    };
    let start = held.as_ref().map_or(0, PrefixLease::tokens);
    let pages = (end - start) / kvgate_kvcache::schema::PAGE_TOKENS;
    let windows = schema.boundary_windows(end).len() as u32;
    if !ends.into.make_room(pages, windows) {
        return Ok(Begun::NoRoom);
    }
    let slots = match ends.into.pools().reserve_prefix(end, held, Room(epoch.0)) {
        Err(error) if error.is_retryable() => return Ok(Begun::NoRoom),
        slots => slots?,
    };
    let layers = 0..schema.layer_count();
    let writers = vec![WriterLayers {
        rank: WRITER,
        layers,
    }];
    let plan = TransferPlan::compile_from(schema.clone(), start, end, vec![end], writers)?;
    let flight = slots.into_inflight(&plan, epoch, &[(ends.to_from, WRITER)]);
    let mut flight = flight.map_err(|refused| refused.1)?;
    flight.arm(ends.into.agent(), None)?;
    // The owner is decided here, before anything is posted.
    match ends.into.tree().insert_prefix(tokens, &flight) {
        Ok(true) => {}
        Ok(false) => {
            discard(flight, ends.to_from);
            return Ok(Begun::Taken);
        }
        Err(error) => {
            discard(flight, ends.to_from);
            return Err(error);
        }
    }
    let posts = Arc::new(Posts::new());
    let posted = post(ends, plan, pin, &flight, priority, &posts);
    let mut begun = Move {
        begun_at: Instant::now(),
        tokens: tokens.to_vec(),
        to_from: ends.to_from,
        posts,
        state: State::Flying(Some(flight)),
    };
    if let Err(error) = posted {
        let cause = Cause::Transfer(error.to_string());
        begun.posts.finish(Err(cause.clone()));
        // What was posted may still land: the slots wait for it like those of any move that failed.
        begun.fail(cause);
    }
    Ok(Begun::Started(begun))
}

/// Posts the first layer of a prefix, and has the others posted behind it, in order: the first one can be read while the
/// others are still coming, and whoever asked for the prefix does not wait for them.
fn post(
    ends: Ends<'_>,
    plan: TransferPlan,
    pin: &Arc<PrefixLease>,
    flight: &InFlight,
    priority: Priority,
    posts: &Arc<Posts<TransferHandle>>,
) -> Result<(), kvgate_kvcache::Error> {
    let closed = || kvgate_transfer::Error::from(kvgate_transfer::ErrorKind::Closed);
    let (incarnation, remote_pools) = ends.from.knows(ends.to_into).ok_or_else(closed)?;
    let mut job = PostJob {
        agent: ends.from.agent().clone(),
        pools: ends.from.pools().clone(),
        plan,
        pin: Arc::clone(pin),
        to: ends.to_into,
        incarnation,
        remote_pools,
        table: flight.block_table().clone(),
        barrier: Arc::clone(flight.barrier()),
        room: flight.room(),
        priority,
        posts: Arc::clone(posts),
        next: LayerId(0),
    };
    job.step()?;
    ends.poster.post(job);
    Ok(())
}

/// Ends a flight of which nothing was posted: its one writer is this process, which says so.
fn discard(flight: InFlight, writer: PeerId) {
    let mut draining = flight.abort(given_up("another move brings the same prefix"));
    let _is_its_writer = draining.writer_answered(writer, WRITER);
    let _is_free = draining.poll();
}

impl Move {
    /// The prefix.
    pub(crate) fn into_tokens(self) -> Vec<u32> {
        self.tokens
    }

    /// Time since it began.
    pub(crate) fn age(&self) -> Duration {
        self.begun_at.elapsed()
    }

    /// Whether it can still land.
    pub(crate) fn is_flying(&self) -> bool {
        matches!(self.state, State::Flying(_))
    }

    /// What it waits for: its gates, its posts, and the ends of these.
    pub(crate) fn awaited(&self) -> (Option<Arc<Barrier>>, Arc<Posts<TransferHandle>>) {
        let gates = match &self.state {
            State::Flying(flight) => flight.as_ref().map(|flight| flight.barrier().clone()),
            State::Draining(_) => None,
        };
        (gates, Arc::clone(&self.posts))
    }

    /// Brings it up to date.
    pub(crate) fn poll(&mut self, into: &Side) -> Progress {
        match &mut self.state {
            State::Draining(slot) => {
                let Some(mut draining) = slot.take() else {
                    return Progress::Over;
                };
                // What is still to be posted may write the slots as well.
                if !self.posts.is_over() {
                    *slot = Some(draining);
                    return Progress::UnderWay;
                }
                let handles = self.posts.so_far();
                let count = |wanted: fn(&Status) -> bool| {
                    let statuses = handles.iter().map(|handle| handle.status());
                    statuses.filter(wanted).count()
                };
                let open = count(|status| matches!(status, Status::InFlight));
                let unknown = count(|status| matches!(status, Status::Unknown(_)));
                if open + unknown == 0 {
                    let _is_its_writer = draining.writer_answered(self.to_from, WRITER);
                }
                if draining.poll() {
                    return Progress::Over;
                }
                if open > 0 {
                    *slot = Some(draining);
                    return Progress::UnderWay;
                }
                match unknown {
                    // What is left waits for its readers; the pools free it without us.
                    0 => drop(draining),
                    // Nobody knows whether they still write: out of use, and counted as such.
                    _ => draining.quarantine(),
                }
                Progress::Over
            }
            State::Flying(flight) => {
                match flight.as_ref().map(|flight| failure(flight, &self.posts)) {
                    Some(Ok(true)) => {
                        // The tree takes over what has landed before the flight gives it up.
                        into.tree().settle();
                        drop(flight.take().map(InFlight::close));
                        Progress::Landed
                    }
                    Some(Ok(false)) => Progress::UnderWay,
                    Some(Err(cause)) => {
                        self.fail(cause.clone());
                        into.tree().settle();
                        Progress::Failed(cause)
                    }
                    None => Progress::Over,
                }
            }
        }
    }

    /// Gives it up: nothing of it can be read from now on.
    pub(crate) fn fail(&mut self, cause: Cause) {
        if let State::Flying(flight) = &mut self.state
            && let Some(flight) = flight.take()
        {
            let posted = self.posts.stop();
            posted.iter().for_each(|handle| handle.cancel());
            self.state = State::Draining(Some(flight.abort(cause)));
        }
    }
}

/// Whether everything has landed, or why it never will.
fn failure(flight: &InFlight, posts: &Posts<TransferHandle>) -> Result<bool, Cause> {
    let barrier = flight.barrier();
    let mut has_landed = posts.is_over();
    if let Some(cause) = posts.failure() {
        return Err(cause);
    }
    for stage in 0..barrier.stage_count() {
        match barrier.check(StageId(stage as u16)) {
            StageState::Ready => {}
            StageState::Failed(cause) => return Err(cause),
            StageState::NotArmed | StageState::Pending { .. } => has_landed = false,
        }
    }
    for handle in posts.so_far() {
        match handle.status() {
            Status::Failed(error) => return Err(Cause::Transfer(error.to_string())),
            Status::Unknown(cause) => return Err(cause),
            _ => {}
        }
    }
    Ok(has_landed)
}

/// The cause of a move that its owner gave up.
pub(crate) fn given_up(reason: &str) -> Cause {
    Cause::Aborted {
        by: Whose::Local,
        reason: reason.to_owned(),
    }
}
