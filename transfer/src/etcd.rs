//! A directory of agents in etcd: who is there, and how to reach it.
//!
//! An agent publishes its [`Contact`] under its name, with a lease that a thread keeps alive; when the
//! process ends or hangs, the entry goes with the lease. Whoever looks for the name gets the contact and
//! connects by [`Agent::connect_to`], whose check of the incarnation catches an entry that is out of date:
//! the directory is a hint, and nothing about bytes depends on it. Only names and addresses go through etcd,
//! never anything per page.
//!
//! Spoken is the JSON form of the API of etcd 3.4 and later, over plain HTTP. `docs/wire.md` has the keys.

use std::fmt;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::agent::{Agent, Contact};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind};
use crate::sync::{Arc, Condvar, Mutex, thread};

/// Longest time for one request, within the caller's deadline.
const REQUEST: Duration = Duration::from_secs(5);
/// Time to take an entry back when its publication ends.
const FAREWELL: Duration = Duration::from_secs(1);
/// Between two looks for a name that is not there, at first and at most.
const PAUSES: [Duration; 2] = [Duration::from_millis(20), Duration::from_secs(1)];
/// The lease of a publication is renewed this often within its life.
const RENEWALS: u32 = 3;

/// A directory in etcd. A clone is the same one.
#[derive(Clone)]
pub struct Etcd {
    http: ureq::Agent,
    endpoints: Arc<Vec<String>>,
    prefix: String,
}

impl fmt::Debug for Etcd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Etcd")
            .field("endpoints", &self.endpoints)
            .field("prefix", &self.prefix)
            .finish_non_exhaustive()
    }
}

impl Etcd {
    /// The directory below `prefix` (such as `/kvgate/production/`) at one of `endpoints`
    /// (`http://HOST:PORT`), which are asked in their order. Connects to nobody yet.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] for no endpoint, and for one that is not plain HTTP.
    pub fn new<E: Into<String>>(
        endpoints: impl IntoIterator<Item = E>,
        prefix: impl Into<String>,
    ) -> Result<Self, Error> {
        let endpoints: Vec<String> = endpoints
            .into_iter()
            .map(|endpoint| endpoint.into().trim_end_matches('/').to_owned())
            .collect();
        let is_wrong = |endpoint: &&String| !endpoint.starts_with("http://");
        if endpoints.is_empty() || endpoints.iter().any(|endpoint| is_wrong(&endpoint)) {
            let wrong = endpoints.iter().find(is_wrong).cloned();
            return Err(ErrorKind::InvalidArgument {
                what: "etcd endpoint",
                value: wrong.unwrap_or_default(),
            }
            .into());
        }
        let config = ureq::Agent::config_builder().http_status_as_error(false);
        Ok(Self {
            http: config.build().into(),
            endpoints: Arc::new(endpoints),
            prefix: prefix.into(),
        })
    }

    /// Puts `contact` under its name, in the place of a former life of the agent, and keeps it there until
    /// the publication is dropped. An entry whose process is gone stays for `life` at most; whole seconds.
    ///
    /// # Errors
    /// [`ErrorKind::Directory`] (retryable), [`ErrorKind::DeadlineExceeded`]; [`ErrorKind::InvalidArgument`]
    /// for a life of less than a second; [`ErrorKind::System`] without a thread.
    pub fn publish(
        &self,
        contact: &Contact,
        life: Duration,
        deadline: Deadline,
    ) -> Result<Publication, Error> {
        if life < Duration::from_secs(1) {
            let (what, value) = ("life of an entry", format!("{life:?}"));
            return Err(ErrorKind::InvalidArgument { what, value }.into());
        }
        let entry = Entry {
            etcd: self.clone(),
            name: contact.name.clone(),
            text: contact.to_string(),
            life,
        };
        let lease = entry.put(deadline)?;
        Publication::keep(entry, lease)
    }

