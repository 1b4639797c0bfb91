//! Layers that may be touched: the only way to the address of a page.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;

use kvgate_kvcache::{AppendLease, ComponentView, LayerId, PageLease};
use kvgate_transfer::{Deadline, StageId};

use crate::arg::{self, Versioned};
use crate::cache::schema::{component_of, layer_of};
use crate::cache::write::WriteObject;
use crate::handle::{Handle, handle};
use crate::status::{Failure, Outcome, guard, kv_status};
use crate::wake::wait_for;

/// The right to read a sequence that is received, layer by layer, as far as its gates are open. It keeps the
/// slots: while it exists, they are not free, whatever became of the flight.
pub struct kv_read_lease {
    _opaque: (),
}

pub(crate) struct ReadObject {
    lease: PageLease,
    /// The right to append, if it was asked for.
    append: Option<Mutex<AppendLease>>,
    waker: Waker,
}

handle!(kv_read_lease => ReadObject, "read lease");

/// A layer that may be touched: to write, before it is committed, or to read, behind its gate.
///
/// Addresses that come from it are good until it is released. A program that keeps one longer reads or writes
/// what belongs to somebody else; the library cannot prevent that.
pub struct kv_layer {
    _opaque: (),
}

pub(crate) struct LayerObject {
    layer: LayerId,
    right: Right,
}

enum Right {
    Write(Arc<WriteObject>),
    Read(Arc<ReadObject>),
}

handle!(kv_layer => LayerObject, "layer");

/// What a read lease allows.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum kv_access {
    /// Reading.
    Read = 1,
    /// Reading, and writing rows behind those that landed. One lease of a flight at a time.
    Append = 2,
}

/// One page.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_page {
    /// `sizeof(struct kv_page)`; set it before the call.
    pub struct_bytes: u32,
    /// 1 when it may be written, 0 when only read.
    pub is_writable: u32,
    /// The first byte of the page.
    pub address: *mut c_void,
    /// Bytes from there that hold rows.
    pub length_bytes: u64,
    /// Pages that the sequence has of this component.
    pub page_count: u32,
    /// Number of the page in its pool, for kernels that take tables.
    pub pool_page: u32,
}

// SAFETY: `repr(C)`, numbers and a pointer, `struct_bytes` first.
unsafe impl Versioned for kv_page {
    const NAME: &'static str = "kv_page";
}

impl ReadObject {
    pub(crate) fn new(lease: PageLease, append: Option<AppendLease>, waker: Waker) -> Self {
        let append = append.map(Mutex::new);
        Self {
            lease,
            append,
            waker,
        }
    }
}

/// Waits until every component of a layer has landed, at most `timeout_ms`, and gives the layer out. Release
/// it with `kv_layer_release`.
///
/// `KV_STATUS_TIMED_OUT`: the gate is as it was, and the event descriptor of the agent becomes readable when it
/// may have opened. `KV_STATUS_FAILED` with the cause, for good. `KV_STATUS_NOT_ARMED`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_read_lease_layer(
    lease: *const kv_read_lease,
    layer: u32,
    timeout_ms: u64,
    answer: *mut *mut kv_layer,
) -> kv_status {
    guard(|| {
        let lease = kv_read_lease::open(lease)?;
        // SAFETY: the contract of the header.
        let out = unsafe { arg::out(answer, "answer")? };
        let layer = layer_of(layer)?;
        let (barrier, stage) = (lease.lease.barrier(), StageId(layer.0));
        match wait_for(timeout_ms, &lease.waker, |cx| barrier.poll(stage, cx)) {
            Some(answer) => answer?,
            None => return Err(Failure::timed_out(&format!("layer {layer}"), timeout_ms)),
        }
        // The witness itself; it is asked for again for every address.
        drop(lease.lease.layer(layer, Deadline::now())?);
        let right = Right::Read(lease);
        out.set(kv_layer::create(LayerObject { layer, right }));
        Ok(())
    })
}

/// Ends the handle; NULL is allowed. Layers that it gave out stay good until they are released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_read_lease_release(lease: *mut kv_read_lease) -> kv_status {
    guard(|| kv_read_lease::release(lease))
}

/// One page of a component of the layer. `component` is an `enum kv_component` that the layer has, `ordinal`
/// counts the pages of the sequence from 0 (see `struct kv_component_info`).
///
/// `KV_STATUS_FAILED` when the flight has failed since the layer was given out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_layer_page(
    layer: *const kv_layer,
    component: u32,
    ordinal: u32,
    page: *mut kv_page,
) -> kv_status {
    guard(|| {
        let object = kv_layer::open(layer)?;
        // SAFETY: the contract of the header.
        let out = unsafe { arg::versioned_out(page)? };
        let component = component_of(component)?;
        let (layer, page) = (object.layer, |view: Option<ComponentView<'_>>| {
            let absent = || Failure::argument(format!("layer {} has no {component}", object.layer));
            page_of(&view.ok_or_else(absent)?, ordinal)
        });
        out.set(match &object.right {
            Right::Write(lease) => {
                lease.with_layer(layer, |rows| page(rows.component(component)))?
            }
            Right::Read(lease) => {
                let ready = lease.lease.layer(layer, Deadline::now())?;
                match &lease.append {
                    None => page(ready.view().component(component))?,
                    Some(append) => {
                        let mut append = append.lock().unwrap_or_else(PoisonError::into_inner);
                        page(append.layer(&ready)?.component(component))?
                    }
                }
            }
        });
        Ok(())
    })
}

fn page_of(view: &ComponentView<'_>, ordinal: u32) -> Outcome<kv_page> {
    let table = view.table();
    let Some(&pool_page) = table.get(ordinal as usize) else {
        let (component, count) = (view.component(), table.len());
        let message = format!("the sequence has {count} pages of {component}, no page {ordinal}");
        return Err(Failure::argument(message));
    };
    let offset_bytes = u64::from(pool_page) * view.stride_bytes();
    Ok(kv_page {
        struct_bytes: size_of::<kv_page>() as u32,
        is_writable: u32::from(view.is_writable()),
        address: view.base_ptr().wrapping_add(offset_bytes as usize).cast(),
        length_bytes: view.used_bytes(),
        page_count: table.len() as u32,
        pool_page,
    })
}

/// Gives a layer back; NULL is allowed. Its addresses are no longer to be used.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kv_layer_release(layer: *mut kv_layer) -> kv_status {
    guard(|| kv_layer::release(layer))
}

impl LayerObject {
    /// A layer that `lease` counts as held.
    pub(crate) fn of_writer(lease: Arc<WriteObject>, layer: LayerId) -> *mut kv_layer {
        let right = Right::Write(lease);
        kv_layer::create(LayerObject { layer, right })
    }
}

impl Drop for LayerObject {
    fn drop(&mut self) {
        if let Right::Write(lease) = &self.right {
            lease.give_back(self.layer);
        }
    }
}
