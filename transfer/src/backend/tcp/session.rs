//! Sessions of streams: what both sides agree on, who connects again, and how a listener gives a new connection to
//! the session that it belongs to.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Shared, incoming::Progress};
use crate::agent::metadata::AgentMetadata;
use crate::agent::wire::{self, Refusal, SessionWords};
use crate::backend::channel::Channel;
use crate::backend::establish::{NotYet, Redial};
use crate::backend::handshake::{SESSION_BUSY, SESSION_OVER};
use crate::backend::reader::FrameReader;
use crate::backend::socket::{Bounds, StopSignal};
use crate::config::TransferConfig;
use crate::deadline::Deadline;
use crate::engine::session::{Parked, Unclaimed};
use crate::ids::Incarnation;
use crate::sync::{Arc, Mutex, Weak};

/// The first pause between two attempts to connect again; each one is twice as long, half of it by chance.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// A host that says so often in a row that nobody listens there has no such agent any more: an agent listens for as
/// long as it lives.
const NOBODY_LIMIT: u32 = 3;
/// How long the receive thread of a session gets to leave the connection that another one replaces.
const CLAIM_MS: u64 = 2_000;
/// Most items between two acknowledgements.
const EVERY_ITEMS: usize = 64;
/// Most bytes of messages between two acknowledgements.
const EVERY_BYTES: u64 = 1 << 20;

/// A connection whose handshake is done, for a session that is there.
pub(in crate::backend) struct Next {
    pub(in crate::backend) metadata: AgentMetadata,
    pub(in crate::backend) channel: Arc<Channel>,
    pub(in crate::backend) reader: FrameReader,
    /// What the other side has handled.
    pub(in crate::backend) received: u64,
}

/// What an agent grants its sessions, and those that wait for their connectors.
pub(crate) struct Desk {
    words: SessionWords,
    sessions: Mutex<BTreeMap<u128, Weak<Shared>>>,
}

impl Desk {
    /// `None` when a connection that breaks is the end.
    pub(crate) fn new(config: &TransferConfig) -> Option<Arc<Self>> {
        let short = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        let window_ms = short(config.reconnect_ms);
        let every_items = (config.message_capacity / 4).clamp(1, EVERY_ITEMS);
        let most = config
            .queue_capacity
            .saturating_add(config.message_capacity);
        (window_ms > 0).then(|| {
            Arc::new(Self {
                words: SessionWords {
                    window_ms,
                    every_items: short(every_items as u64),
                    every_bytes: short((config.message_bytes / 4).min(EVERY_BYTES)),
                    most_items: short(most as u64),
                    ..SessionWords::default()
                },
                sessions: Mutex::new(BTreeMap::new()),
            })
        })
    }

    /// The wish for a new session.
    pub(in crate::backend) fn words(&self) -> SessionWords {
        self.words
    }

    /// How a listener answers the wish of a connector whose handshake was good so far.
    pub(in crate::backend) fn answer(
        &self,
        peer: &AgentMetadata,
        wish: &SessionWords,
        deadline: Option<Deadline>,
    ) -> Result<(SessionWords, Option<Claim>), Refusal> {
        if !wish.is_resumed {
            let session = draw().ok_or_else(|| busy("no random numbers"))?;
            let words = SessionWords {
                session,
                ..self.words
            };
            return Ok((words, None));
        }
        let found = self.sessions.lock().get(&wish.session).cloned();
        let shared = found.and_then(|shared| shared.upgrade());
        let shared =
            shared.ok_or_else(|| over("no such session: it is over, or was of another agent"))?;
        let soon = Deadline::after_ms(CLAIM_MS);
        let deadline = deadline.map_or(soon, |deadline| deadline.min(soon));
        let (claim, received) = shared.claim(peer, wish, deadline)?;
        let words = SessionWords {
            is_resumed: true,
            session: wish.session,
            received,
            ..self.words
        };
        Ok((words, Some(claim)))
    }

    pub(super) fn enter(&self, session: u128, shared: Weak<Shared>) {
        self.sessions.lock().insert(session, shared);
    }

    fn leave(&self, session: u128) {
        self.sessions.lock().remove(&session);
    }
}

