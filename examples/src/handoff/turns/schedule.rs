//! Who says what, and when: the tokens of every turn, and the order of the turns.

use kvgate_kvcache::schema::PAGE_TOKENS;

use super::{DECODED_TOKENS, TurnOptions};
use crate::handoff::prompt::{PromptSource, mix};

/// Tokens that all conversations begin with: a system prompt.
pub(crate) const COMMON_TOKENS: u32 = 512;
/// Tokens of a user's turn, least and most.
const TURN_TOKENS: (u32, u32) = (260, 340);
/// Lengths of a prompt, as (modulus, rest), that a run has in turn: ends of groups, and what lies beside them.
const RESTS: [(u32, u32); 7] = [
    (128, 0),
    (4, 1),
    (128, 127),
    (4, 2),
    (128, 1),
    (4, 3),
    (4, 0),
];

/// One turn of one conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turn {
    /// The conversation, from 0.
    pub(crate) session: u32,
    /// The turn, from 0.
    pub(crate) turn: u32,
}

/// The conversations of a run. The same seed gives the same ones.
#[derive(Debug)]
pub(crate) struct Plan {
    common: Vec<u32>,
    /// What the user says, by conversation and turn.
    said: Vec<Vec<Vec<u32>>>,
    order: Vec<Turn>,
}

impl Plan {
    /// The conversations that a run is asked for.
    pub(crate) fn of(seed: u64, turns: &TurnOptions, source: &PromptSource) -> Plan {
        let lengths = &turns.lengths.0;
        Plan::new(seed, turns.sessions, turns.turns, lengths, source)
    }

    pub(crate) fn new(
        seed: u64,
        sessions: u32,
        turns: u32,
        lengths: &[u32],
        source: &PromptSource,
    ) -> Plan {
        let mut given = lengths.iter().cycle();
        let mut wanted = RESTS.iter().cycle();
        let mut next = *wanted.next().unwrap_or(&RESTS[0]);
        let mut said = Vec::new();
        for session in 0..sessions {
            let mut history = COMMON_TOKENS;
            let mut lines = Vec::new();
            for turn in 0..turns {
                let draw = mix(seed, u64::from(session) << 32 | u64::from(turn), 7);
                let (tokens, is_met) = match given.next() {
                    Some(tokens) => (*tokens, false),
                    None => turn_tokens(draw, history, next),
                };
                if is_met {
                    next = *wanted.next().unwrap_or(&RESTS[0]);
                }
                lines.push(source.prompt(1 + session * turns + turn, tokens));
                history += tokens + DECODED_TOKENS;
            }
            said.push(lines);
        }
        Plan {
            common: source.prompt(0, COMMON_TOKENS),
            said,
            order: order_of(seed, sessions, turns),
        }
    }

    /// Conversations.
    pub(crate) fn sessions(&self) -> usize {
        self.said.len()
    }

    pub(crate) fn order(&self) -> &[Turn] {
        &self.order
    }

    /// What all conversations begin with.
    pub(crate) fn common(&self) -> &[u32] {
        &self.common
    }

    /// What the user says in a turn.
    pub(crate) fn said(&self, turn: Turn) -> &[u32] {
        &self.said[turn.session as usize][turn.turn as usize]
    }

    /// Tokens of a conversation at its end.
    pub(crate) fn tokens_of(&self, session: u32) -> u32 {
        let lines = &self.said[session as usize];
        let turns = lines.iter().map(|line| line.len() as u32 + DECODED_TOKENS);
        COMMON_TOKENS + turns.sum::<u32>()
    }

    /// Tokens of the longest conversation.
    pub(crate) fn longest_tokens(&self) -> u32 {
        (0..self.said.len() as u32)
            .map(|session| self.tokens_of(session))
            .max()
            .unwrap_or(0)
    }

    /// Tokens of the longest prompt.
    pub(crate) fn longest_prompt(&self) -> u32 {
        self.longest_tokens() - DECODED_TOKENS
    }

    /// Full pages of all conversations, the common ones once; and ends that are worth going on from.
    pub(crate) fn stored(&self) -> (u32, u32) {
        let sessions = self.said.len() as u32;
        let common = COMMON_TOKENS / 256;
        let own: u32 = (0..sessions)
            .map(|session| self.tokens_of(session) / 256 - common)
            .sum();
        let turns: usize = self.said.iter().map(Vec::len).sum();
        // The end of each prompt, of each answer that crosses a page, and of the common part.
        (common + own, 2 * turns as u32 + 1)
    }
}

/// The next boundary behind `from` at which a prefix is published, up to `end`: the end of the common part, and
/// the last page end of what is computed now.
pub(crate) fn next_boundary(from: u32, end: u32) -> Option<u32> {
    let last = end / PAGE_TOKENS * PAGE_TOKENS;
    [COMMON_TOKENS, last]
        .into_iter()
        .filter(|at| *at > from && *at <= end)
        .min()
}

