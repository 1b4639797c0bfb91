//! The first words on a connection: equal caches or nothing (I-15).

use kvgate_transfer::sync::Arc;
use kvgate_transfer::{Epoch, Incarnation, WriterRank};

use super::machine::{Foreign, MachineError, Speaker};
use super::wire::{Envelope, Message};
use crate::fingerprint::{FieldDifference, Fingerprint};
use crate::ids::{Attempt, Room};
use crate::plan::WriterLayers;
use crate::schema::CacheSchema;

/// What a peer said of itself; its schema is equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerHello {
    /// The life of its process.
    pub incarnation: Incarnation,
    /// Its place among the writers; 0 for a receiver.
    pub writer: WriterRank,
    /// Writers of a request.
    pub writer_count: u16,
    /// Layers that it delivers.
    pub layers: std::ops::Range<u16>,
}

/// What came of a greeting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GreetingState {
    /// The peer has not said what its cache looks like.
    Waiting,
    /// Pages may be exchanged.
    Welcome(PeerHello),
    /// They may not; this field differs.
    Refused(FieldDifference),
}

/// The greeting of one connection.
#[derive(Debug)]
pub struct Greeting {
    speaker: Speaker,
    peer: Incarnation,
    schema: Arc<CacheSchema>,
    ours: PeerHello,
    has_spoken: bool,
    state: GreetingState,
}

impl Greeting {
    /// A greeting between `ours` and the process behind a connection.
    pub fn new(schema: Arc<CacheSchema>, ours: PeerHello, peer: Incarnation) -> Greeting {
        Greeting {
            speaker: Speaker {
                incarnation: ours.incarnation,
                room: Room(0),
                attempt: Attempt(0),
            },
            peer,
            schema,
            ours,
            has_spoken: false,
            state: GreetingState::Waiting,
        }
    }

    /// What came of it so far.
    pub fn state(&self) -> &GreetingState {
        &self.state
    }

    /// Our Hello. Whoever connects says it first; the other side answers with its own.
    pub fn hello(&mut self) -> Vec<u8> {
        self.has_spoken = true;
        let PeerHello {
            writer,
            writer_count,
            layers,
            ..
        } = self.ours.clone();
        let message = Message::Hello {
            fingerprint: self.schema.fingerprint(),
            fields: self.schema.fields(),
            writer,
            writer_count,
            first_layer: layers.start,
            end_layer: layers.end,
        };
        self.speaker.say(Epoch(0), message)
    }

    /// Takes a message and answers what is to be sent.
    ///
    /// # Errors
    /// `Foreign` for another life of the peer; `OutOfTable` for a second Hello and for anything that is
    /// no greeting.
    pub fn handle(&mut self, envelope: &Envelope) -> Result<Option<Vec<u8>>, MachineError> {
        let event = envelope.message.name();
        if envelope.identity.incarnation != self.peer {
            let what = Foreign::Incarnation;
            return Err(MachineError::Foreign {
                what,
                message: event,
            });
        }
        let state = match self.state {
            GreetingState::Waiting => "waiting",
            GreetingState::Welcome(_) => "welcome",
            GreetingState::Refused(_) => "refused",
        };
        let out_of_table = MachineError::OutOfTable { state, event };
        match (&self.state, &envelope.message) {
            (
                GreetingState::Waiting,
                Message::Hello {
                    fingerprint,
                    fields,
                    writer,
                    writer_count,
                    first_layer,
                    end_layer,
                },
            ) => {
                let hello = PeerHello {
                    incarnation: self.peer,
                    writer: *writer,
                    writer_count: *writer_count,
                    layers: *first_layer..*end_layer,
                };
                Ok(self.compare(hello, fingerprint, fields))
            }
            // The peer's view: what is theirs there is ours here.
            (
                GreetingState::Waiting | GreetingState::Welcome(_),
                Message::HelloRefused {
                    field,
                    ours,
                    theirs,
                },
            ) => {
                self.state = GreetingState::Refused(FieldDifference {
                    field: field.clone(),
                    ours: theirs.clone(),
                    theirs: ours.clone(),
                });
                Ok(None)
            }
            _ => Err(out_of_table),
        }
    }

    fn compare(
        &mut self,
        hello: PeerHello,
        fingerprint: &Fingerprint,
        fields: &[(String, String)],
    ) -> Option<Vec<u8>> {
        match self.difference(fingerprint, fields) {
            None => {
                self.state = GreetingState::Welcome(hello);
                (!self.has_spoken).then(|| self.hello())
            }
            Some(difference) => {
                let FieldDifference {
                    field,
                    ours,
                    theirs,
                } = difference.clone();
                self.state = GreetingState::Refused(difference);
                let message = Message::HelloRefused {
                    field,
                    ours,
                    theirs,
                };
                Some(self.speaker.say(Epoch(0), message))
            }
        }
    }

    /// The fields decide; equal fields under another hash are a peer that hashes something else.
    fn difference(
        &self,
        fingerprint: &Fingerprint,
        fields: &[(String, String)],
    ) -> Option<FieldDifference> {
        let ours = self.schema.fingerprint();
        self.schema.first_difference(fields).or_else(|| {
            (*fingerprint != ours).then(|| FieldDifference {
                field: "fingerprint".to_owned(),
                ours: hex(&ours),
                theirs: hex(fingerprint),
            })
        })
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The writers of a request, if those that said hello deliver each layer exactly once.
///
/// # Errors
/// `Spec` names what is missing or there twice.
pub fn cover(hellos: &[PeerHello], layer_count: u16) -> Result<Vec<WriterLayers>, MachineError> {
    let refuse = |reason| Err(MachineError::Spec { reason });
    let mut writers: Vec<&PeerHello> = hellos.iter().collect();
    writers.sort_unstable_by_key(|hello| hello.writer);
    let are_counted = (0..).zip(&writers).all(|(rank, hello)| {
        hello.writer.0 == rank && usize::from(hello.writer_count) == hellos.len()
    });
    if !are_counted {
        return refuse("the ranks are not those of all writers, each once");
    }
    writers.sort_unstable_by_key(|hello| (hello.layers.start, hello.layers.end));
    let mut end = 0;
    for hello in &writers {
        if hello.layers.start != end || hello.layers.end < end {
            return refuse("a layer is delivered by no writer, or by two");
        }
        end = hello.layers.end;
    }
    if end != layer_count {
        return refuse("the writers deliver other layers than the cache has");
    }
    let layers = |hello: &&PeerHello| WriterLayers {
        rank: hello.writer,
        layers: hello.layers.clone(),
    };
    writers.sort_unstable_by_key(|hello| hello.writer);
    Ok(writers.iter().map(layers).collect())
}
