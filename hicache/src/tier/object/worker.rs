//! The thread that the client of the store runs on, with the only runtime of this crate.

use std::pin::Pin;

use kvgate_transfer::Deadline;
use kvgate_transfer::sync::{Arc, Condvar, Mutex, thread};
use tokio::runtime::Builder;
use tokio::sync::mpsc::{self, UnboundedSender};

type Job = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A thread with a runtime. It ends with this, and with it whatever it still does.
pub(super) struct Worker {
    /// `None` only while it ends.
    jobs: Option<UnboundedSender<Job>>,
    thread: Option<thread::JoinHandle<()>>,
}

/// Where a job leaves what it has found.
struct Slot<T> {
    answer: Mutex<Option<T>>,
    is_there: Condvar,
}

impl Worker {
    /// Starts the thread.
    ///
    /// # Errors
    /// The system's, when it has no thread or no descriptor left.
    pub(super) fn start() -> std::io::Result<Worker> {
        let runtime = Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()?;
        let (jobs, mut next) = mpsc::unbounded_channel::<Job>();
        let run = move || {
            runtime.block_on(async move {
                while let Some(job) = next.recv().await {
                    tokio::spawn(job);
                }
            });
            // A look-up of a name that hangs is left behind; nobody waits for it.
            runtime.shutdown_background();
        };
        let thread = thread::Builder::new()
            .name("kvgate-object".to_owned())
            .spawn(run)?;
        Ok(Worker {
            jobs: Some(jobs),
            thread: Some(thread),
        })
    }

    /// Runs `work` and answers what comes of it; `None` at the deadline, when it is given up.
    pub(super) fn run<T: Send + 'static>(
        &self,
        deadline: Deadline,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Option<T> {
        if deadline.has_passed() {
            return None;
        }
        let slot = Arc::new(Slot {
            answer: Mutex::new(None),
            is_there: Condvar::new(),
        });
        let (filled, until) = (slot.clone(), deadline.instant());
        let job = async move {
            // The other side stops waiting at the same moment.
            if let Ok(answer) = tokio::time::timeout_at(until.into(), work).await {
                let mut slot = filled.answer.lock();
                *slot = Some(answer);
                filled.is_there.notify_one();
            }
        };
        self.jobs.as_ref()?.send(Box::pin(job)).ok()?;
        let mut answer = slot.answer.lock();
        while answer.is_none() {
            if slot.is_there.wait_until(&mut answer, until) {
                break;
            }
        }
        answer.take()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // It ends at once: its jobs are dropped, not awaited.
            let _ended_or_panicked = thread.join();
        }
    }
}
