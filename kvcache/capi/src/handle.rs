//! Handles: what C holds instead of a pointer.
//!
//! A handle has the type of a pointer, so that the C compiler tells kinds apart, and the value of a
//! number that is never given out twice. No handle is ever dereferenced: it is looked up, so one that
//! was released, never existed or is of another kind is an error and not undefined behaviour, and one
//! that another thread releases during a call stays good until that call ends.
//!
//! **What is protected by what.** One lock per kind guards its table; it is a leaf. Objects are dropped
//! with it free.

use std::collections::BTreeMap;
use std::ptr::without_provenance_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::status::{Failure, Outcome};

/// The next handle value. Starts behind what a small integer or an offset from NULL would be.
static NEXT: AtomicUsize = AtomicUsize::new(0x1_0000);
/// Values differ by this, so that they look like aligned pointers in a debugger.
const STEP: usize = 16;

/// The live objects of one kind, by handle value.
pub(crate) struct Table<T> {
    objects: RwLock<BTreeMap<usize, Arc<T>>>,
}

impl<T> Table<T> {
    pub(crate) const fn new() -> Self {
        Self {
            objects: RwLock::new(BTreeMap::new()),
        }
    }

    fn insert(&self, object: T) -> usize {
        let value = NEXT.fetch_add(STEP, Ordering::Relaxed);
        let mut objects = self.objects.write().unwrap_or_else(PoisonError::into_inner);
        objects.insert(value, Arc::new(object));
        value
    }

    fn find(&self, value: usize) -> Option<Arc<T>> {
        let objects = self.objects.read().unwrap_or_else(PoisonError::into_inner);
        objects.get(&value).cloned()
    }

    fn remove(&self, value: usize) -> Option<Arc<T>> {
        let mut objects = self.objects.write().unwrap_or_else(PoisonError::into_inner);
        objects.remove(&value)
    }
}

/// A C type that stands for objects of one Rust type.
pub(crate) trait Handle: Sized + 'static {
    type Object: Send + Sync + 'static;
    const NAME: &'static str;

    fn table() -> &'static Table<Self::Object>;

    /// A handle for a new object.
    fn create(object: Self::Object) -> *mut Self {
        without_provenance_mut(Self::table().insert(object))
    }

    /// The object behind a handle.
    fn open(handle: *const Self) -> Outcome<Arc<Self::Object>> {
        Self::table()
            .find(handle.addr())
            .ok_or_else(|| unknown::<Self>(handle))
    }

    /// Ends a handle; NULL is none. Whoever uses the object keeps it until then.
    fn release(handle: *mut Self) -> Outcome<()> {
        if handle.is_null() {
            return Ok(());
        }
        let object = Self::table().remove(handle.addr());
        object.map(drop).ok_or_else(|| unknown::<Self>(handle))
    }
}

fn unknown<H: Handle>(handle: *const H) -> Failure {
    match handle.is_null() {
        true => Failure::argument(format!("the {} is NULL", H::NAME)),
        false => Failure::argument(format!("{handle:p} is not the handle of a {}", H::NAME)),
    }
}

/// Says which Rust type stands behind a C type, and how messages call it.
macro_rules! handle {
    ($c_type:ident => $object:ty, $name:literal) => {
        impl $crate::handle::Handle for $c_type {
            type Object = $object;
            const NAME: &'static str = $name;

            fn table() -> &'static $crate::handle::Table<$object> {
                static TABLE: $crate::handle::Table<$object> = $crate::handle::Table::new();
                &TABLE
            }
        }
    };
}
pub(crate) use handle;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status::kv_status;

    struct Marble;
    handle!(Marble => u8, "marble");

    #[test]
    fn a_handle_is_good_from_its_making_to_its_release() {
        let marble = Marble::create(7);
        let held = Marble::open(marble).unwrap();
        Marble::release(marble).unwrap();
        assert_eq!(*held, 7, "a call under way keeps the object");
        let gone = Marble::open(marble).unwrap_err();
        assert_eq!(gone.status(), kv_status::InvalidArgument);
        assert_eq!(
            Marble::release(marble).unwrap_err().status(),
            kv_status::InvalidArgument
        );
        assert_ne!(Marble::create(8), marble, "no value comes back");
    }

    #[test]
    fn null_is_named_and_may_be_released() {
        let nothing = std::ptr::null_mut::<Marble>();
        assert!(format!("{:?}", Marble::open(nothing).unwrap_err()).contains("marble is NULL"));
        Marble::release(nothing).unwrap();
    }
}
