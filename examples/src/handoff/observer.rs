//! Whom a role tells about itself while it runs: the launcher, or the console of a side on its own host.

use super::channel::ChannelSender;
use super::console::{self, Console};
use super::control::{FromRole, Progress};

/// Told by a role from several threads.
pub trait Observer: Send + Sync {
    /// The decode side listens at `address`.
    fn listening(&self, address: &str);
    /// The side has come so far.
    fn progress(&self, progress: Progress);
    /// The process runs.
    fn alive(&self);
}

/// A role under a launcher.
#[derive(Debug)]
pub struct Supervised {
    control: ChannelSender,
}

impl Supervised {
    /// Tells the launcher at the other end of `control`.
    #[must_use]
    pub fn new(control: ChannelSender) -> Self {
        Self { control }
    }

    fn tell(&self, message: &FromRole) {
        // A launcher that is gone ends this role by the end of its control socket, not by this error.
        let _ = self.control.send(message);
    }
}

impl Observer for Supervised {
    fn listening(&self, address: &str) {
        self.tell(&FromRole::Listening {
            address: address.to_owned(),
        });
    }

    fn progress(&self, progress: Progress) {
        self.tell(&FromRole::Progress(progress));
    }

    fn alive(&self) {
        self.tell(&FromRole::Alive);
    }
}

/// A side on its own host.
#[derive(Debug)]
pub struct Alone {
    console: std::sync::Arc<Console>,
}

impl Alone {
    /// Shows its progress on `console`.
    #[must_use]
    pub fn new(console: std::sync::Arc<Console>) -> Self {
        Self { console }
    }
}

impl Observer for Alone {
    fn listening(&self, address: &str) {
        console::print(&format!("listening {address}"));
    }

    fn progress(&self, progress: Progress) {
        self.console.progress(progress);
    }

    fn alive(&self) {}
}

/// The moments that the kill test aims at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The sides find each other.
    Handshake,
    /// The first prompt is computed.
    Prefill,
    /// The first pages are under way.
    Transfer,
    /// The first token is decoded.
    Decode,
    /// Logits and rows are compared.
    Comparison,
}

/// Prints `phase NAME` once per phase, if asked to.
#[derive(Debug, Default)]
pub struct PhaseMarkers {
    is_on: bool,
    seen: std::sync::atomic::AtomicU8,
}

impl PhaseMarkers {
    /// Markers of one process.
    #[must_use]
    pub fn new(is_on: bool) -> Self {
        Self {
            is_on,
            seen: std::sync::atomic::AtomicU8::new(0),
        }
    }

    /// This process enters `phase`.
    pub fn enter(&self, phase: Phase) {
        let (bit, name) = match phase {
            Phase::Handshake => (1, "handshake"),
            Phase::Prefill => (2, "prefill"),
            Phase::Transfer => (4, "transfer"),
            Phase::Decode => (8, "decode"),
            Phase::Comparison => (16, "comparison"),
        };
        if self.is_on
            && self
                .seen
                .fetch_or(bit, std::sync::atomic::Ordering::Relaxed)
                & bit
                == 0
        {
            console::note(&format!("phase {name}"));
        }
    }
}
