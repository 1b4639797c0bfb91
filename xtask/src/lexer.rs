//! A small lexer for Rust sources: enough to tell code from comments and strings.

/// A piece of code with the line it stands on, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Token<'a> {
    pub(crate) kind: Kind,
    pub(crate) text: &'a str,
    pub(crate) line: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Identifiers and keywords, without a leading `r#`.
    Word,
    /// The inside of a string or character literal, escapes as written.
    Text,
    /// Numbers and lifetimes.
    Other,
    /// One punctuation character, or one of `::`, `=>`, `||`, `&&`.
    Mark,
}

impl Token<'_> {
    pub(crate) fn is(&self, text: &str) -> bool {
        self.kind != Kind::Text && self.text == text
    }
}

/// Splits a source into tokens; comments and white space are dropped.
pub(crate) fn tokens(source: &str) -> Vec<Token<'_>> {
    let mut lexer = Lexer {
        source,
        at: 0,
        line: 1,
    };
    let mut found = Vec::new();
    while let Some(token) = lexer.next_token() {
        found.push(token);
    }
    found
}

struct Lexer<'a> {
    source: &'a str,
    at: usize,
    line: usize,
}

impl<'a> Lexer<'a> {
    fn rest(&self) -> &'a str {
        &self.source[self.at..]
    }

    /// Moves on by `bytes` and keeps count of the lines.
    fn take(&mut self, bytes: usize) -> &'a str {
        let taken = &self.source[self.at..self.at + bytes];
        self.at += bytes;
        self.line += taken.matches('\n').count();
        taken
    }

    fn next_token(&mut self) -> Option<Token<'a>> {
        self.skip_blank();
        let rest = self.rest();
        let first = rest.chars().next()?;
        let line = self.line;
        let (kind, text) = if let Some((open, close)) = string_bounds(rest) {
            let whole = self.take(close);
            let hashes = whole.len() - whole.trim_end_matches('#').len();
            let inner_end = whole.len().saturating_sub(hashes + 1).max(open);
            (Kind::Text, &whole[open..inner_end])
        } else if first == '\'' {
            self.quote()
        } else if is_word_start(first) {
            let raw = rest
                .strip_prefix("r#")
                .is_some_and(|r| r.starts_with(is_word_start));
            if raw {
                self.take(2);
            }
            let length = run_length(self.rest(), is_word);
            (Kind::Word, self.take(length))
        } else if first.is_ascii_digit() {
            let length = run_length(rest, is_word);
            (Kind::Other, self.take(length))
        } else {
            let double = ["::", "=>", "||", "&&"]
                .iter()
                .any(|mark| rest.starts_with(mark));
            (
                Kind::Mark,
                self.take(if double { 2 } else { first.len_utf8() }),
            )
        };
        Some(Token { kind, text, line })
    }

    fn skip_blank(&mut self) {
        loop {
            let rest = self.rest();
            let blank = run_length(rest, char::is_whitespace);
            if blank > 0 {
                self.take(blank);
            } else if rest.starts_with("//") {
                self.take(rest.find('\n').unwrap_or(rest.len()));
            } else if rest.starts_with("/*") {
                self.take(block_comment_length(rest));
            } else {
                return;
            }
        }
    }

    /// A character literal or a lifetime.
    fn quote(&mut self) -> (Kind, &'a str) {
        let rest = self.rest();
        let after = &rest[1..];
        let end = match after.chars().next() {
            Some('\\') => after[2..].find('\'').map(|at| at + 2),
            Some(c) if after[c.len_utf8()..].starts_with('\'') => Some(c.len_utf8()),
            _ => None,
        };
        match end {
            Some(end) => {
                let whole = self.take(end + 2);
                (Kind::Text, &whole[1..=end])
            }
            None => {
                let length = 1 + run_length(after, is_word);
                (Kind::Other, self.take(length))
            }
        }
    }
}

/// For a string literal at the start: where its inside begins and where the literal ends.
fn string_bounds(rest: &str) -> Option<(usize, usize)> {
    let prefix = ["br", "cr", "b", "c", "r", ""].into_iter().find(|prefix| {
        rest.strip_prefix(prefix)
            .is_some_and(|r| r.starts_with('"') || (prefix.ends_with('r') && raw_start(r)))
    })?;
    let body = &rest[prefix.len()..];
    let hashes = body.len() - body.trim_start_matches('#').len();
    let open = prefix.len() + hashes + 1;
    let inside = &rest[open..];
    let inner = if prefix.ends_with('r') {
        let close = format!("\"{}", "#".repeat(hashes));
        inside.find(&close).unwrap_or(inside.len())
    } else {
        escaped_length(inside)
    };
    Some((open, (open + inner + 1 + hashes).min(rest.len())))
}

