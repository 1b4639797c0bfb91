//! Waiting, and the descriptor that a program polls instead.
//!
//! Everything that can be waited for is asked with a waker. While a call blocks, the waker is the calling
//! thread; when its time is over, the question is left with the agent's descriptor as the waker. So
//! whatever was answered with "not yet" makes the descriptor readable once the answer may have changed.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use kvgate_transfer::Deadline;
use rustix::event::{EventfdFlags, eventfd};

use crate::status::{Failure, Outcome, kv_status};

/// The eventfd of an agent.
pub(crate) struct EventFd {
    file: OwnedFd,
}

impl EventFd {
    pub(crate) fn new() -> Outcome<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let file = eventfd(0, flags).map_err(|errno| {
            let message = format!("eventfd failed with errno {}", errno.raw_os_error());
            Failure::new(kv_status::System, message)
        })?;
        Ok(Self { file })
    }

    pub(crate) fn number(&self) -> i32 {
        self.file.as_raw_fd()
    }

    /// Makes the descriptor readable.
    pub(crate) fn signal(&self) {
        // A full counter is readable already.
        let _ = rustix::io::write(&self.file, &1_u64.to_ne_bytes());
    }
}

impl Wake for EventFd {
    fn wake(self: Arc<Self>) {
        self.signal();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.signal();
    }
}

/// Wakes a thread that waits in a call.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

thread_local! {
    static THREAD_WAKER: Waker = Waker::from(Arc::new(Unpark(std::thread::current())));
}

/// Asks until there is an answer. `None` when `timeout_ms` is over first; then `later` is woken when
/// asking again may help.
pub(crate) fn wait_for<T>(
    timeout_ms: u64,
    later: &Waker,
    mut ask: impl FnMut(&mut Context<'_>) -> Poll<T>,
) -> Option<T> {
    if timeout_ms > 0 {
        let deadline = Deadline::after_ms(timeout_ms);
        let thread = THREAD_WAKER
            .try_with(Waker::clone)
            .unwrap_or_else(|_| Waker::from(Arc::new(Unpark(std::thread::current()))));
        let mut context = Context::from_waker(&thread);
        while !deadline.has_passed() {
            if let Poll::Ready(answer) = ask(&mut context) {
                return Some(answer);
            }
            std::thread::park_timeout(deadline.remaining());
        }
    }
    match ask(&mut Context::from_waker(later)) {
        Poll::Ready(answer) => Some(answer),
        Poll::Pending => None,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    fn is_readable(fd: &EventFd) -> bool {
        let mut count = [0; 8];
        rustix::io::read(&fd.file, &mut count).is_ok()
    }

    #[test]
    fn a_question_without_an_answer_is_left_with_the_descriptor() {
        let fd = Arc::new(EventFd::new().unwrap());
        let waker = Waker::from(fd.clone());
        let kept = Mutex::new(None);
        let answer = wait_for(0, &waker, |context| {
            *kept.lock().unwrap() = Some(context.waker().clone());
            Poll::<()>::Pending
        });
        assert!(answer.is_none() && !is_readable(&fd));
        kept.into_inner().unwrap().unwrap().wake();
        assert!(is_readable(&fd) && !is_readable(&fd), "reading clears it");
    }

    #[test]
    fn a_waiting_thread_is_woken() {
        let (fd, is_done) = (Arc::new(EventFd::new().unwrap()), AtomicBool::new(false));
        let waker = Waker::from(fd.clone());
        let answer = std::thread::scope(|scope| {
            wait_for(60_000, &waker, |context| {
                if is_done.load(Ordering::Acquire) {
                    return Poll::Ready(3);
                }
                let (waker, is_done) = (context.waker().clone(), &is_done);
                scope.spawn(move || {
                    is_done.store(true, Ordering::Release);
                    waker.wake();
                });
                Poll::Pending
            })
        });
        assert_eq!(answer, Some(3));
        assert!(!is_readable(&fd));
    }
}
