//! The sending side's part of a planted fault. The detectors know nothing of it.
//!
//! A fault must not depend on who is faster. So whatever comes late is held here until the decode side has
//! said that it read the layer, or until the next owner of the page has been written.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kvgate_kvcache::fault::{self as hooks, Damage, Undamaged};
use kvgate_kvcache::{
    BlockTable, ComponentRow, KvPost, LayerId, PageMove, SourceLease, TransferPlan, WrittenLayer,
};
use kvgate_transfer::fault::HoldGate;
use kvgate_transfer::{Arrival, Epoch, Status, TransferHandle, Visibility};

use super::flight::Flight;
use super::outbox::Courier;
use super::pieces::{split_moves, split_note};
use crate::handoff::failure::{Failure, FailureKind};
use crate::handoff::fault::decode::set_switches;
use crate::handoff::fault::place::{self, Place, Scope};
use crate::handoff::fault::{FaultKind, FaultSpec};
use crate::handoff::link::{self, transfer_failure};
use crate::handoff::model::{Host, cache_failure};
use crate::handoff::plan::RunPlan;
use crate::handoff::protocol::FlightId;

/// Plants at most one fault.
pub(super) struct Planter {
    planted: Option<Planted>,
}

struct Planted {
    kind: FaultKind,
    place: Place,
    row: ComponentRow,
    /// The other page of a swap.
    partner_ordinal: Option<u32>,
    concurrency: u32,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The attempt that was given up, for a completion that comes too late.
    former: Option<FlightId>,
    /// Written only when the decode side has read the layer.
    deferred: Vec<Deferred>,
    /// Posted, and not executed until their gates open.
    held: Vec<Held>,
    /// The request whose writes are held has been given up.
    has_given_up: bool,
    is_victim_offered: bool,
}

/// Pages that are written later.
struct Deferred {
    courier: Courier,
    moves: Vec<PageMove>,
    arrival: Option<Arrival>,
    keepalive: SourceLease,
}

/// One page under way that does not arrive yet.
struct Held {
    page: u32,
    gate: Arc<HoldGate>,
    handle: TransferHandle,
}

/// What becomes of a post.
pub(super) enum Intercepted {
    /// It goes its way, changed or not.
    Post(KvPost),
    /// It has been taken care of.
    Handled,
    /// It has been taken care of, and the flight is to be given up now.
    GiveUp,
}

/// What a post is part of.
pub(super) struct Context<'a> {
    pub(super) courier: &'a Courier,
    pub(super) plan: &'a TransferPlan,
    pub(super) table: &'a BlockTable,
    pub(super) layer: LayerId,
    pub(super) is_last_segment: bool,
    pub(super) written: &'a WrittenLayer,
}

impl Planter {
    /// Draws the place and sets the switches of this process.
    pub(super) fn new(
        fault: Option<&FaultSpec>,
        host: &Host,
        plan: &RunPlan,
    ) -> Result<Self, Failure> {
        let Some(fault) = fault else {
            return Ok(Self { planted: None });
        };
        let place = place::draw(fault, &host.schema, Scope::of(plan))?;
        set_switches(fault.kind);
        let row = *host
            .schema
            .row(place.layer, place.component)
            .ok_or_else(|| Failure::internal("a place without a row"))?;
        let partner_ordinal = partner(host, &row, &place, plan.prompt_tokens);
        let concurrency = plan.concurrency;
        let state = Mutex::default();
        Ok(Self {
            planted: Some(Planted {
                kind: fault.kind,
                place,
                row,
                partner_ordinal,
                concurrency,
                state,
            }),
        })
    }

    /// Whether a flight is given up as soon as it is offered, to be the former attempt.
    pub(super) fn gives_up_at_once(&self, id: FlightId) -> bool {
        let Some(planted) = self
            .planted
            .as_ref()
            .filter(|planted| planted.kind.is_stale_epoch())
        else {
            return false;
        };
        let is_former = id.request == planted.place.request && id.attempt == 0;
        if is_former {
            planted.state().former = Some(id);
        }
        is_former
    }

    /// Whether a request that was given up is submitted once more.
    pub(super) fn tries_again(&self, id: FlightId) -> bool {
        self.planted
            .as_ref()
            .is_some_and(|planted| planted.state().former == Some(id))
    }

    /// Whether other requests may be submitted now.
    pub(super) fn lets_others_in(&self, is_open: &dyn Fn(u32) -> bool) -> bool {
        let is_alone =
            |planted: &&Planted| planted.kind.is_stale_epoch() && is_open(planted.place.request);
        !self
            .planted
            .as_ref()
            .is_some_and(|planted| is_alone(&planted))
    }

