//! Signs of life: while a thread computes, a ticker says so to whoever waits for this process.
//!
//! A forward pass over a long chunk can take longer than a deadline, and a peer cannot tell it from a
//! stopped process. So the ticker reports as long as somebody is inside [`Activity::busy`]; a thread that
//! waits is not busy, and two sides that wait for each other therefore run into their deadlines.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

/// How often the ticker speaks.
const TICK: Duration = Duration::from_millis(100);

/// Who computes, in one process.
#[derive(Debug, Default)]
pub struct Activity {
    busy_count: AtomicU32,
    pulsed: AtomicBool,
}

/// Counts its thread as busy until it is dropped.
#[derive(Debug)]
#[must_use = "the thread counts as busy only while this value lives"]
pub struct Busy<'a> {
    activity: &'a Activity,
}

impl Activity {
    /// Starts a ticker, which ends when the last handle is dropped. It calls `alive` at every tick, and
    /// `progress` when somebody was busy or a pulse came since the last one.
    pub fn start(
        alive: impl Fn() + Send + 'static,
        progress: impl Fn() + Send + 'static,
    ) -> std::io::Result<Arc<Self>> {
        let activity = Arc::new(Self::default());
        let weak: Weak<Self> = Arc::downgrade(&activity);
        thread::Builder::new()
            .name("activity".to_owned())
            .spawn(move || {
                while let Some(activity) = weak.upgrade() {
                    alive();
                    let has_pulsed = activity.pulsed.swap(false, Ordering::Relaxed);
                    if has_pulsed || activity.busy_count.load(Ordering::Relaxed) > 0 {
                        progress();
                    }
                    drop(activity);
                    thread::sleep(TICK);
                }
            })?;
        Ok(activity)
    }

    /// From now on the calling thread computes.
    pub fn busy(&self) -> Busy<'_> {
        self.busy_count.fetch_add(1, Ordering::Relaxed);
        Busy { activity: self }
    }

    /// Whether somebody computes now.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.busy_count.load(Ordering::Relaxed) > 0
    }

    /// Something moved on, once.
    pub fn pulse(&self) {
        self.pulsed.store(true, Ordering::Relaxed);
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.activity.busy_count.fetch_sub(1, Ordering::Relaxed);
        self.activity.pulse();
    }
}
