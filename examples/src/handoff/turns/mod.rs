//! Conversations of several turns over the tiers of the cache: every turn goes on behind the longest prefix that
//! the device pool, the host tier or a storage tier has, and is compared with a run without a cache. What is here is
//! what both sides know of them: who says what, how large the tiers are, and what is kept beyond the run.

#[cfg(feature = "object")]
mod object;
pub(crate) mod schedule;
pub(crate) mod sizes;
pub(crate) mod storage;

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::failure::Failure;

use schedule::Plan;

pub use storage::{Restore, StorageOptions};

/// Tokens that every turn decodes; they become part of the conversation.
pub(crate) const DECODED_TOKENS: u32 = 16;
/// Tokens that a user's turn may be given.
const MOST_TURN_TOKENS: u32 = 4_096;

/// How much a tier holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum TierPages {
    /// Everything that the run stores.
    #[default]
    Everything,
    /// A part of it: an eighth in the device pool, a half in the host tier.
    Small,
    /// So many logical pages.
    Pages(u32),
}

impl FromStr for TierPages {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "small" {
            return Ok(Self::Small);
        }
        match text.parse::<u32>() {
            Ok(pages) if pages > 0 => Ok(Self::Pages(pages)),
            _ => Err("expected small or a number of pages from 1".to_owned()),
        }
    }
}

/// Tokens that the users say, turn by turn, instead of the usual 300 or so.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnLengths(pub Vec<u32>);

impl FromStr for TurnLengths {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| match text.parse::<u32>() {
            Ok(tokens) if (1..=MOST_TURN_TOKENS).contains(&tokens) => Ok(tokens),
            _ => Err(format!("expected A..B or A,B,… of 1 to {MOST_TURN_TOKENS}")),
        };
        let lengths: Vec<u32> = match text.split_once("..") {
            Some((first, behind)) => (number(first)?..number(behind)?).collect(),
            None => text.split(',').map(number).collect::<Result<_, _>>()?,
        };
        if lengths.is_empty() {
            return Err(format!("{text} is empty"));
        }
        Ok(Self(lengths))
    }
}

/// What a run of conversations is asked to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnOptions {
    /// Conversations.
    pub sessions: u32,
    /// Turns of each.
    pub turns: u32,
    /// Of the turns, conversation by conversation, from the start again when there are more turns; empty: as usual.
    pub lengths: TurnLengths,
    /// Size of the device pool.
    pub device_pages: TierPages,
    /// Size of the host tier.
    pub host_pages: TierPages,
    /// What is kept beyond the run.
    pub storage: StorageOptions,
    /// A tier without a hit makes a run of several turns invalid.
    pub is_verified: bool,
}

/// The longest conversation must fit into the context of the model.
pub(crate) fn check_length(plan: &Plan, context_tokens: u32) -> Result<(), Failure> {
    check_tokens(u64::from(plan.longest_tokens()), context_tokens)
}

/// The same of its tokens.
pub(crate) fn check_tokens(longest: u64, context_tokens: u32) -> Result<(), Failure> {
    if longest <= u64::from(context_tokens) {
        return Ok(());
    }
    let expected = format!("at most {context_tokens} tokens at the end of a conversation");
    Err(Failure::input("turns", longest, &expected))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_of_turns_are_a_range_or_a_list() {
        assert_eq!("1..4".parse(), Ok(TurnLengths(vec![1, 2, 3])));
        assert_eq!("255,1".parse(), Ok(TurnLengths(vec![255, 1])));
        for text in ["", "0", "3..3", "1..", "9000", "1,x"] {
            assert!(text.parse::<TurnLengths>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_tier_is_small_or_has_a_number_of_pages() {
        assert_eq!("small".parse(), Ok(TierPages::Small));
        assert_eq!("7".parse(), Ok(TierPages::Pages(7)));
        for text in ["0", "-1", "big", ""] {
            assert!(text.parse::<TierPages>().is_err(), "{text}");
        }
    }
}