    /// The agent of that name, if it is there now.
    ///
    /// # Errors
    /// [`ErrorKind::Directory`] (retryable), also for an entry that is no contact;
    /// [`ErrorKind::DeadlineExceeded`].
    pub fn find(&self, name: &str, deadline: Deadline) -> Result<Option<Contact>, Error> {
        let body = json!({ "key": encoded(&self.key(name)) });
        let (endpoint, answer) = self.call("kv/range", &body, deadline)?;
        let Some(entry) = answer["kvs"].get(0) else {
            return Ok(None);
        };
        let value = entry["value"].as_str().unwrap_or_default();
        let text = STANDARD.decode(value).ok();
        let text = text.and_then(|bytes| String::from_utf8(bytes).ok());
        let contact = text.and_then(|text| text.parse().ok());
        contact.map(Some).ok_or_else(|| {
            let reason = format!("the entry of {name} is no contact");
            failed(&endpoint, reason)
        })
    }

    /// [`Etcd::find`], again and again until the agent is there. An etcd that does not answer is asked again
    /// as well.
    ///
    /// # Errors
    /// [`ErrorKind::DeadlineExceeded`] for an agent that does not come; the last error of
    /// [`Etcd::find`] when that was the reason.
    pub fn wait_for(&self, name: &str, deadline: Deadline) -> Result<Contact, Error> {
        let mut pause = PAUSES[0];
        loop {
            let found = self.find(name, deadline);
            if let Ok(Some(contact)) = found {
                return Ok(contact);
            }
            if deadline.remaining() <= pause {
                found?;
                return Err(too_late("entry of the agent", deadline));
            }
            thread::sleep(pause);
            pause = (pause * 2).min(PAUSES[1]);
        }
    }

    fn key(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// One call at the first endpoint that answers; which one did.
    fn call(&self, path: &str, body: &Value, deadline: Deadline) -> Result<(String, Value), Error> {
        let mut last = None;
        for endpoint in self.endpoints.iter() {
            let left = deadline.remaining().min(REQUEST);
            if left.is_zero() {
                return Err(last.unwrap_or_else(|| too_late("request to etcd", deadline)));
            }
            match self.call_one(endpoint, path, body, left) {
                Ok(answer) => return Ok((endpoint.clone(), answer)),
                Err(reason) => last = Some(failed(endpoint, reason)),
            }
        }
        Err(last.unwrap_or_else(|| ErrorKind::Closed.into()))
    }

    fn call_one(
        &self,
        endpoint: &str,
        path: &str,
        body: &Value,
        left: Duration,
    ) -> Result<Value, String> {
        let request = self.http.post(format!("{endpoint}/v3/{path}"));
        let request = request.config().timeout_global(Some(left)).build();
        let mut response = request.send_json(body).map_err(|error| error.to_string())?;
        let status = response.status();
        let answer: Result<Value, _> = response.body_mut().read_json();
        match (status.is_success(), answer) {
            (true, Ok(answer)) => Ok(answer),
            (true, Err(error)) => Err(error.to_string()),
            (false, Ok(answer)) => Err(format!("{status}: {}", answer["message"])),
            (false, Err(_)) => Err(status.to_string()),
        }
    }
}

/// What is kept in the directory.
struct Entry {
    etcd: Etcd,
    name: String,
    text: String,
    life: Duration,
}

impl Entry {
    /// Writes it with a lease of its own; which one.
    fn put(&self, deadline: Deadline) -> Result<String, Error> {
        let lease = json!({ "TTL": self.life.as_secs() });
        let (endpoint, granted) = self.etcd.call("lease/grant", &lease, deadline)?;
        let lease = granted["ID"].as_str().map(str::to_owned);
        let lease = lease.ok_or_else(|| failed(&endpoint, "a lease without a number"))?;
        let key = encoded(&self.etcd.key(&self.name));
        let put = json!({ "key": key, "value": encoded(&self.text), "lease": lease });
        self.etcd.call("kv/put", &put, deadline)?;
        Ok(lease)
    }

