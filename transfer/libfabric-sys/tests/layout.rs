//! Sizes and offsets of libfabric 1.17 on 64-bit Linux, as its compiler sees the headers.

#![cfg(target_pointer_width = "64")]

use std::mem::{offset_of, size_of};

use kvgate_libfabric_sys::*;

/// `type = size { field: offset, … }`
macro_rules! layout {
    ($($type:ident = $size:literal { $($field:ident: $offset:literal),* })*) => {
        #[test]
        fn sizes_and_offsets_are_those_of_the_header() {
            $(
                assert_eq!(size_of::<$type>(), $size, stringify!($type));
                $(assert_eq!(offset_of!($type, $field), $offset, "{}.{}", stringify!($type), stringify!($field));)*
            )*
        }
    };
}

layout! {
    fi_tx_attr = 80 { caps: 0, mode: 8, op_flags: 16, msg_order: 24, comp_order: 32, inject_size: 40, size: 48, iov_limit: 56, rma_iov_limit: 64, tclass: 72 }
    fi_rx_attr = 64 { caps: 0, mode: 8, op_flags: 16, msg_order: 24, comp_order: 32, total_buffered_recv: 40, size: 48, iov_limit: 56 }
    fi_ep_attr = 96 { type_: 0, protocol: 4, protocol_version: 8, max_msg_size: 16, msg_prefix_size: 24, max_order_raw_size: 32, max_order_war_size: 40, max_order_waw_size: 48, mem_tag_format: 56, tx_ctx_cnt: 64, rx_ctx_cnt: 72, auth_key_size: 80, auth_key: 88 }
    fi_domain_attr = 192 { domain: 0, name: 8, threading: 16, control_progress: 20, data_progress: 24, resource_mgmt: 28, av_type: 32, mr_mode: 36, mr_key_size: 40, cq_data_size: 48, cq_cnt: 56, ep_cnt: 64, tx_ctx_cnt: 72, rx_ctx_cnt: 80, max_ep_tx_ctx: 88, max_ep_rx_ctx: 96, max_ep_stx_ctx: 104, max_ep_srx_ctx: 112, cntr_cnt: 120, mr_iov_limit: 128, caps: 136, mode: 144, auth_key: 152, auth_key_size: 160, max_err_data: 168, mr_cnt: 176, tclass: 184 }
    fi_fabric_attr = 32 { fabric: 0, name: 8, prov_name: 16, prov_version: 24, api_version: 28 }
    fi_info = 120 { next: 0, caps: 8, mode: 16, addr_format: 24, src_addrlen: 32, dest_addrlen: 40, src_addr: 48, dest_addr: 56, handle: 64, tx_attr: 72, rx_attr: 80, ep_attr: 88, domain_attr: 96, fabric_attr: 104, nic: 112 }
    fi_ops = 56 { size: 0, close: 8, bind: 16, control: 24, ops_open: 32, tostr: 40, ops_set: 48 }
    fid = 24 { fclass: 0, context: 8, ops: 16 }
    fi_ops_fabric = 56 { size: 0, domain: 8, passive_ep: 16, eq_open: 24, wait_open: 32, trywait: 40, domain2: 48 }
    fid_fabric = 40 { fid: 0, ops: 24, api_version: 32 }
    fi_cq_entry = 8 { op_context: 0 }
    fi_cq_err_entry = 80 { op_context: 0, flags: 8, len: 16, buf: 24, data: 32, tag: 40, olen: 48, err: 56, prov_errno: 60, err_data: 64, err_data_size: 72 }
    fi_cq_attr = 40 { size: 0, flags: 8, format: 16, wait_obj: 20, signaling_vector: 24, wait_cond: 28, wait_set: 32 }
    fi_ops_cq = 64 { size: 0, read: 8, readfrom: 16, readerr: 24, sread: 32, sreadfrom: 40, signal: 48, strerror: 56 }
    fid_cq = 32 { fid: 0, ops: 24 }
    fi_av_attr = 48 { type_: 0, rx_ctx_bits: 4, count: 8, ep_per_node: 16, name: 24, map_addr: 32, flags: 40 }
    fi_ops_av = 64 { size: 0, insert: 8, insertsvc: 16, insertsym: 24, remove: 32, lookup: 40, straddr: 48, av_set: 56 }
    fid_av = 32 { fid: 0, ops: 24 }
    fid_mr = 40 { fid: 0, mem_desc: 24, key: 32 }
    fi_ops_domain = 96 { size: 0, av_open: 8, cq_open: 16, endpoint: 24, scalable_ep: 32, cntr_open: 40, poll_open: 48, stx_ctx: 56, srx_ctx: 64, query_atomic: 72, query_collective: 80, endpoint2: 88 }
    fi_ops_mr = 32 { size: 0, reg: 8, regv: 16, regattr: 24 }
    fid_domain = 40 { fid: 0, ops: 24, mr: 32 }
    fi_ops_ep = 64 { size: 0, cancel: 8, getopt: 16, setopt: 24, tx_ctx: 32, rx_ctx: 40, rx_size_left: 48, tx_size_left: 56 }
    fid_ep = 80 { fid: 0, ops: 24, cm: 32, msg: 40, rma: 48, tagged: 56, atomic: 64, collective: 72 }
    fi_ops_cm = 80 { size: 0, setname: 8, getname: 16, getpeer: 24, connect: 32, listen: 40, accept: 48, reject: 56, shutdown: 64, join: 72 }
    fi_ops_rma = 80 { size: 0, read: 8, readv: 16, readmsg: 24, write: 32, writev: 40, writemsg: 48, inject: 56, writedata: 64, injectdata: 72 }
}

/// Those that decide what a library does with a struct, from the text of the headers.
#[test]
fn constants_are_those_of_the_header() {
    assert_eq!((FI_MSG, FI_RMA), (1 << 1, 1 << 2));
    assert_eq!((FI_READ, FI_WRITE), (1 << 8, 1 << 9));
    assert_eq!((FI_RECV, FI_TRANSMIT), (1 << 10, 1 << 11));
    assert_eq!((FI_REMOTE_READ, FI_REMOTE_WRITE), (1 << 12, 1 << 13));
    assert_eq!(FI_DELIVERY_COMPLETE, 1 << 28);
    assert_eq!(FI_SOURCE, 1 << 57);
    assert_eq!((FI_MR_LOCAL, FI_MR_VIRT_ADDR), (1 << 2, 1 << 4));
    assert_eq!((FI_MR_ALLOCATED, FI_MR_PROV_KEY), (1 << 5, 1 << 6));
    assert_eq!((FI_EP_RDM, FI_CQ_FORMAT_CONTEXT, FI_AV_TABLE), (3, 1, 2));
    assert_eq!((FI_ENABLE, FI_GETWAIT, FI_WAIT_FD), (6, 5, 3));
    assert_eq!((FI_EAVAIL, FI_ENOKEY), (259, 266));
    assert_eq!((FI_EAGAIN, FI_ENOSYS), (11, 38));
}

/// A struct that is handed over has zeros behind it.
#[test]
fn handed_over_structs_have_room() {
    let padded = Padded::new(7u64);
    assert_eq!(padded.value, 7);
    assert_eq!(
        size_of::<Padded<fi_cq_attr>>(),
        size_of::<fi_cq_attr>() + 128
    );
    assert_eq!(offset_of!(Padded<fi_cq_attr>, value), 0);
}
