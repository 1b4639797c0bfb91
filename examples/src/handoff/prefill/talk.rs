//! The conversations of a run: whose turn can be submitted, and what its prompt is.

use crate::handoff::turns::schedule::Plan;

/// Conversations as far as they have come.
pub(super) struct Talk {
    plan: Plan,
    /// What was said, by conversation: prompts and answers.
    histories: Vec<Vec<u32>>,
    /// Turns that are answered, by conversation.
    answered: Vec<u32>,
}

impl Talk {
    pub(super) fn new(plan: Plan) -> Talk {
        let sessions = plan.sessions();
        Talk {
            histories: vec![plan.common().to_vec(); sessions],
            answered: vec![0; sessions],
            plan,
        }
    }

    /// The prompt of a request: everything said so far, and the user's turn. `None` until the former turn of
    /// its conversation is answered.
    pub(super) fn prompt(&self, request: u32) -> Option<Vec<u32>> {
        let turn = *self.plan.order().get(request as usize)?;
        let session = turn.session as usize;
        if self.answered.get(session) != Some(&turn.turn) {
            return None;
        }
        let history = self.histories.get(session)?;
        Some([history, self.plan.said(turn)].concat())
    }

    /// The answer of a request is there, and part of its conversation.
    pub(super) fn answer(&mut self, request: u32, output_ids: &[u32]) {
        let Some(prompt) = self.prompt(request) else {
            return;
        };
        let session = self.plan.order()[request as usize].session as usize;
        self.histories[session] = [&prompt, output_ids].concat();
        self.answered[session] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handoff::prompt::PromptSource;
    use crate::handoff::turns::DECODED_TOKENS;

    #[test]
    fn a_turn_waits_for_the_answer_of_the_former_one_and_begins_with_it() {
        let source = PromptSource::open(None, 1, 320).unwrap();
        let plan = Plan::new(1, 1, 2, &[], &source);
        let mut talk = Talk::new(plan);
        let first = talk.prompt(0).unwrap();
        assert_eq!(talk.prompt(1), None);
        let answer = [7; DECODED_TOKENS as usize];
        talk.answer(0, &answer);
        assert_eq!(talk.prompt(0), None);
        let second = talk.prompt(1).unwrap();
        assert!(second.starts_with(&[&first[..], &answer].concat()));
    }
}