fn draw() -> Option<u128> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).ok()?;
    Some(u128::from_le_bytes(bytes).max(1))
}

fn over(reason: &str) -> Refusal {
    Refusal {
        code: SESSION_OVER,
        reason: reason.into(),
    }
}

fn busy(reason: &str) -> Refusal {
    Refusal {
        code: SESSION_BUSY,
        reason: reason.into(),
    }
}

/// What a side without a session grants its peer, which has none either. It hears of messages as often as in a
/// session, because it keeps them for as long; a refusal is told once and not kept.
pub(super) fn progress_alone() -> Progress {
    Progress::new(EVERY_ITEMS as u64, EVERY_BYTES, 0)
}

/// What both sides have agreed on for one session.
pub(in crate::backend) struct Terms {
    session: u128,
    incarnation: Incarnation,
    app: bytes::Bytes,
    window_ms: u64,
    ours: SessionWords,
    theirs: SessionWords,
    /// The side that had connected; the other one waits at its desk.
    redial: Option<Redial>,
    pub(super) desk: Arc<Desk>,
}

impl Terms {
    pub(in crate::backend) fn new(
        peer: &AgentMetadata,
        (ours, theirs): (SessionWords, SessionWords),
        redial: Option<Redial>,
        desk: Arc<Desk>,
    ) -> Self {
        Self {
            session: ours.session.max(theirs.session),
            incarnation: peer.incarnation,
            app: peer.app.clone(),
            window_ms: u64::from(ours.window_ms.min(theirs.window_ms)),
            ours,
            theirs,
            redial,
            desk,
        }
    }

    /// Which session, for the desk of the side that waits.
    pub(super) fn waits_as(&self) -> Option<u128> {
        self.redial.is_none().then_some(self.session)
    }

    pub(super) fn progress(&self) -> Progress {
        let theirs = &self.theirs;
        Progress::new(
            theirs.every_items.into(),
            theirs.every_bytes.into(),
            theirs.most_items.into(),
        )
    }

    /// Whether this is the life that the session was made with, and says the same of itself.
    fn is_of(&self, peer: &AgentMetadata) -> bool {
        peer.incarnation == self.incarnation && peer.app == self.app
    }

    pub(super) fn leave(&self) {
        if let Some(session) = self.waits_as() {
            self.desk.leave(session);
        }
    }
}

/// The right to give a session its next connection.
pub(in crate::backend) struct Claim {
    shared: Arc<Shared>,
    is_given: bool,
}

impl Claim {
    pub(in crate::backend) fn give(mut self, next: Next) {
        self.is_given = true;
        if let Some(late) = self.shared.handover.give(next) {
            // The session has ended since the claim, and its peer takes it for going on.
            late.channel.stop.raise();
            late.channel.farewell(wire::append_bye);
            late.channel.socket.shutdown();
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if !self.is_given {
            self.shared.handover.release();
        }
    }
}

/// How many attempts were made since the session went on last.
#[derive(Default)]
pub(super) struct Attempts {
    count: u32,
    /// What had been handled and answered then.
    went: (u64, u64),
}

impl Attempts {
    /// A connection that has brought the session no further does not start the pauses anew.
    pub(super) fn note(&mut self, went: (u64, u64)) {
        if went != self.went {
            *self = Self { count: 0, went };
        }
    }