    /// Whether the next request may take the place of this one, although it is not quiet.
    pub(super) fn is_replaced(&self, request: u32) -> bool {
        self.planted
            .as_ref()
            .is_some_and(|planted| planted.aborted() == Some(request))
    }

    /// Whether a flight that was given up is kept for its held writes.
    pub(super) fn keeps(&self, flight: &Flight) -> bool {
        let Some(planted) = self
            .planted
            .as_ref()
            .filter(|planted| planted.aborted() == Some(flight.request()))
        else {
            return false;
        };
        !planted.state().held.is_empty()
    }

    /// With the checks on, held writes go when nothing else is left to do.
    pub(super) fn before_release(&self, is_alone: bool) {
        if let Some(planted) = self.planted.as_ref().filter(|_| is_alone) {
            planted
                .state()
                .held
                .drain(..)
                .for_each(|held| held.gate.open());
        }
    }

    /// The decode side has made room for a request: if it has the pages of the held writes, those that
    /// would not hit the chosen page go now, before its own are written.
    pub(super) fn offered(&self, flight: &Flight) -> Result<(), Failure> {
        let Some(planted) = self
            .planted
            .as_ref()
            .filter(|planted| planted.is_victim(flight.request()))
        else {
            return Ok(());
        };
        let page = flight
            .offer
            .table
            .physical_page(&planted.row, planted.place.page.page_ordinal);
        let mut state = planted.state();
        state.is_victim_offered = true;
        if planted.kind.is_checked() {
            return Ok(());
        }
        if !state.held.iter().any(|held| held.page == page) {
            return Err(Failure::new(
                FailureKind::ProvesNothing,
                format!(
                    "--fault {}: the pages of the aborted request went elsewhere",
                    planted.kind.id()
                ),
            )
            .with_field("fault", planted.kind.id()));
        }
        let (target, others): (Vec<Held>, Vec<Held>) =
            state.held.drain(..).partition(|held| held.page == page);
        state.held = target;
        for held in others {
            held.gate.open();
            // They hit pages that nobody has written yet; how they end is seen by the ledger.
            let _ = held.handle.wait(link::slice());
        }
        Ok(())
    }

    /// Which of the offered flights is computed next.
    pub(super) fn pick(
        &self,
        ready: &VecDeque<Arc<Flight>>,
        is_open: &dyn Fn(u32) -> bool,
        is_offered: &dyn Fn(u32) -> bool,
    ) -> Option<usize> {
        let first = (!ready.is_empty()).then_some(0);
        let Some(planted) = &self.planted else {
            return first;
        };
        let Some(aborted) = planted.aborted() else {
            return first;
        };
        let state = planted.state();
        if state.is_victim_offered || (state.has_given_up && planted.kind.is_checked()) {
            let victim = ready
                .iter()
                .position(|flight| planted.is_victim(flight.request()));
            return victim.or(first);
        }
        if state.has_given_up {
            return None;
        }
        let is_surrounded = (0..aborted).all(|request| !is_open(request))
            && (aborted..aborted + planted.concurrency).all(is_offered);
        ready.iter().position(|flight| {
            flight.request() < aborted || (flight.request() == aborted && is_surrounded)
        })
    }

    /// The decode side has read a layer: what was deferred until then is written.
    pub(super) fn layer_was_read(&self, request: u32, layer: u16) -> Result<(), Failure> {
        let Some(planted) = &self.planted else {
            return Ok(());
        };
        if planted.place.request != request || planted.place.layer.0 != layer {
            return Ok(());
        }
        let deferred = std::mem::take(&mut planted.state().deferred);
        for Deferred {
            courier,
            moves,
            arrival,
            keepalive,
        } in deferred
        {
            courier.post_pages(&moves, arrival, keepalive, None)?;
        }
        Ok(())
    }

    /// Looks at a post before it goes.
    pub(super) fn intercept(
        &self,
        context: &Context<'_>,
        post: KvPost,
    ) -> Result<Intercepted, Failure> {
        let Some(planted) = self
            .planted
            .as_ref()
            .filter(|planted| planted.place.layer == context.layer)
        else {
            return Ok(Intercepted::Post(post));
        };
        let request = context.courier.flight().request();
        if planted.aborted() == Some(request) {
            return planted.hold_back(context, post);
        }
        if planted.place.request != request {
            return Ok(Intercepted::Post(post));
        }
        planted.plant(context, post)
    }
}