/// Tokens that a conversation of so many turns has at the most.
pub(crate) fn most_tokens(turns: &TurnOptions) -> u32 {
    let given = turns.lengths.0.iter().max();
    let each = given.copied().unwrap_or(TURN_TOKENS.1) + DECODED_TOKENS;
    COMMON_TOKENS.saturating_add(turns.turns.saturating_mul(each))
}

/// Tokens that the longest conversation has at the least; cheap, so that it can be asked before the prompts are made.
pub(crate) fn least_tokens(turns: &TurnOptions) -> u64 {
    let lengths = &turns.lengths.0;
    let of_session = |session: u32| -> u64 {
        let at = |turn: u32| {
            (session as usize * turns.turns as usize + turn as usize) % lengths.len().max(1)
        };
        let said = |turn: u32| lengths.get(at(turn)).copied().unwrap_or(TURN_TOKENS.0);
        (0..turns.turns)
            .map(|turn| u64::from(said(turn) + DECODED_TOKENS))
            .sum()
    };
    let longest = (0..turns.sessions).map(of_session).max();
    u64::from(COMMON_TOKENS) + longest.unwrap_or(0)
}

/// Tokens of one turn behind `history`, and whether the prompt has the rest that is wanted now.
fn turn_tokens(draw: u64, history: u32, (modulus, rest): (u32, u32)) -> (u32, bool) {
    let (least, most) = TURN_TOKENS;
    let drawn = least + (draw % u64::from(most - least + 1)) as u32;
    let fits = |tokens: &u32| (history + tokens) % modulus == rest;
    // The nearest one from the drawn number on, around the range.
    let found = (drawn..=most).chain(least..drawn).find(fits);
    (found.unwrap_or(drawn), found.is_some())
}

/// A third of the turns follows its conversation's former one directly, a third with 2 to 4 others between,
/// the rest with 10 or more, as far as there are others.
pub(crate) fn order_of(seed: u64, sessions: u32, turns: u32) -> Vec<Turn> {
    let mut done = vec![0_u32; sessions as usize];
    let mut due: Vec<(u64, u32)> = Vec::new();
    let mut begun = 0;
    let mut order = Vec::new();
    for step in 0..u64::from(sessions) * u64::from(turns) {
        due.sort_unstable();
        let session = match due.first() {
            Some(&(at, session)) if at <= step || begun == sessions => {
                due.remove(0);
                session
            }
            _ => {
                begun += 1;
                begun - 1
            }
        };
        let turn = done[session as usize];
        done[session as usize] += 1;
        order.push(Turn { session, turn });
        if turn + 1 < turns {
            let draw = mix(seed, step, 11);
            let between = match draw % 3 {
                0 => 0,
                1 => 2 + (draw >> 8) % 3,
                _ => 10 + (draw >> 8) % 4,
            };
            due.push((step + 1 + between, session));
        }
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(seed: u64) -> Plan {
        Plan::new(
            seed,
            20,
            4,
            &[],
            &PromptSource::open(None, seed, 320).unwrap(),
        )
    }

    #[test]
    fn every_turn_comes_once_and_in_its_place() {
        let plan = plan(1);
        let mut next = [0_u32; 20];
        for turn in plan.order() {
            assert_eq!(turn.turn, next[turn.session as usize]);
            next[turn.session as usize] += 1;
        }
        assert_eq!(next, [4; 20]);
    }

    #[test]
    fn follow_ups_come_at_once_soon_and_late() {
        let order = plan(1).order().to_vec();
        let at = |wanted: Turn| order.iter().position(|turn| *turn == wanted).unwrap();
        let mut counts = [0; 3];
        for (here, turn) in order.iter().enumerate().filter(|(_, turn)| turn.turn > 0) {
            let before = at(Turn {
                turn: turn.turn - 1,
                ..*turn
            });
            match here - before - 1 {
                0 | 1 => counts[0] += 1,
                2..=9 => counts[1] += 1,
                _ => counts[2] += 1,
            }
        }
        assert!(counts.iter().all(|count| *count >= 10), "{counts:?}");
    }

    #[test]
    fn prompts_end_beside_every_kind_of_group() {
        let plan = plan(3);
        let mut lengths = Vec::new();
        for session in 0..20 {
            let mut tokens = COMMON_TOKENS;
            for turn in 0..4 {
                let said = plan.said(Turn { session, turn }).len() as u32;
                assert!((260..=340).contains(&said));
                tokens += said;
                lengths.push(tokens);
                tokens += DECODED_TOKENS;
            }
        }
        for (modulus, rest) in RESTS {
            let is_there = lengths.iter().any(|length| length % modulus == rest);
            assert!(is_there, "no prompt of {rest} mod {modulus}");
        }
    }
}
