//! One end of a simulated session, as its engine sees it.

use bytes::Bytes;

use super::session::{Frame, Item, tell};
use super::{Net, What};
use crate::{
    Arrival,
    backend::{Access, BackendKind, Caps, Link, LinkEvents, Posted, PostedOp, Quiesce, RemoteRun},
    engine::{Op, session::Session},
    error::{Error, ErrorKind},
    ids::PeerId,
    sync::Arc,
    visibility::Visibility,
};

pub(super) struct SessionLink {
    pub(super) net: Arc<Net>,
    pub(super) end: usize,
}

impl SessionLink {
    fn sent(&self) -> Result<Arc<Session<(), Item, String>>, Error> {
        let state = self.net.state.lock();
        let session = state.ends[self.end].session.as_ref();
        session.map(|session| session.sent.clone()).ok_or_else(|| {
            let reason = "the connection has ended".to_owned();
            ErrorKind::PeerLost { reason }.into()
        })
    }

    fn push(&self, item: Item) -> Result<(), Error> {
        self.sent()?.push(item).ok_or(ErrorKind::Closed)?;
        self.pump()
    }

    fn pump(&self) -> Result<(), Error> {
        let sent = self.sent()?;
        let ears = self.net.receiver(self.end);
        let send = |(connection, ()): (u64, &()), number: u64, item: &Item, is_again: bool| {
            let op = match item {
                Item::Write(op) => Some(op),
                Item::Message(_) => None,
            };
            if let (true, Some((peer, events))) = (is_again, &ears) {
                if let Some(op) = op {
                    op.landing.repeated();
                }
                events.sent_again(*peer, op.map(|op| op.id));
            }
            let runs = op.map_or(Vec::new(), |op| op.runs.remote());
            if let Some(op) = op {
                op.landing.begun_again_to(slot_count(&runs));
            }
            self.carry(connection, (number, item), runs.len());
            true
        };
        sent.pump(send, |item, refusal| {
            if let Some((peer, events)) = &ears {
                tell(*peer, &**events, item, refusal);
            }
        });
        Ok(())
    }

    /// Puts an item on the wire, now and then twice. What no wire carries is lost.
    fn carry(&self, connection: u64, (number, item): (u64, &Item), run_count: usize) {
        let (net, end) = (&self.net, self.end);
        let mut state = net.state.lock();
        if !state.carries(end, connection) {
            return;
        }
        let is_doubled = state.happens(net.faults.duplicate_per_mille);
        state.counts.duplicated += u64::from(is_doubled);
        for is_copy in [false, true].into_iter().take(1 + usize::from(is_doubled)) {
            let begins = state.moments(end, 0, &net.faults).1;
            let (moments, until) = state.moments(end, run_count, &net.faults);
            let frame = Frame::Begin {
                number,
                item: item.clone(),
                is_copy,
                moments,
                until,
            };
            state.schedule(begins, end, What::Session(frame));
        }
    }

    /// Asks for what was not asked for over the connection that stands.
    fn ask(&self) -> Result<(), Error> {
        let Some((connection, ())) = self.sent()?.connection() else {
            return Ok(());
        };
        let mut again = Vec::new();
        {
            let mut state = self.net.state.lock();
            let Some(session) = &mut state.ends[self.end].session else {
                return Ok(());
            };
            let mut asked = Vec::new();
            for (op, over) in session.reads.values_mut() {
                if std::mem::replace(over, connection) != connection {
                    asked.push(op.clone());
                }
            }
            for op in asked {
                again.push(op.id);
                if state.carries(self.end, connection) {
                    let (_, at) = state.moments(self.end, 0, &self.net.faults);
                    state.schedule(at, self.end, What::Session(Frame::Read { op }));
                }
            }
        }
        if let Some((peer, events)) = self.net.receiver(self.end).filter(|_| connection > 1) {
            again
                .into_iter()
                .for_each(|op| events.sent_again(peer, Some(op)));
        }
        Ok(())
    }

    /// Something that is not kept.
    fn send_if_up(&self, what: What) -> Result<(), Error> {
        let connection = self.sent()?.connection();
        let mut state = self.net.state.lock();
        if connection.is_some_and(|(number, ())| state.carries(self.end, number)) {
            let (_, at) = state.moments(self.end, 0, &self.net.faults);
            state.schedule(at, self.end, what);
        }
        Ok(())
    }
}

fn slot_count(runs: &[RemoteRun]) -> u64 {
    runs.iter().map(|run| u64::from(run.slot_count)).sum()
}

impl Link for SessionLink {
    fn start(&self, peer: PeerId, events: Arc<dyn LinkEvents>) -> Result<(), Error> {
        let mut state = self.net.state.lock();
        if state.ends[self.end].is_closed {
            return Err(ErrorKind::Closed.into());
        }
        state.ends[self.end].receiver = Some((peer, events));
        Ok(())
    }

    fn kind(&self) -> BackendKind {
        BackendKind::Sim
    }

    fn caps(&self) -> Caps {
        Caps {
            completion: Visibility::RemoteVisible,
            max_descriptors: u64::MAX,
            arrival_in_band: true,
            access: Access::Checked,
        }
    }

    fn post(&self, op: &PostedOp) -> Result<Posted, Error> {
        op.landing.begun_to(0);
        let op = Arc::new(op.clone());
        match op.op {
            Op::Write => self.push(Item::Write(op))?,
            Op::Read => {
                op.landing.begun_to(slot_count(&op.runs.remote()));
                self.sent()?;
                if let Some(session) = &mut self.net.state.lock().ends[self.end].session {
                    session.reads.insert(op.id, (op.clone(), 0));
                }
                self.ask()?;
            }
        }
        Ok(Posted::Pending)
    }

    fn announce(&self, arrival: &Arrival, level: Visibility) -> Result<(), Error> {
        let arrival = arrival.clone();
        self.send_if_up(What::Arrive { arrival, level })
    }

    fn send(&self, message: &[u8]) -> Result<(), Error> {
        self.push(Item::Message(Bytes::copy_from_slice(message)))
    }

    fn send_progress(&self, counter: u64) -> Result<(), Error> {
        self.send_if_up(What::Progress(counter))
    }

    fn keeps_messages(&self) -> bool {
        true
    }

    fn unsent_messages(&self) -> usize {
        let is_message = |item: &Item| matches!(item, Item::Message(_));
        self.sent().map_or(0, |sent| sent.unsent_count(is_message))
    }

    fn go_on(&self) {
        // Fails only when the session is over, and then everything is.
        let _ = self.pump().and_then(|()| self.ask());
    }

    fn quiesce(&self) -> Quiesce {
        self.net.state.lock().ends[self.end].quiesce.clone()
    }

    fn close(&self) {
        self.net.close(self.end);
    }
}