    /// Keeps a lease alive; `false` when it is over.
    fn renew(&self, lease: &str, deadline: Deadline) -> Result<bool, Error> {
        let body = json!({ "ID": lease });
        let (_, answer) = self.etcd.call("lease/keepalive", &body, deadline)?;
        let left = answer["result"]["TTL"].as_str();
        Ok(left.and_then(|left| left.parse::<i64>().ok()) > Some(0))
    }

    /// Takes it back, unless another life has taken its place.
    fn revoke(&self, lease: &str) {
        let body = json!({ "ID": lease });
        // Without an answer the entry ends with its life.
        let _ = self
            .etcd
            .call("lease/revoke", &body, Deadline::after(FAREWELL));
    }
}

/// An entry of the directory that stays as long as this. Dropping it takes the entry back, and blocks for that:
/// for the rest of a renewal that is under way (5 s at most), and for a second.
#[must_use = "the entry goes when this is dropped"]
pub struct Publication {
    shared: Arc<Shared>,
    keeper: Option<thread::JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    is_ending: bool,
    failure: Option<Error>,
}

impl fmt::Debug for Publication {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publication").finish_non_exhaustive()
    }
}

impl Publication {
    fn keep(entry: Entry, lease: String) -> Result<Self, Error> {
        let shared = Arc::new(Shared {
            state: Mutex::new(State::default()),
            changed: Condvar::new(),
        });
        let inside = Arc::clone(&shared);
        let keeper = thread::Builder::new()
            .name("kvgate-etcd".to_owned())
            .spawn(move || inside.keep(&entry, lease))
            .map_err(|error| ErrorKind::System {
                call: "clone",
                errno: error.raw_os_error().unwrap_or(libc::EAGAIN),
            })?;
        Ok(Self {
            shared,
            keeper: Some(keeper),
        })
    }

    /// Why the entry could not be renewed the last time; `None` while all is well. It is tried again, and an
    /// entry that was lost meanwhile is written anew.
    pub fn failure(&self) -> Option<Error> {
        self.shared.state.lock().failure.clone()
    }
}

impl Drop for Publication {
    fn drop(&mut self) {
        self.shared.end();
        if let Some(keeper) = self.keeper.take() {
            // A panic of the thread was reported by its own hook.
            let _ = keeper.join();
        }
    }
}

impl Shared {
    fn keep(&self, entry: &Entry, mut lease: String) {
        let interval = entry.life / RENEWALS;
        while !self.pause(interval) {
            let deadline = Deadline::after(interval);
            let renewed = match entry.renew(&lease, deadline) {
                Ok(true) => Ok(()),
                Ok(false) => entry.put(deadline).map(|new| lease = new),
                Err(error) => Err(error),
            };
            self.state.lock().failure = renewed.err();
        }
        entry.revoke(&lease);
    }

    fn end(&self) {
        let mut state = self.state.lock();
        state.is_ending = true;
        self.changed.notify_all();
    }

    /// Waits for `interval`; `true` when the publication ends.
    fn pause(&self, interval: Duration) -> bool {
        let until = Instant::now() + interval;
        let mut state = self.state.lock();
        while !state.is_ending {
            if self.changed.wait_until(&mut state, until) {
                return state.is_ending;
            }
        }
        true
    }
}

impl Agent {
    /// [`Etcd::publish`] of what [`Agent::contact`] says now: listen before. Addresses that listen
    /// everywhere have to be replaced first ([`Contact::advertised_at`]).
    ///
    /// # Errors
    /// As [`Etcd::publish`].
    pub fn publish(
        &self,
        etcd: &Etcd,
        life: Duration,
        deadline: Deadline,
    ) -> Result<Publication, Error> {
        etcd.publish(&self.contact(), life, deadline)
    }
}

fn encoded(text: &str) -> String {
    STANDARD.encode(text)
}

fn failed(endpoint: &str, reason: impl Into<String>) -> Error {
    ErrorKind::Directory {
        endpoint: endpoint.to_owned(),
        reason: reason.into(),
    }
    .into()
}

fn too_late(what: &'static str, deadline: Deadline) -> Error {
    let deadline_ms = deadline.allowed_ms();
    ErrorKind::DeadlineExceeded { what, deadline_ms }.into()
}
