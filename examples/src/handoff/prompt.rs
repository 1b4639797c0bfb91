//! The prompts: a built-in chat with tool definitions, or a text file; and one variation per request.

use std::fs;
use std::path::Path;

use super::failure::{Failure, FailureKind};
use super::options::PromptOptions;

/// Ids of `dsv4-bytes`: byte b is b + 3, control tokens follow the bytes.
const FIRST_BYTE_ID: u32 = 3;
const BOS: u32 = 0;
const EOS: u32 = 1;
const USER: u32 = 259;
const ASSISTANT: u32 = 260;
const THINK_END: u32 = 262;
const DSML_OPEN: u32 = 271;
const DSML_CLOSE: u32 = 272;

/// A piece of the built-in chat.
enum Piece {
    Control(u32),
    Text(&'static str),
}

use Piece::{Control, Text};

/// The built-in chat. With one token per byte it has [`BUILT_IN_TOKENS`] tokens, so that every kind of
/// page and state row is live at its end: N mod 4 = 3, and N mod 128 = 99 lets the open group of
/// 128 close within the 64 tokens of a default run.
const CHAT: &[Piece] = &[
    Control(BOS),
    Text(include_str!("prompt_system.txt")),
    Control(USER),
    Text("Good evening. Is it dry enough to open tonight, and how much wind do we have?"),
    Control(ASSISTANT),
    Control(THINK_END),
    Control(DSML_OPEN),
    Text("call name=\"read_sensor\">{\"sensor\":\"humidity_percent\",\"samples\":5}"),
    Control(DSML_CLOSE),
    Control(EOS),
    Control(USER),
    Text("{\"sensor\":\"humidity_percent\",\"values\":[61.2,61.4,61.1,61.3,61.2],\"ok\":true}"),
    Control(ASSISTANT),
    Control(THINK_END),
    Text("The humidity is 61 percent and steady, so the dome may open. The wind comes next."),
    Control(EOS),
    Control(USER),
    Text(
        "Then take three frames of M 57 in L, 120 seconds each, named m57-001 to m57-003, and close the dome \
         if the wind goes above 12 m/s. Between the frames read the wind once more. At the end list every file \
         with its exposure time, the wind at its start and the sky quality, one line per file, no extra words.",
    ),
    Control(ASSISTANT),
    Control(THINK_END),
];

/// Length of the built-in chat.
pub const BUILT_IN_TOKENS: u32 = 2_147;

/// The text that every request of a run is cut from.
#[derive(Clone, Debug)]
pub struct PromptSource {
    ids: Vec<u32>,
    seed: u64,
    vocab_size: u32,
}

impl PromptSource {
    /// Reads `file`, or takes the built-in chat. Ids that the model does not have are folded into its
    /// vocabulary (the small fixtures have fewer than 320 rows).
    pub fn open(file: Option<&Path>, seed: u64, vocab_size: u32) -> Result<Self, Failure> {
        let ids = match file {
            None => built_in(),
            Some(path) => encode_file(path)?,
        };
        if vocab_size == 0 {
            return Err(Failure::input("vocab_size", 0, "at least 1"));
        }
        Ok(Self {
            ids: ids.into_iter().map(|id| id % vocab_size).collect(),
            seed,
            vocab_size,
        })
    }

    /// The text of a run: ids as given, a file, or the built-in chat.
    pub fn of(options: &PromptOptions, seed: u64, vocab_size: u32) -> Result<Self, Failure> {
        let Some(given) = &options.given else {
            return Self::open(options.prompt_file.as_deref(), seed, vocab_size);
        };
        if let Some(id) = given
            .prompt
            .iter()
            .chain(&given.steps)
            .find(|id| **id >= vocab_size)
        {
            return Err(Failure::input(
                "ids",
                id,
                &format!("an id below vocab_size = {vocab_size}"),
            ));
        }
        if given.prompt.is_empty() {
            return Err(Failure::input("ids", 0, "at least one prompt id"));
        }
        Ok(Self {
            ids: given.prompt.clone(),
            seed,
            vocab_size,
        })
    }