    fn pause(&mut self) -> Duration {
        let doublings = self.count.checked_sub(1);
        self.count = self.count.saturating_add(1);
        let Some(doublings) = doublings else {
            return Duration::ZERO;
        };
        let longest = FIRST_PAUSE
            .saturating_mul(1 << doublings.min(8))
            .min(LONGEST_PAUSE);
        let mut chance = [0];
        // Without random numbers the whole pause.
        let _ = getrandom::fill(&mut chance);
        longest / 2 + longest / 2 * u32::from(255 - chance[0]) / 255
    }
}

impl Shared {
    /// Claims the place of the next connection for a peer that says it is the one of this session. The connection
    /// that may still stand is ended, and the receive thread past it, before the claim is granted.
    fn claim(
        self: Arc<Self>,
        peer: &AgentMetadata,
        wish: &SessionWords,
        deadline: Deadline,
    ) -> Result<(Claim, u64), Refusal> {
        let terms = self.terms.as_ref().ok_or_else(|| over("no session"))?;
        if !terms.is_of(peer) {
            return Err(over("the session is of another life, or of another agent"));
        }
        if self.session.check_received(wish.received).is_err() {
            let reason = format!(
                "{} items were never sent, or let go long ago",
                wish.received
            );
            return Err(over(&reason));
        }
        let end_old = || {
            if let Some((_, channel)) = self.session.connection() {
                channel.stop.raise();
                channel.socket.shutdown();
            }
        };
        match self.handover.claim(end_old, deadline) {
            Ok(received) => {
                let claim = Claim {
                    shared: self,
                    is_given: false,
                };
                // The old connection may have gone on since the peer said so; then it has overtaken this attempt.
                let checked = claim.shared.session.check_received(wish.received);
                checked.map_err(|_| busy("the session has gone on over another connection"))?;
                Ok((claim, received))
            }
            Err(Unclaimed::Over) => Err(over("the session is over")),
            Err(Unclaimed::Busy) => Err(busy("the session is busy with another connection")),
        }
    }

    /// Goes on over another connection, within the window. Gives back what was read with its handshake.
    ///
    /// # Errors
    /// Why there is none; `None` when the link was closed here.
    pub(super) fn reconnect(
        &self,
        terms: &Terms,
        received: u64,
        attempts: &mut Attempts,
    ) -> Result<FrameReader, Option<String>> {
        let window = Deadline::after_ms(terms.window_ms);
        loop {
            let next = self.next_connection(terms, received, attempts, window)?;
            match self.session.resume(next.channel, next.received) {
                Ok(Some(_)) => return Ok(next.reader),
                Ok(None) => return Err(None),
                // An attempt that was overtaken: its connection is closed, and the newer one may still come.
                Err(_) if terms.waits_as().is_some() => {}
                Err(wrong) => return Err(Some(format!("{wrong:?} items are told"))),
            }
        }
    }

    fn next_connection(
        &self,
        terms: &Terms,
        received: u64,
        attempts: &mut Attempts,
        window: Deadline,
    ) -> Result<Next, Option<String>> {
        let next = match &terms.redial {
            Some(redial) => self.redial(terms, redial, received, attempts, window)?,
            None => match self.handover.park(received, window) {
                Parked::Given(next) => next,
                Parked::Closed => return Err(None),
                Parked::TimedOut => {
                    return Err(Some(format!("no other one within {} ms", terms.window_ms)));
                }
            },
        };
        match terms.is_of(&next.metadata) {
            true => Ok(next),
            false => Err(Some("another life of the peer is there".into())),
        }
    }

    fn redial(
        &self,
        terms: &Terms,
        redial: &Redial,
        received: u64,
        attempts: &mut Attempts,
        window: Deadline,
    ) -> Result<Next, Option<String>> {
        let wish = SessionWords {
            is_resumed: true,
            session: terms.session,
            received,
            ..terms.ours
        };
        let bounds = Bounds {
            stop: Some(&self.stop),
            deadline: Some(window),
            process: None,
            writable: None,
        };
        let (mut nobody_count, mut last) = (0, String::from("no time was left"));
        loop {
            let pause = attempts.pause().min(window.remaining());
            if !pause.is_zero() {
                self.stop.wait(None, Some(pause));
            }
            if StopSignal::is_raised(&self.stop) {
                return Err(None);
            }
            if window.has_passed() {
                return Err(Some(format!(
                    "no other one within {} ms: {last}",
                    terms.window_ms
                )));
            }
            match redial.dial(wish, bounds) {
                Ok(next) => return Ok(next),
                Err(NotYet::Never(reason)) => return Err(Some(reason)),
                Err(NotYet::Nobody(reason)) => {
                    nobody_count += 1;
                    if nobody_count == NOBODY_LIMIT {
                        return Err(Some(format!("nobody listens there any more: {reason}")));
                    }
                    last = reason;
                }
                Err(NotYet::Later(reason)) => {
                    nobody_count = 0;
                    last = reason;
                }
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