fn raw_start(rest: &str) -> bool {
    rest.starts_with('#') && rest.trim_start_matches('#').starts_with('"')
}

/// Bytes up to the closing quote of a string with escapes.
fn escaped_length(inside: &str) -> usize {
    let mut escaped = false;
    for (at, c) in inside.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at,
            _ => {}
        }
    }
    inside.len()
}

fn block_comment_length(rest: &str) -> usize {
    let mut depth = 0_usize;
    let mut at = 0;
    while at < rest.len() {
        if rest[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += rest[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    rest.len()
}

fn run_length(text: &str, belongs: impl Fn(char) -> bool) -> usize {
    text.find(|c| !belongs(c)).unwrap_or(text.len())
}

fn is_word_start(c: char) -> bool {
    c == '_' || c.is_alphabetic()
}

fn is_word(c: char) -> bool {
    c == '_' || c.is_alphanumeric()
}

/// Leaves out what stands in `#[cfg(test)] mod … { … }`.
pub(crate) fn without_tests<'a>(all: &[Token<'a>]) -> Vec<Token<'a>> {
    let opening = ["#", "[", "cfg", "(", "test", ")", "]", "mod"];
    let mut kept = Vec::new();
    let mut at = 0;
    while at < all.len() {
        let is_tests = opening
            .iter()
            .enumerate()
            .all(|(offset, text)| all.get(at + offset).is_some_and(|token| token.is(text)));
        if is_tests {
            at = end_of_block(all, at + opening.len());
        } else {
            kept.push(all[at]);
            at += 1;
        }
    }
    kept
}

/// The position after the block, or after the `;`, that follows.
fn end_of_block(all: &[Token<'_>], from: usize) -> usize {
    let mut depth = 0_usize;
    for (at, token) in all.iter().enumerate().skip(from) {
        if token.is("{") {
            depth += 1;
        } else if token.is("}") {
            depth = depth.saturating_sub(1);
            if depth == 0 {
                return at + 1;
            }
        } else if token.is(";") && depth == 0 {
            return at + 1;
        }
    }
    all.len()
}

/// Splits an identifier into lower-case words: `LayerView_id2` is `layer`, `view`, `id2`.
pub(crate) fn words_of(identifier: &str) -> Vec<String> {
    let mut words: Vec<String> = Vec::new();
    let mut after_lower = false;
    for c in identifier.chars() {
        if c == '_' {
            after_lower = false;
            words.push(String::new());
            continue;
        }
        if words.is_empty() || (c.is_uppercase() && after_lower) {
            words.push(String::new());
        }
        after_lower = !c.is_uppercase();
        if let Some(word) = words.last_mut() {
            word.extend(c.to_lowercase());
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(source: &str) -> Vec<&str> {
        tokens(source)
            .into_iter()
            .filter(|t| t.kind == Kind::Word)
            .map(|t| t.text)
            .collect()
    }

    #[test]
    fn comments_and_strings_are_not_code() {
        let source = r####"
            let a = "page // \" unsafe"; // unsafe
            /* unsafe /* nested unsafe */ */ let b = r#"raw " unsafe"#; let c = b"x\\"; let d = br"\";
            let e = '"'; let f = '\''; let g: &'static str = r#type;
        "####;
        assert_eq!(
            words(source),
            [
                "let", "a", "let", "b", "let", "c", "let", "d", "let", "e", "let", "f", "let", "g",
                "str", "type"
            ]
        );
    }

    #[test]
    fn the_inside_of_strings_is_kept_as_text() {
        let texts: Vec<_> = tokens(r##"cfg(feature = "sim", r#"a"b"#, '\n')"##)
            .into_iter()
            .filter(|t| t.kind == Kind::Text)
            .map(|t| t.text)
            .collect();
        assert_eq!(texts, ["sim", "a\"b", "\\n"]);
    }

    #[test]
    fn lines_are_counted_through_comments_and_strings() {
        let source = "/* one\ntwo */ \"three\nfour\" five";
        let last = tokens(source).pop().unwrap();
        assert_eq!((last.text, last.line), ("five", 3));
    }

    #[test]
    fn identifiers_are_split_into_words() {
        assert_eq!(words_of("LayerView_id2"), ["layer", "view", "id2"]);
        assert_eq!(words_of("__page_bytes"), ["page", "bytes"]);
        assert_eq!(words_of("PAGE_BYTES"), ["page", "bytes"]);
        assert_eq!(words_of("percentage"), ["percentage"]);
    }
}