impl Planted {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The request whose writes come late: the one whose pages the victim gets.
    fn aborted(&self) -> Option<u32> {
        self.kind
            .is_late_write()
            .then(|| self.place.request - self.concurrency)
    }

    fn is_victim(&self, request: u32) -> bool {
        self.kind.is_late_write() && self.place.request == request
    }

    fn plant(&self, context: &Context<'_>, mut post: KvPost) -> Result<Intercepted, Failure> {
        let page = context
            .table
            .physical_page(&self.row, self.place.page.page_ordinal);
        let is_here = post
            .moves
            .iter()
            .any(|moved| moved.pool == self.row.pool && moved.to.contains(&page));
        match self.kind {
            FaultKind::SwapPages => {
                self.swap(context.table, &mut post);
                Ok(Intercepted::Post(post))
            }
            _ if !is_here => Ok(Intercepted::Post(post)),
            FaultKind::UngatedIndexK => self.defer(context, post, page, None),
            FaultKind::DropPage => {
                hooks::drop_page(&mut post, self.row.pool, page);
                Ok(Intercepted::Post(post))
            }
            FaultKind::HalfPage => self.damage(context, post, page, Damage::HalfPage),
            FaultKind::WrongStride => self.damage(context, post, page, Damage::WrongStride),
            FaultKind::EarlyDone | FaultKind::EarlyDoneChecked => {
                self.defer(context, post, page, Some((None, Visibility::LocalDone)))
            }
            FaultKind::StaleEpoch | FaultKind::StaleEpochChecked => {
                let former = self.state().former.map(|id| Epoch(id.epoch));
                self.defer(
                    context,
                    post,
                    page,
                    Some((former, Visibility::RemoteVisible)),
                )
            }
            FaultKind::LateWrite => self.overwrite(context, post, page),
            FaultKind::LateWriteChecked | FaultKind::Duplicate => Ok(Intercepted::Post(post)),
        }
    }

    /// Exchanges the two destinations wherever they stand; they may go with different segments.
    fn swap(&self, table: &BlockTable, post: &mut KvPost) {
        let Some(partner) = self.partner_ordinal else {
            return;
        };
        let one = table.physical_page(&self.row, self.place.page.page_ordinal);
        let other = table.physical_page(&self.row, partner);
        for moved in post
            .moves
            .iter_mut()
            .filter(|moved| moved.pool == self.row.pool)
        {
            for to in &mut moved.to {
                *to = match *to {
                    page if page == one => other,
                    page if page == other => one,
                    page => page,
                };
            }
        }
    }

    fn damage(
        &self,
        context: &Context<'_>,
        post: KvPost,
        page: u32,
        damage: Damage,
    ) -> Result<Intercepted, Failure> {
        let courier = context.courier;
        let from = post
            .moves
            .iter()
            .filter(|moved| moved.pool == self.row.pool)
            .find_map(|moved| {
                let index = moved.to.iter().position(|to| *to == page)?;
                moved.from.get(index).copied()
            });
        let Some(from) = from else {
            return Ok(Intercepted::Post(post));
        };
        let pools = &courier.side().pools;
        let undamaged: Undamaged =
            hooks::damage_source(pools, &self.row, from, &self.place.page, damage);
        let posted = courier
            .post(post)
            .and_then(|handle| wait_for(courier, handle));
        undamaged.restore(pools);
        posted.map(|()| Intercepted::Handled)
    }

    /// Sends the chosen page later, and says at once that it is there, in the way that `forged` tells:
    /// under which epoch (`None`: the right one), and how far the bytes have come. The other pages of its
    /// chunk go before anything that is announced, so that one page and no other is damaged.
    fn defer(
        &self,
        context: &Context<'_>,
        post: KvPost,
        page: u32,
        forged: Option<(Option<Epoch>, Visibility)>,
    ) -> Result<Intercepted, Failure> {
        let courier = context.courier;
        let (rest, later) = hooks::split_off(context.plan, post, self.row.pool, context.written)
            .map_err(|error| cache_failure(&error))?;
        if self.kind.is_checked() {
            if let Some((epoch, level)) = forged {
                let arrival = later.arrival.clone();
                courier.forge(
                    Arrival {
                        epoch: epoch.unwrap_or(arrival.epoch),
                        ..arrival
                    },
                    level,
                )?;
            }
            return self.send_both(courier, rest, Some(later));
        }
        let (chosen, others) = split_moves(&later.moves, page);
        let (about_chosen, about_others) = split_note(&later.arrival, page);
        let source = context.written.source();
        if !others.is_empty() {
            let arrival = forged.is_none().then_some(about_others);
            courier.post_pages(&others, arrival, source.clone(), None)?;
        }
        self.send_both(courier, rest, None)?;
        if let Some((epoch, level)) = forged {
            let arrival = later.arrival.clone();
            courier.forge(
                Arrival {
                    epoch: epoch.unwrap_or(arrival.epoch),
                    ..arrival
                },
                level,
            )?;
        }
        let arrival = forged.is_none().then_some(about_chosen);
        let deferred = Deferred {
            courier: courier.clone(),
            moves: chosen,
            arrival,
            keepalive: source.clone(),
        };
        self.state().deferred.push(deferred);
        Ok(Intercepted::Handled)
    }