    /// Tokens of the text.
    #[must_use]
    pub fn token_count(&self) -> u32 {
        u32::try_from(self.ids.len()).unwrap_or(u32::MAX)
    }

    /// The prompt of a request: the first `tokens` of the text, which is repeated as often as needed.
    /// Request 0 has the text itself; every other one starts at another place and has some letters of
    /// its own, so that no two requests have the same prompt.
    #[must_use]
    pub fn prompt(&self, request: u32, tokens: u32) -> Vec<u32> {
        let start = if request == 0 {
            0
        } else {
            mix(self.seed, u64::from(request), 0) % self.ids.len() as u64
        };
        let repeated = self
            .ids
            .iter()
            .cycle()
            .skip(start as usize)
            .take(tokens as usize);
        let mut ids: Vec<u32> = repeated.copied().collect();
        if request != 0 {
            for (index, id) in ids.iter_mut().enumerate() {
                let draw = mix(self.seed, u64::from(request), index as u64 + 1);
                if draw.is_multiple_of(16) {
                    let letter = b'a' + ((draw >> 8) % 26) as u8;
                    *id = (u32::from(letter) + FIRST_BYTE_ID) % self.vocab_size;
                }
            }
        }
        ids
    }
}

/// A draw of 64 bits from three numbers (the finaliser of SplitMix64 over a running sum).
#[must_use]
pub fn mix(seed: u64, a: u64, b: u64) -> u64 {
    let mut state = 0_u64;
    for word in [seed, a, b] {
        state = state.wrapping_add(word).wrapping_add(0x9e37_79b9_7f4a_7c15);
        state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        state ^= state >> 31;
    }
    state
}

fn built_in() -> Vec<u32> {
    let mut ids = Vec::new();
    for piece in CHAT {
        match piece {
            Control(id) => ids.push(*id),
            Text(text) => ids.extend(encode_bytes(text)),
        }
    }
    ids
}

fn encode_bytes(text: &str) -> impl Iterator<Item = u32> {
    text.bytes().map(|byte| u32::from(byte) + FIRST_BYTE_ID)
}

fn encode_file(path: &Path) -> Result<Vec<u32>, Failure> {
    let refuse = |what: String| {
        Failure::new(
            FailureKind::BadInput,
            format!("--prompt-file {}: {what}", path.display()),
        )
        .with_field("prompt_file", path.display())
    };
    let bytes = fs::read(path).map_err(|error| refuse(error.to_string()))?;
    let text =
        String::from_utf8(bytes).map_err(|error| refuse(format!("not UTF-8 text: {error}")))?;
    if text.is_empty() {
        return Err(refuse(
            "empty, expected at least one byte of text".to_owned(),
        ));
    }
    Ok(encode_bytes(&text).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_chat_has_the_length_that_its_comment_claims() {
        let source = PromptSource::open(None, 1, 320).unwrap();
        assert_eq!(source.token_count(), BUILT_IN_TOKENS);
        assert_eq!((BUILT_IN_TOKENS % 4, BUILT_IN_TOKENS % 128), (3, 99));
    }

    #[test]
    fn a_file_is_bytes_plus_three_without_bos_and_is_repeated() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("prompt.txt");
        fs::write(&path, "aé").unwrap();
        let source = PromptSource::open(Some(&path), 1, 320).unwrap();
        assert_eq!(
            source.prompt(0, 5),
            [100, 0xc3 + 3, 0xa9 + 3, 100, 0xc3 + 3]
        );
        fs::write(&path, [0xff]).unwrap();
        assert!(PromptSource::open(Some(&path), 1, 320).is_err());
        fs::write(&path, "").unwrap();
        assert!(PromptSource::open(Some(&path), 1, 320).is_err());
    }

    #[test]
    fn requests_have_different_prompts_inside_the_vocabulary() {
        let source = PromptSource::open(None, 7, 160).unwrap();
        let prompts: std::collections::BTreeSet<_> = (0..200)
            .map(|request| source.prompt(request, 300))
            .collect();
        assert_eq!(prompts.len(), 200);
        assert!(prompts.iter().flatten().all(|&id| id < 160));
    }
}
