//! Two classes of operations, and whose turn it is.

use std::collections::VecDeque;

/// Foreground items that may pass a waiting background item before it gets its turn.
pub(crate) const TURNS: u32 = 16;

/// Which operations of one peer go first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Somebody waits for the bytes: hand-offs, loads.
    #[default]
    Foreground,
    /// Nobody waits: backups, prefetches. Goes when nothing of the foreground is queued, at the latest after
    /// 16 items of it; not in order with [`crate::Agent::send`].
    Background,
}

/// Two lines, each first in, first out.
#[derive(Debug)]
pub(crate) struct Classes<T> {
    foreground: VecDeque<T>,
    background: VecDeque<T>,
    /// Foreground items that have passed the first of the background.
    passed_count: u32,
}

impl<T> Default for Classes<T> {
    fn default() -> Self {
        Self {
            foreground: VecDeque::new(),
            background: VecDeque::new(),
            passed_count: 0,
        }
    }
}

impl<T> Classes<T> {
    pub(crate) fn is_empty(&self) -> bool {
        self.foreground.is_empty() && self.background.is_empty()
    }

    pub(crate) fn push(&mut self, item: T, priority: Priority) {
        self.line(priority).push_back(item);
    }

    /// The item whose turn it is; it keeps its place.
    pub(crate) fn front(&self) -> Option<&T> {
        match self.turn() {
            Priority::Foreground => self.foreground.front(),
            Priority::Background => self.background.front(),
        }
    }

    /// Takes the item whose turn it is.
    pub(crate) fn pop(&mut self) -> Option<T> {
        let turn = self.take_turn();
        self.line(turn).pop_front()
    }

    /// The turn of the front item is over. Answers whose it was.
    pub(crate) fn take_turn(&mut self) -> Priority {
        let turn = self.turn();
        self.passed_count = match turn {
            Priority::Background => 0,
            Priority::Foreground if self.background.is_empty() => self.passed_count,
            Priority::Foreground => self.passed_count + 1,
        };
        turn
    }

    /// Takes everything out, the foreground first.
    /// All items, the foreground first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.foreground.iter().chain(&self.background)
    }

    pub(crate) fn take_all(&mut self) -> Vec<T> {
        let all = std::mem::take(self);
        all.foreground.into_iter().chain(all.background).collect()
    }

    fn turn(&self) -> Priority {
        let is_its_turn = self.foreground.is_empty() || self.passed_count >= TURNS;
        match is_its_turn && !self.background.is_empty() {
            true => Priority::Background,
            false => Priority::Foreground,
        }
    }

    fn line(&mut self, priority: Priority) -> &mut VecDeque<T> {
        match priority {
            Priority::Foreground => &mut self.foreground,
            Priority::Background => &mut self.background,
        }
    }
}

// What only backends use; the model checker compiles none of them.
impl<T> Classes<T> {
    pub(crate) fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        self.foreground.retain(&keep);
        self.background.retain(&keep);
    }
}

#[cfg(not(kv_loom))]
impl<T> Classes<T> {
    /// Takes the first item of a class.
    pub(crate) fn pop_of(&mut self, priority: Priority) -> Option<T> {
        self.line(priority).pop_front()
    }
}

#[cfg(all(test, not(kv_loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_background_waits_for_the_foreground_but_not_for_ever() {
        let mut classes = Classes::default();
        classes.push(0, Priority::Background);
        (1..=TURNS + 2).for_each(|number| classes.push(number, Priority::Foreground));
        let order: Vec<u32> = std::iter::from_fn(|| classes.pop()).collect();
        let expected: Vec<u32> = (1..=TURNS).chain([0, TURNS + 1, TURNS + 2]).collect();
        assert_eq!(order, expected);
        assert!(classes.is_empty());
    }

    #[test]
    fn a_front_that_stays_gives_the_turn_away_all_the_same() {
        let mut classes = Classes::default();
        classes.push('f', Priority::Foreground);
        classes.push('b', Priority::Background);
        let order: Vec<Option<char>> = (0..=TURNS + 1)
            .map(|_| {
                let front = classes.front().copied();
                classes.take_turn();
                front
            })
            .collect();
        assert!(
            order[..TURNS as usize]
                .iter()
                .all(|front| *front == Some('f'))
        );
        assert_eq!(order[TURNS as usize..], [Some('b'), Some('f')]);
        classes.retain(|item| *item != 'f');
        assert_eq!(classes.pop(), Some('b'));
    }
}