    fn send_both(
        &self,
        courier: &Courier,
        rest: KvPost,
        later: Option<KvPost>,
    ) -> Result<Intercepted, Failure> {
        if !rest.is_empty() {
            courier.post(rest)?;
        }
        if let Some(later) = later {
            courier.post(later)?;
        }
        Ok(Intercepted::Handled)
    }

    /// Posts the pages of the place's pool one by one, none of which arrives before its gate opens.
    fn hold_back(&self, context: &Context<'_>, post: KvPost) -> Result<Intercepted, Failure> {
        let courier = context.courier;
        let has_pool = post.moves.iter().any(|moved| moved.pool == self.row.pool);
        if has_pool {
            let (rest, later) =
                hooks::split_off(context.plan, post, self.row.pool, context.written)
                    .map_err(|error| cache_failure(&error))?;
            if !rest.is_empty() {
                courier.post(rest)?;
            }
            for moved in later.moves {
                for (from, to) in moved.from.iter().zip(&moved.to) {
                    let single = PageMove {
                        from: vec![*from],
                        to: vec![*to],
                        ..moved.clone()
                    };
                    let gate = HoldGate::new();
                    let keepalive = context.written.source().clone();
                    let held =
                        courier.post_pages(&[single], None, keepalive, Some(Arc::clone(&gate)))?;
                    if let Some(handle) = held {
                        self.state().held.push(Held {
                            page: *to,
                            gate,
                            handle,
                        });
                    }
                }
            }
        } else {
            courier.post(post)?;
        }
        if context.is_last_segment {
            self.state().has_given_up = true;
            return Ok(Intercepted::GiveUp);
        }
        Ok(Intercepted::Handled)
    }

    /// Writes the victim's page, then lets the late write go, and only then says that the page is there.
    fn overwrite(
        &self,
        context: &Context<'_>,
        post: KvPost,
        page: u32,
    ) -> Result<Intercepted, Failure> {
        let courier = context.courier;
        let (rest, later) = hooks::split_off(context.plan, post, self.row.pool, context.written)
            .map_err(|error| cache_failure(&error))?;
        if !rest.is_empty() {
            courier.post(rest)?;
        }
        let written =
            courier.post_pages(&later.moves, None, context.written.source().clone(), None)?;
        wait_for(courier, written)?;
        let held: Vec<Held> = self.state().held.drain(..).collect();
        for late in held {
            debug_assert_eq!(late.page, page, "only the chosen page is still held");
            late.gate.open();
            wait_for(courier, Some(late.handle))?;
        }
        courier.forge(later.arrival, Visibility::RemoteVisible)?;
        Ok(Intercepted::Handled)
    }
}

/// Waits until an operation is terminal, as long as the peer shows progress.
fn wait_for(courier: &Courier, handle: Option<TransferHandle>) -> Result<(), Failure> {
    let Some(handle) = handle else {
        return Ok(());
    };
    let since = Instant::now();
    loop {
        match handle.wait(link::slice()) {
            Status::InFlight => courier.side().watch.check(since, "a planted write")?,
            Status::Done(_) => return Ok(()),
            Status::Failed(error) => return Err(transfer_failure(&error)),
            Status::Unknown(cause) => {
                return Err(Failure::new(
                    FailureKind::PeerLost,
                    format!("the end of a transfer is unknown: {cause}"),
                ));
            }
        }
    }
}

/// The page beside the chosen one.
fn partner(host: &Host, row: &ComponentRow, place: &Place, prompt_tokens: u32) -> Option<u32> {
    let pages = host.schema.live_pages(row, prompt_tokens);
    let index = pages
        .iter()
        .position(|page| page.page_ordinal == place.page.page_ordinal)?;
    let other = if index + 1 < pages.len() {
        index + 1
    } else {
        index.checked_sub(1)?
    };
    pages.get(other).map(|page| page.page_ordinal)
}
