//! Sizes and offsets of UCX 1.22 on 64-bit Linux, as its compiler sees the header.

#![cfg(target_pointer_width = "64")]

use std::mem::{offset_of, size_of};

use kvgate_ucx_sys::*;

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
    sockaddr_storage = 128 {}
    ucs_sock_addr = 16 {}
    ucp_err_handler = 16 { cb: 0, arg: 8 }
    ucp_ep_params = 104 { field_mask: 0, address: 8, err_mode: 16, err_handler: 24, user_data: 40, flags: 48, sockaddr: 56, conn_request: 72, name: 80, local_sockaddr: 88 }
    ucp_transport_entry_t = 16 { transport_name: 0, device_name: 8 }
    ucp_transports_t = 24 { entries: 0, num_entries: 8, entry_size: 16 }
    ucs_cpu_set_t = 128 { ucs_bits: 0 }
    ucp_params = 88 { field_mask: 0, features: 8, request_size: 16, request_init: 24, request_cleanup: 32, tag_sender_mask: 40, mt_workers_shared: 48, estimated_num_eps: 56, estimated_num_ppn: 64, name: 72, node_local_id: 80 }
    ucp_worker_params = 200 { field_mask: 0, thread_mode: 8, cpu_mask: 16, events: 144, user_data: 152, event_fd: 160, flags: 168, name: 176, am_alignment: 184, client_id: 192 }
    ucp_mem_map_params = 48 { field_mask: 0, address: 8, length: 16, flags: 24, prot: 28, memory_type: 32, exported_memh_buffer: 40 }
    ucp_tag_recv_info = 16 {}
    ucp_request_param_t = 96 { op_attr_mask: 0, flags: 4, request: 8, cb: 16, datatype: 24, user_data: 32, reply_buffer: 40, memory_type: 48, recv_info: 56, memh: 64, remote_datatype: 72, remote: 80, remote_count: 88 }
    ucp_request_param_t__bindgen_ty_1 = 8 { send: 0, recv: 0, recv_stream: 0, recv_am: 0 }
    ucp_request_param_t__bindgen_ty_2 = 8 { length: 0, tag_info: 0 }
    ucp_ep_attr = 328 { field_mask: 0, name: 8, local_sockaddr: 40, remote_sockaddr: 168, transports: 296, user_data: 320 }
}

/// Those that decide what a library does with a struct, from the text of the header.
#[test]
fn constants_are_those_of_the_header() {
    assert_eq!(UCP_PARAM_FIELD_FEATURES, 1 << 0);
    assert_eq!((UCP_FEATURE_RMA, UCP_FEATURE_WAKEUP), (1 << 1, 1 << 4));
    assert_eq!(UCP_WORKER_PARAM_FIELD_THREAD_MODE, 1 << 0);
    assert_eq!(UCP_EP_PARAM_FIELD_REMOTE_ADDRESS, 1 << 0);
    assert_eq!(UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE, 1 << 1);
    assert_eq!(UCP_EP_PARAM_FIELD_ERR_HANDLER, 1 << 2);
    assert_eq!(UCP_MEM_MAP_PARAM_FIELD_ADDRESS, 1 << 0);
    assert_eq!(UCP_MEM_MAP_PARAM_FIELD_LENGTH, 1 << 1);
    assert_eq!(UCP_OP_ATTR_FIELD_FLAGS, 1 << 4);
    assert_eq!(UCP_OP_ATTR_FIELD_MEMH, 1 << 8);
    assert_eq!(UCP_EP_ATTR_FIELD_TRANSPORTS, 1 << 3);
    assert_eq!(UCP_EP_CLOSE_FLAG_FORCE, 1 << 0);
    assert_eq!(UCP_ERR_HANDLING_MODE_PEER, 1);
    assert_eq!((UCS_OK, UCS_INPROGRESS, UCS_ERR_BUSY), (0, 1, -15));
}
