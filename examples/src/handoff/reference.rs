//! The run to compare with: every request computed by one process from its prompt to its last token.
//!
//! It is a process of its own, takes jobs from the decode side over a socket, and answers each with the
//! logits and with digests of the cache rows. It knows nothing of agents, flights or gates.

use std::collections::{BTreeMap, VecDeque};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, TryRecvError};
use std::thread;
use std::time::Duration;

use kvgate_model::Logits;
use serde::{Deserialize, Serialize};

use super::activity::Activity;
use super::channel::{self, ChannelReceiver, ChannelSender};
use super::compare::{Outcome, RowDigests};
use super::failure::Failure;
use super::model::Host;
use super::mono::{Mono, Sequence};
use super::observer::Observer;
use super::options::HostOptions;
use super::plan::RunPlan;
use super::sampling::arg_max;

/// Tokens per forward pass here, whatever the prefill side takes: the bits do not depend on it.
const CHUNK_TOKENS: usize = 256;

/// From decode to the reference.
#[derive(Debug, Serialize, Deserialize)]
pub enum ToReference {
    /// Compute this request; the prompt ids are the tail, four bytes each.
    Job {
        /// From 0.
        request: u32,
        /// Tokens to decode.
        steps: u32,
        /// Fed instead of what the model says.
        fed_ids: Option<Vec<u32>>,
        /// The conversation that it is a turn of.
        conversation: Option<Going>,
    },
    /// The request was aborted; nobody needs its logits.
    Cancel {
        /// From 0.
        request: u32,
    },
}

/// A conversation that goes on from turn to turn.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Going {
    /// Which one.
    pub session: u32,
    /// Tokens that it has at the most.
    pub tokens: u32,
}

/// From the reference to decode.
#[derive(Debug, Serialize, Deserialize)]
pub enum FromReference {
    /// It computes.
    Progress,
    /// A request is done; the logits are the tail, four bytes each.
    Done {
        /// From 0.
        request: u32,
        /// M ids.
        output_ids: Vec<u32>,
        /// Rows after the prompt.
        landed_rows: Vec<RowDigests>,
        /// Rows after the last step.
        final_rows: Vec<RowDigests>,
    },
    /// It cannot go on.
    Failed(Failure),
}

struct Job {
    request: u32,
    steps: u32,
    fed_ids: Option<Vec<u32>>,
    conversation: Option<Going>,
    prompt_ids: Vec<u32>,
}

/// A conversation as far as it was computed, without a cache that anybody else uses.
struct Conversation<'a> {
    sequence: Sequence<'a>,
    ids: Vec<u32>,
}

/// Serves jobs until the decode side closes the socket.
pub fn serve(
    options: &HostOptions,
    link: UnixStream,
    observer: Arc<dyn Observer>,
) -> Result<(), Failure> {
    let deadline = Duration::from_millis(options.deadline_ms);
    let (sender, receiver) = channel::split(link, deadline)
        .map_err(|error| Failure::internal(format!("job socket: {error}")))?;
    let progress = sender.clone();
    // A decode side that is gone is found by the end of its socket.
    let tell = move || drop(progress.send(&FromReference::Progress));
    let activity = Activity::start(move || observer.alive(), tell)
        .map_err(|error| Failure::internal(format!("cannot start a thread: {error}")))?;
    let served = serve_jobs(options, &sender, receiver, &activity);
    if let Err(failure) = &served {
        let _ = sender.send(&FromReference::Failed(failure.clone()));
    }
    served
}

fn serve_jobs(
    options: &HostOptions,
    sender: &ChannelSender,
    receiver: ChannelReceiver,
    activity: &Activity,
) -> Result<(), Failure> {
    let inbox = read_jobs(receiver)?;
    let loading = activity.busy();
    let host = Host::load(options)?;
    drop(loading);
    let mut mono = Mono::new(&host);
    let mut conversations = BTreeMap::new();
    let mut queue = VecDeque::new();
    while take_messages(&inbox, &mut queue) {
        let Some(job) = queue.pop_front() else {
            continue;
        };
        let busy = activity.busy();
        let outcome = match job.conversation {
            None => {
                let tokens = job.prompt_ids.len() as u32 + job.steps;
                compute(&mut mono.begin(tokens)?, &job, &job.prompt_ids)?
            }
            Some(going) => go_on(&host, &mut conversations, going, &job)?,
        };
        drop(busy);
        let logits: Vec<u8> = outcome
            .logits
            .iter()
            .flat_map(|logit| logit.to_le_bytes())
            .collect();
        let done = FromReference::Done {
            request: job.request,
            output_ids: outcome.output_ids,
            landed_rows: outcome.landed_rows,
            final_rows: outcome.final_rows,
        };
        if sender.send_with(&done, &logits).is_err() {
            return Ok(());
        }
    }
    Ok(())
}

enum Order {
    Job(Job),
    Cancel(u32),
}

fn read_jobs(mut receiver: ChannelReceiver) -> Result<Receiver<Order>, Failure> {
    let (orders, inbox) = mpsc::channel();
    let body = move || {
        while let Ok(Some((message, tail))) = receiver.receive::<ToReference>() {
            let order = match message {
                ToReference::Job {
                    request,
                    steps,
                    fed_ids,
                    conversation,
                } => Order::Job(Job {
                    request,
                    steps,
                    fed_ids,
                    conversation,
                    prompt_ids: ids_of(&tail),
                }),
                ToReference::Cancel { request } => Order::Cancel(request),
            };
            if orders.send(order).is_err() {
                return;
            }
        }
    };
    thread::Builder::new()
        .name("jobs".to_owned())
        .spawn(body)
        .map_err(|error| Failure::internal(format!("cannot start a thread: {error}")))?;
    Ok(inbox)
}

