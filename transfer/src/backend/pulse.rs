//! The heartbeat of a peer of this host: whether somebody there attends to its ring.
//!
//! It tells a peer that is slow (it beats, and little goes on) from one that is stopped or stuck (it does not
//! beat) from one that is dead (its pidfd says so, and nothing else does: I-9). Without a frame: this side raises
//! a number in the ring and wakes the reader, which copies the number (`mem/ring.rs`).
//!
//! **Nothing beats by itself.** A heartbeat is of use to whoever wonders why nothing goes on: the watcher of
//! stalls, while an operation stands, and a look at the status. So an idle connection has no timer on either
//! side, and a question costs its peer one wake. A silence decides nothing: no memory comes back by it (I-11).

use std::time::{Duration, Instant};

use crate::mem::ring::Questions;
use crate::sync::Mutex;

/// What is known of the heartbeat of one peer.
pub(super) struct Pulse(Mutex<State>);

struct State {
    questions: Questions,
    /// When the reader was woken for the question that is open, or found awake.
    since: Option<Instant>,
}

impl Pulse {
    pub(super) fn new(questions: Questions) -> Self {
        let since = None;
        Self(Mutex::new(State { questions, since }))
    }

    /// How long the last question has been open; asks the next one when it was answered. `wake` says whether the
    /// reader is awake now, or will be: a reader that this side could not wake is not called silent.
    pub(super) fn silence(&self, now: Instant, wake: impl FnOnce(&Questions) -> bool) -> Duration {
        let mut state = self.0.lock();
        if state.questions.is_answered() {
            state.questions.ask();
            state.since = None;
        }
        if let Some(since) = state.since {
            return now.saturating_duration_since(since);
        }
        state.since = wake(&state.questions).then_some(now);
        Duration::ZERO
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::mem::{PeerMapping, ring};
    use crate::sync::Arc;

    #[test]
    fn a_silence_lasts_from_the_wake_to_the_answer() {
        let memory = Arc::new(ring::memory().unwrap());
        let file = memory.file().unwrap().try_clone_to_owned().unwrap();
        let there = PeerMapping::map(&file, memory.len_bytes()).unwrap();
        let mut reader = ring::inbox(memory).unwrap();
        let pulse = Pulse::new(ring::outbox(there).unwrap().questions());
        let start = Instant::now();
        let silence = |ms, is_woken| {
            let asked = pulse.silence(start + Duration::from_millis(ms), |_| is_woken);
            asked.as_millis()
        };
        assert_eq!(silence(0, false), 0, "asked, and nobody could wake it");
        assert_eq!(silence(100, true), 0, "woken");
        assert_eq!(silence(130, true), 30);
        assert_eq!(silence(900, false), 800);
        reader.beat();
        assert_eq!(silence(1_000, true), 0, "it lives, and is asked again");
        assert_eq!(silence(1_050, true), 50);
        for ms in (1_100..2_000).step_by(100) {
            reader.beat();
            assert_eq!(silence(ms, true), 0, "slow is not silent");
        }
    }
}
