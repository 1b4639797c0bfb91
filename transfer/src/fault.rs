//! Switches that break the guards on purpose, so that tests see the detectors fire.
//!
//! Without the feature `fault-injection` every question is answered "no" at compile time.

#[cfg(all(feature = "fault-injection", not(kv_loom)))]
pub use self::switches::*;

#[cfg(all(feature = "fault-injection", not(kv_loom)))]
mod switches {
    use crate::{
        barrier::waiters::Waiters,
        sync::{Arc, AtomicBool, Ordering},
    };

    /// A guard that can be switched off, for the whole process.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Switch {
        /// Tickets of any epoch are redeemed.
        NoEpochCheck,
        /// Completions of any level are redeemed.
        NoLevelCheck,
        /// Memory counts as quiet although operations are outstanding.
        NoQuiesceCheck,
        /// Every arrival is announced twice.
        DuplicateArrivals,
    }

    static SWITCHES: [AtomicBool; 4] = [const { AtomicBool::new(false) }; 4];

    /// Sets a switch.
    pub fn set(switch: Switch, on: bool) {
        SWITCHES[switch as usize].store(on, Ordering::Release);
    }

    fn is_on(switch: Switch) -> bool {
        SWITCHES[switch as usize].load(Ordering::Acquire)
    }

    pub(crate) fn no_epoch_check() -> bool {
        is_on(Switch::NoEpochCheck)
    }

    pub(crate) fn no_level_check() -> bool {
        is_on(Switch::NoLevelCheck)
    }

    pub(crate) fn no_quiesce_check() -> bool {
        is_on(Switch::NoQuiesceCheck)
    }

    pub(crate) fn duplicate_arrivals() -> bool {
        is_on(Switch::DuplicateArrivals)
    }

    /// Keeps posted operations from being executed until it is opened, as a slow network card would.
    #[derive(Debug)]
    pub struct HoldGate {
        state: Waiters<State>,
    }

    #[derive(Debug, Default)]
    struct State {
        is_open: bool,
        held: usize,
        listeners: Vec<Listener>,
    }

    struct Listener(Box<dyn FnOnce() + Send>);

    impl std::fmt::Debug for Listener {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Listener")
        }
    }

    impl HoldGate {
        /// A closed gate.
        pub fn new() -> Arc<Self> {
            Arc::new(Self {
                state: Waiters::new(State::default()),
            })
        }

        /// Lets the held operations go.
        pub fn open(&self) {
            let listeners = self.state.update(|state| {
                state.is_open = true;
                std::mem::take(&mut state.listeners)
            });
            for listener in listeners {
                (listener.0)();
            }
        }

        /// Operations that have reached the closed gate.
        pub fn held_count(&self) -> usize {
            self.state.with(|state| state.held)
        }

        /// Calls `wake` when the gate opens; `false` when it is open.
        pub(crate) fn hold(&self, wake: impl FnOnce() + Send + 'static) -> bool {
            self.state.update(|state| {
                if !state.is_open {
                    state.held += 1;
                    state.listeners.push(Listener(Box::new(wake)));
                }
                !state.is_open
            })
        }

        pub(crate) fn is_open(&self) -> bool {
            self.state.with(|state| state.is_open)
        }
    }
}

#[cfg(not(all(feature = "fault-injection", not(kv_loom))))]
mod off {
    pub(crate) const fn no_epoch_check() -> bool {
        false
    }
    pub(crate) const fn no_level_check() -> bool {
        false
    }
    pub(crate) const fn no_quiesce_check() -> bool {
        false
    }
    pub(crate) const fn duplicate_arrivals() -> bool {
        false
    }
}
#[cfg(not(all(feature = "fault-injection", not(kv_loom))))]
pub(crate) use off::*;
