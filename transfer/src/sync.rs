//! The one place that names `std::sync`, `parking_lot` or `loom`.
//!
//! Everything concurrent in this crate and in `kvgate-kvcache` imports from here, so that the same code
//! runs in production and, under `--cfg kv_loom`, inside the model checker. The two arms have the same
//! shape: locks without poison, a condition variable that waits on `&mut` guards, cells that are reached
//! through closures.
//!
//! What loom cannot do is left out on purpose: no weak references where it looks, no timed wait that expires (a deadline
//! under loom never passes), no statics but
//! the counters of ids.

pub use self::arm::*;
#[cfg(not(kv_loom))]
pub(crate) use std::sync::Weak;

/// An error source that can be shared by the clones of an error.
pub type SharedError = std::sync::Arc<dyn std::error::Error + Send + Sync>;

/// Shares `source` between clones of an error.
pub fn shared_error(source: impl std::error::Error + Send + Sync + 'static) -> SharedError {
    std::sync::Arc::new(source)
}

/// Numbers that are given out once in the life of the process, whoever asks. They order nothing, so the
/// model checker does not see them.
#[derive(Debug)]
pub(crate) struct ProcessNumbers(std::sync::atomic::AtomicU32);

impl ProcessNumbers {
    pub(crate) const fn new() -> Self {
        Self(std::sync::atomic::AtomicU32::new(0))
    }

    /// The first of `count` numbers in a row; `None` when there are not so many left.
    pub(crate) fn take(&self, count: u32) -> Option<u32> {
        use std::sync::atomic::Ordering::Relaxed;
        let more = |next: u32| next.checked_add(count);
        self.0.fetch_update(Relaxed, Relaxed, more).ok()
    }
}

/// `Arc<dyn Trait>` from a value. Loom's `Arc` does not coerce by itself.
#[cfg(not(kv_loom))]
#[macro_export]
#[doc(hidden)]
macro_rules! arc_dyn {
    ($value:expr => $object:ty) => {{
        let object: $crate::sync::Arc<$object> = $crate::sync::Arc::new($value);
        object
    }};
}

/// `Arc<dyn Trait>` from a value. Loom's `Arc` does not coerce by itself.
#[cfg(kv_loom)]
#[macro_export]
#[doc(hidden)]
macro_rules! arc_dyn {
    ($value:expr => $object:ty) => {{
        let object: ::std::sync::Arc<$object> = ::std::sync::Arc::new($value);
        $crate::sync::Arc::from_std(object)
    }};
}

#[cfg(not(kv_loom))]
mod arm {
    use std::time::Instant;

    pub use parking_lot::{Mutex, MutexGuard};
    pub use std::{
        sync::{Arc, atomic::*},
        thread,
    };

    /// A condition variable over [`Mutex`].
    #[derive(Debug, Default)]
    pub struct Condvar(parking_lot::Condvar);

    impl Condvar {
        /// A condition variable nobody waits on.
        pub fn new() -> Self {
            Self::default()
        }

        /// Sleeps until notified. May wake without a reason: call it in a loop.
        pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            self.0.wait(guard);
        }

        /// Sleeps until notified or until `until`; `true` when the time has passed.
        pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, until: Instant) -> bool {
            self.0.wait_until(guard, until).timed_out()
        }

        /// Wakes one sleeper. The caller holds the mutex.
        pub fn notify_one(&self) {
            self.0.notify_one();
        }

        /// Wakes every sleeper. The caller holds the mutex.
        pub fn notify_all(&self) {
            self.0.notify_all();
        }
    }

    /// A cell that is reached through closures, as in loom.
    #[derive(Debug, Default)]
    pub struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        /// A cell around `value`.
        pub fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        /// Hands a pointer for reading to `read`.
        pub fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
            read(self.0.get())
        }

        /// Hands a pointer for writing to `write`.
        pub fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
            write(self.0.get())
        }
    }
}

#[cfg(kv_loom)]
mod arm {
    use std::{
        ops::{Deref, DerefMut},
        time::Instant,
    };

    pub use loom::{
        cell::UnsafeCell,
        sync::{Arc, atomic::*},
        thread,
    };

    /// Loom's mutex without poison in the signatures.
    #[derive(Debug)]
    pub struct Mutex<T>(loom::sync::Mutex<T>);

    /// The guard of [`Mutex`]; empty only while a condition variable has it.
    #[derive(Debug)]
    pub struct MutexGuard<'a, T>(Option<loom::sync::MutexGuard<'a, T>>);

    impl<T> Mutex<T> {
        /// A mutex around `value`.
        pub fn new(value: T) -> Self {
            Self(loom::sync::Mutex::new(value))
        }

        /// Locks.
        pub fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(Some(unpoisoned(self.0.lock())))
        }

        /// The value, without locking.
        pub fn get_mut(&mut self) -> &mut T {
            unpoisoned(self.0.get_mut())
        }

        /// Takes the value out.
        pub fn into_inner(self) -> T {
            unpoisoned(self.0.into_inner())
        }
    }

    impl<T: Default> Default for Mutex<T> {
        fn default() -> Self {
            Self::new(T::default())
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;
        fn deref(&self) -> &T {
            self.0
                .as_ref()
                .expect("the guard is empty only inside wait")
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0
                .as_mut()
                .expect("the guard is empty only inside wait")
        }
    }

    /// A condition variable over [`Mutex`].
    #[derive(Debug)]
    pub struct Condvar(loom::sync::Condvar);

    impl Default for Condvar {
        fn default() -> Self {
            Self(loom::sync::Condvar::new())
        }
    }

    impl Condvar {
        /// A condition variable nobody waits on.
        pub fn new() -> Self {
            Self::default()
        }

        /// Sleeps until notified.
        pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            let inner = guard.0.take().expect("the guard is empty only inside wait");
            guard.0 = Some(unpoisoned(self.0.wait(inner)));
        }

        /// Sleeps until notified. Time does not pass in a model, so the answer is `false`.
        pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, _until: Instant) -> bool {
            self.wait(guard);
            false
        }

        /// Wakes one sleeper. The caller holds the mutex.
        pub fn notify_one(&self) {
            self.0.notify_one();
        }

        /// Wakes every sleeper. The caller holds the mutex.
        pub fn notify_all(&self) {
            self.0.notify_all();
        }
    }

    /// A panic inside a model has already failed it; the lock is as good as any.
    fn unpoisoned<G>(result: std::sync::LockResult<G>) -> G {
        result.unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}