/// Moves what has arrived into the queue, and waits if the queue is empty. `false` at the end.
fn take_messages(inbox: &Receiver<Order>, queue: &mut VecDeque<Job>) -> bool {
    loop {
        let order = match inbox.try_recv() {
            Ok(order) => order,
            Err(TryRecvError::Empty) if !queue.is_empty() => return true,
            Err(TryRecvError::Empty) => match inbox.recv() {
                Ok(order) => order,
                Err(_) => return false,
            },
            Err(TryRecvError::Disconnected) => return false,
        };
        match order {
            Order::Job(job) => queue.push_back(job),
            Order::Cancel(request) => queue.retain(|job| job.request != request),
        }
    }
}

/// Computes a turn behind what was computed of its conversation. A prompt that does not begin with that is
/// computed from its first token.
fn go_on<'a>(
    host: &'a Host,
    conversations: &mut BTreeMap<u32, Conversation<'a>>,
    going: Going,
    job: &Job,
) -> Result<Outcome, Failure> {
    let known = conversations
        .remove(&going.session)
        .filter(|known| job.prompt_ids.starts_with(&known.ids));
    let mut known = match known {
        Some(known) => known,
        None => Conversation {
            sequence: Mono::new(host).begin(going.tokens)?,
            ids: Vec::new(),
        },
    };
    let new_ids = job.prompt_ids.get(known.ids.len()..).unwrap_or_default();
    let outcome = compute(&mut known.sequence, job, new_ids)?;
    known.ids = [&job.prompt_ids[..], &outcome.output_ids].concat();
    conversations.insert(going.session, known);
    Ok(outcome)
}

/// Computes `new_ids`, the end of the prompt, and the answer.
fn compute(sequence: &mut Sequence<'_>, job: &Job, new_ids: &[u32]) -> Result<Outcome, Failure> {
    let prompt_tokens = job.prompt_ids.len() as u32;
    let mut last = Vec::new();
    for (index, ids) in new_ids.chunks(CHUNK_TOKENS).enumerate() {
        let is_last = (index + 1) * CHUNK_TOKENS >= new_ids.len();
        last = sequence.forward(ids, if is_last { Logits::Last } else { Logits::None })?;
    }
    let mut outcome = Outcome {
        landed_rows: sequence.row_digests(prompt_tokens)?,
        ..Outcome::default()
    };
    let mut token = arg_max(&last);
    for step in 0..job.steps as usize {
        token = job
            .fed_ids
            .as_ref()
            .and_then(|fed| fed.get(step).copied())
            .unwrap_or(token);
        outcome.output_ids.push(token);
        let logits = sequence.forward(&[token], Logits::Last)?;
        token = arg_max(&logits);
        outcome.logits.extend_from_slice(&logits);
    }
    outcome.final_rows = sequence.row_digests(prompt_tokens + job.steps)?;
    Ok(outcome)
}

fn ids_of(bytes: &[u8]) -> Vec<u32> {
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|id| u32::from_le_bytes(*id))
        .collect()
}

/// The side of the decode process.
#[derive(Debug)]
pub struct ReferenceLink {
    sender: ChannelSender,
}

/// What the decode process hears.
#[derive(Debug)]
pub enum ReferenceEvent {
    /// It computes.
    Progress,
    /// A request is done.
    Done(u32, Outcome),
    /// It has ended, with its own reason if it had one.
    Ended(Option<Failure>),
}

impl ReferenceLink {
    /// Connects; events go to `deliver` on a thread of its own.
    pub fn start(
        link: UnixStream,
        deadline: Duration,
        deliver: impl Fn(ReferenceEvent) + Send + 'static,
    ) -> Result<Self, Failure> {
        let (sender, mut receiver) = channel::split(link, deadline)
            .map_err(|error| Failure::internal(format!("job socket: {error}")))?;
        let body = move || {
            let mut reason = None;
            while let Ok(Some((message, tail))) = receiver.receive::<FromReference>() {
                match message {
                    FromReference::Progress => deliver(ReferenceEvent::Progress),
                    FromReference::Done {
                        request,
                        output_ids,
                        landed_rows,
                        final_rows,
                    } => {
                        let logits = tail
                            .as_chunks()
                            .0
                            .iter()
                            .map(|bits| f32::from_le_bytes(*bits))
                            .collect();
                        deliver(ReferenceEvent::Done(
                            request,
                            Outcome {
                                output_ids,
                                logits,
                                landed_rows,
                                final_rows,
                            },
                        ));
                    }
                    FromReference::Failed(failure) => reason = Some(failure),
                }
            }
            deliver(ReferenceEvent::Ended(reason));
        };
        thread::Builder::new()
            .name("reference".to_owned())
            .spawn(body)
            .map_err(|error| Failure::internal(format!("cannot start a thread: {error}")))?;
        Ok(Self { sender })
    }

    /// Asks for a request.
    pub fn submit(
        &self,
        request: u32,
        plan: &RunPlan,
        conversation: Option<Going>,
        prompt_ids: &[u32],
    ) {
        let tail: Vec<u8> = prompt_ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let job = ToReference::Job {
            request,
            steps: plan.steps,
            fed_ids: plan.fed_ids.clone(),
            conversation,
        };
        // A reference that is gone is reported by its own event.
        let _ = self.sender.send_with(&job, &tail);
    }

    /// Nobody needs this request any more.
    pub fn cancel(&self, request: u32) {
        let _ = self.sender.send(&ToReference::Cancel { request });
    }
}

impl Drop for ReferenceLink {
    /// The reference ends with its job socket.
    fn drop(&mut self) {
        self.sender.close();
    }
}
