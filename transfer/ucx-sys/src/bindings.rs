/*
 * Derived from the headers of UCX 1.22 (ucp/api/ucp.h, ucp/api/ucp_def.h, ucs/type/status.h and others):
 *
 * Copyright (C) Mellanox Technologies Ltd. 2001-2020.  ALL RIGHTS RESERVED.
 * Copyright (C) UT-Battelle, LLC. 2014-2017. ALL RIGHTS RESERVED.
 * Copyright (C) ARM Ltd. 2016-2017.  ALL RIGHTS RESERVED.
 * Copyright (C) Los Alamos National Security, LLC. 2018 ALL RIGHTS RESERVED.
 * See file LICENSE-UCX for terms.
 *
 * Made with bindgen 0.73.2 and cut to what is used; C enums are integer constants, so that a value of a
 * newer library is not undefined behaviour. tests/layout.rs checks every size and offset.
 */

use std::ffi::*;

#[derive(PartialEq, Eq, Copy, Clone, Debug, Hash)]
#[repr(C, align(8))]
pub struct __BindgenOpaqueArray8<T>(pub T);
impl<T: Copy + Default, const N: usize> Default for __BindgenOpaqueArray8<[T; N]> {
    fn default() -> Self {
        Self([<T as Default>::default(); N])
    }
}
pub const UCS_MEMORY_TYPE_HOST: ucs_memory_type = 0;
pub type ucs_memory_type = c_uint;
pub use self::ucs_memory_type as ucs_memory_type_t;
pub const UCS_OK: ucs_status_t = 0;
pub const UCS_INPROGRESS: ucs_status_t = 1;
pub const UCS_ERR_NO_MESSAGE: ucs_status_t = -1;
pub const UCS_ERR_NO_RESOURCE: ucs_status_t = -2;
pub const UCS_ERR_IO_ERROR: ucs_status_t = -3;
pub const UCS_ERR_NO_MEMORY: ucs_status_t = -4;
pub const UCS_ERR_INVALID_PARAM: ucs_status_t = -5;
pub const UCS_ERR_UNREACHABLE: ucs_status_t = -6;
pub const UCS_ERR_INVALID_ADDR: ucs_status_t = -7;
pub const UCS_ERR_NOT_IMPLEMENTED: ucs_status_t = -8;
pub const UCS_ERR_MESSAGE_TRUNCATED: ucs_status_t = -9;
pub const UCS_ERR_NO_PROGRESS: ucs_status_t = -10;
pub const UCS_ERR_BUFFER_TOO_SMALL: ucs_status_t = -11;
pub const UCS_ERR_NO_ELEM: ucs_status_t = -12;
pub const UCS_ERR_SOME_CONNECTS_FAILED: ucs_status_t = -13;
pub const UCS_ERR_NO_DEVICE: ucs_status_t = -14;
pub const UCS_ERR_BUSY: ucs_status_t = -15;
pub const UCS_ERR_CANCELED: ucs_status_t = -16;
pub const UCS_ERR_SHMEM_SEGMENT: ucs_status_t = -17;
pub const UCS_ERR_ALREADY_EXISTS: ucs_status_t = -18;
pub const UCS_ERR_OUT_OF_RANGE: ucs_status_t = -19;
pub const UCS_ERR_TIMED_OUT: ucs_status_t = -20;
pub const UCS_ERR_EXCEEDS_LIMIT: ucs_status_t = -21;
pub const UCS_ERR_UNSUPPORTED: ucs_status_t = -22;
pub const UCS_ERR_REJECTED: ucs_status_t = -23;
pub const UCS_ERR_NOT_CONNECTED: ucs_status_t = -24;
pub const UCS_ERR_CONNECTION_RESET: ucs_status_t = -25;
pub const UCS_ERR_FIRST_LINK_FAILURE: ucs_status_t = -40;
pub const UCS_ERR_LAST_LINK_FAILURE: ucs_status_t = -59;
pub const UCS_ERR_FIRST_ENDPOINT_FAILURE: ucs_status_t = -60;
pub const UCS_ERR_ENDPOINT_TIMEOUT: ucs_status_t = -80;
pub const UCS_ERR_LAST_ENDPOINT_FAILURE: ucs_status_t = -89;
pub const UCS_ERR_LAST: ucs_status_t = -100;
pub type ucs_status_t = c_schar;
pub type ucs_status_ptr_t = *mut c_void;
#[repr(C)]
#[repr(align(8))]
#[derive(Debug, Copy, Clone)]
pub struct sockaddr_storage {
    pub _bindgen_opaque_blob: __BindgenOpaqueArray8<[u8; 128usize]>,
}
#[repr(C)]
#[repr(align(8))]
#[derive(Debug, Copy, Clone)]
pub struct ucs_sock_addr {
    pub _bindgen_opaque_blob: __BindgenOpaqueArray8<[u8; 16usize]>,
}
pub type ucs_sock_addr_t = ucs_sock_addr;
pub type ucp_tag_recv_info_t = ucp_tag_recv_info;
#[repr(C)]
#[derive(Debug)]
pub struct ucp_context {
    _unused: [u8; 0],
}
pub type ucp_context_h = *mut ucp_context;
#[repr(C)]
#[derive(Debug)]
pub struct ucp_config {
    _unused: [u8; 0],
}
pub type ucp_config_t = ucp_config;
#[repr(C)]
#[derive(Debug)]
pub struct ucp_ep {
    _unused: [u8; 0],
}
pub type ucp_ep_h = *mut ucp_ep;
#[repr(C)]
#[derive(Debug)]
pub struct ucp_conn_request {
    _unused: [u8; 0],
}
pub type ucp_conn_request_h = *mut ucp_conn_request;
#[repr(C)]
#[derive(Debug)]
pub struct ucp_address {
    _unused: [u8; 0],
}
pub type ucp_address_t = ucp_address;
pub const UCP_ERR_HANDLING_MODE_NONE: ucp_err_handling_mode_t = 0;
pub const UCP_ERR_HANDLING_MODE_PEER: ucp_err_handling_mode_t = 1;
pub const UCP_ERR_HANDLING_MODE_FAILOVER: ucp_err_handling_mode_t = 2;
pub type ucp_err_handling_mode_t = c_uint;
#[repr(C)]
#[derive(Debug)]
pub struct ucp_rkey {
    _unused: [u8; 0],
}
pub type ucp_rkey_h = *mut ucp_rkey;
#[repr(C)]
#[derive(Debug)]
pub struct ucp_mem {
    _unused: [u8; 0],
}
pub type ucp_mem_h = *mut ucp_mem;
#[repr(C)]
#[derive(Debug)]
pub struct ucp_worker {
    _unused: [u8; 0],
}
pub type ucp_worker_h = *mut ucp_worker;
pub type ucp_datatype_t = u64;
pub type ucp_request_init_callback_t = Option<unsafe extern "C" fn(request: *mut c_void)>;
pub type ucp_request_cleanup_callback_t = Option<unsafe extern "C" fn(request: *mut c_void)>;
pub type ucp_send_nbx_callback_t = Option<
    unsafe extern "C" fn(request: *mut c_void, status: ucs_status_t, user_data: *mut c_void),
>;
pub type ucp_err_handler_cb_t =
    Option<unsafe extern "C" fn(arg: *mut c_void, ep: ucp_ep_h, status: ucs_status_t)>;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucp_err_handler {
    pub cb: ucp_err_handler_cb_t,
    pub arg: *mut c_void,
}
pub type ucp_err_handler_t = ucp_err_handler;
pub type ucp_stream_recv_nbx_callback_t = Option<
    unsafe extern "C" fn(
        request: *mut c_void,
        status: ucs_status_t,
        length: usize,
        user_data: *mut c_void,
    ),
>;
pub type ucp_tag_recv_nbx_callback_t = Option<
    unsafe extern "C" fn(
        request: *mut c_void,
        status: ucs_status_t,
        tag_info: *const ucp_tag_recv_info_t,
        user_data: *mut c_void,
    ),
>;
pub type ucp_am_recv_data_nbx_callback_t = Option<
    unsafe extern "C" fn(
        request: *mut c_void,
        status: ucs_status_t,
        length: usize,
        user_data: *mut c_void,
    ),
>;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucp_ep_params {
    pub field_mask: u64,
    pub address: *const ucp_address_t,
    pub err_mode: ucp_err_handling_mode_t,
    pub err_handler: ucp_err_handler_t,
    pub user_data: *mut c_void,
    pub flags: c_uint,
    pub sockaddr: ucs_sock_addr_t,
    pub conn_request: ucp_conn_request_h,
    pub name: *const c_char,
    pub local_sockaddr: ucs_sock_addr_t,
}
pub type ucp_ep_params_t = ucp_ep_params;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucp_transport_entry_t {
    pub transport_name: *const c_char,
    pub device_name: *const c_char,
}
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucp_transports_t {
    pub entries: *mut ucp_transport_entry_t,
    pub num_entries: c_uint,
    pub entry_size: usize,
}
pub const UCS_THREAD_MODE_SINGLE: ucs_thread_mode_t = 0;
pub const UCS_THREAD_MODE_SERIALIZED: ucs_thread_mode_t = 1;
pub const UCS_THREAD_MODE_MULTI: ucs_thread_mode_t = 2;
pub type ucs_thread_mode_t = c_uint;
pub type ucs_cpu_mask_t = c_ulong;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucs_cpu_set_t {
    pub ucs_bits: [ucs_cpu_mask_t; 16usize],
}
pub const UCP_PARAM_FIELD_FEATURES: ucp_params_field = 1;
pub const UCP_PARAM_FIELD_REQUEST_SIZE: ucp_params_field = 2;
pub const UCP_PARAM_FIELD_REQUEST_INIT: ucp_params_field = 4;
pub const UCP_PARAM_FIELD_REQUEST_CLEANUP: ucp_params_field = 8;
pub const UCP_PARAM_FIELD_TAG_SENDER_MASK: ucp_params_field = 16;
pub const UCP_PARAM_FIELD_MT_WORKERS_SHARED: ucp_params_field = 32;
pub const UCP_PARAM_FIELD_ESTIMATED_NUM_EPS: ucp_params_field = 64;
pub const UCP_PARAM_FIELD_ESTIMATED_NUM_PPN: ucp_params_field = 128;
pub const UCP_PARAM_FIELD_NAME: ucp_params_field = 256;
pub const UCP_PARAM_FIELD_NODE_LOCAL_ID: ucp_params_field = 512;
pub type ucp_params_field = c_uint;
pub const UCP_FEATURE_RMA: ucp_feature = 2;
pub const UCP_FEATURE_WAKEUP: ucp_feature = 16;
pub const UCP_FEATURE_AM: ucp_feature = 64;
pub type ucp_feature = c_uint;
pub const UCP_WORKER_PARAM_FIELD_THREAD_MODE: ucp_worker_params_field = 1;
pub const UCP_WORKER_PARAM_FIELD_CPU_MASK: ucp_worker_params_field = 2;
pub const UCP_WORKER_PARAM_FIELD_EVENTS: ucp_worker_params_field = 4;
pub const UCP_WORKER_PARAM_FIELD_USER_DATA: ucp_worker_params_field = 8;
pub const UCP_WORKER_PARAM_FIELD_EVENT_FD: ucp_worker_params_field = 16;
pub const UCP_WORKER_PARAM_FIELD_FLAGS: ucp_worker_params_field = 32;
pub const UCP_WORKER_PARAM_FIELD_NAME: ucp_worker_params_field = 64;
pub const UCP_WORKER_PARAM_FIELD_AM_ALIGNMENT: ucp_worker_params_field = 128;
pub const UCP_WORKER_PARAM_FIELD_CLIENT_ID: ucp_worker_params_field = 256;
pub type ucp_worker_params_field = c_uint;
pub const UCP_EP_PARAM_FIELD_REMOTE_ADDRESS: ucp_ep_params_field = 1;
pub const UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE: ucp_ep_params_field = 2;
pub const UCP_EP_PARAM_FIELD_ERR_HANDLER: ucp_ep_params_field = 4;
pub const UCP_EP_PARAM_FIELD_USER_DATA: ucp_ep_params_field = 8;
pub const UCP_EP_PARAM_FIELD_SOCK_ADDR: ucp_ep_params_field = 16;
pub const UCP_EP_PARAM_FIELD_FLAGS: ucp_ep_params_field = 32;
pub const UCP_EP_PARAM_FIELD_CONN_REQUEST: ucp_ep_params_field = 64;
pub const UCP_EP_PARAM_FIELD_NAME: ucp_ep_params_field = 128;
pub const UCP_EP_PARAM_FIELD_LOCAL_SOCK_ADDR: ucp_ep_params_field = 256;
pub type ucp_ep_params_field = c_uint;
pub const UCP_EP_CLOSE_FLAG_FORCE: ucp_ep_close_flags_t = 1;
pub type ucp_ep_close_flags_t = c_uint;
pub const UCP_MEM_MAP_PARAM_FIELD_ADDRESS: ucp_mem_map_params_field = 1;
pub const UCP_MEM_MAP_PARAM_FIELD_LENGTH: ucp_mem_map_params_field = 2;
pub const UCP_MEM_MAP_PARAM_FIELD_FLAGS: ucp_mem_map_params_field = 4;
pub const UCP_MEM_MAP_PARAM_FIELD_PROT: ucp_mem_map_params_field = 8;
pub const UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE: ucp_mem_map_params_field = 16;
pub const UCP_MEM_MAP_PARAM_FIELD_EXPORTED_MEMH_BUFFER: ucp_mem_map_params_field = 32;
pub type ucp_mem_map_params_field = c_uint;
pub const UCP_OP_ATTR_FIELD_REQUEST: ucp_op_attr_t = 1;
pub const UCP_OP_ATTR_FIELD_CALLBACK: ucp_op_attr_t = 2;
pub const UCP_OP_ATTR_FIELD_USER_DATA: ucp_op_attr_t = 4;
pub const UCP_OP_ATTR_FIELD_FLAGS: ucp_op_attr_t = 16;
pub const UCP_OP_ATTR_FIELD_MEMORY_TYPE: ucp_op_attr_t = 64;
pub const UCP_OP_ATTR_FIELD_MEMH: ucp_op_attr_t = 256;
pub const UCP_OP_ATTR_FLAG_NO_IMM_CMPL: ucp_op_attr_t = 65536;
pub const UCP_OP_ATTR_FLAG_FAST_CMPL: ucp_op_attr_t = 131072;
pub const UCP_OP_ATTR_FLAG_FORCE_IMM_CMPL: ucp_op_attr_t = 262144;
pub type ucp_op_attr_t = c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucp_params {
    pub field_mask: u64,
    pub features: u64,
    pub request_size: usize,
    pub request_init: ucp_request_init_callback_t,
    pub request_cleanup: ucp_request_cleanup_callback_t,
    pub tag_sender_mask: u64,
    pub mt_workers_shared: c_int,
    pub estimated_num_eps: usize,
    pub estimated_num_ppn: usize,
    pub name: *const c_char,
    pub node_local_id: usize,
}
pub type ucp_params_t = ucp_params;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucp_worker_params {
    pub field_mask: u64,
    pub thread_mode: ucs_thread_mode_t,
    pub cpu_mask: ucs_cpu_set_t,
    pub events: c_uint,
    pub user_data: *mut c_void,
    pub event_fd: c_int,
    pub flags: u64,
    pub name: *const c_char,
    pub am_alignment: usize,
    pub client_id: u64,
}
pub type ucp_worker_params_t = ucp_worker_params;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucp_mem_map_params {
    pub field_mask: u64,
    pub address: *mut c_void,
    pub length: usize,
    pub flags: c_uint,
    pub prot: c_uint,
    pub memory_type: ucs_memory_type_t,
    pub exported_memh_buffer: *const c_void,
}
pub type ucp_mem_map_params_t = ucp_mem_map_params;
#[repr(C)]
#[repr(align(8))]
#[derive(Debug, Copy, Clone)]
pub struct ucp_tag_recv_info {
    pub _bindgen_opaque_blob: __BindgenOpaqueArray8<[u8; 16usize]>,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub struct ucp_request_param_t {
    pub op_attr_mask: u32,
    pub flags: u32,
    pub request: *mut c_void,
    pub cb: ucp_request_param_t__bindgen_ty_1,
    pub datatype: ucp_datatype_t,
    pub user_data: *mut c_void,
    pub reply_buffer: *mut c_void,
    pub memory_type: ucs_memory_type_t,
    pub recv_info: ucp_request_param_t__bindgen_ty_2,
    pub memh: ucp_mem_h,
    pub remote_datatype: ucp_datatype_t,
    pub remote: *const c_void,
    pub remote_count: usize,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub union ucp_request_param_t__bindgen_ty_1 {
    pub send: ucp_send_nbx_callback_t,
    pub recv: ucp_tag_recv_nbx_callback_t,
    pub recv_stream: ucp_stream_recv_nbx_callback_t,
    pub recv_am: ucp_am_recv_data_nbx_callback_t,
}
#[repr(C)]
#[derive(Copy, Clone)]
pub union ucp_request_param_t__bindgen_ty_2 {
    pub length: *mut usize,
    pub tag_info: *mut ucp_tag_recv_info_t,
}
pub const UCP_EP_ATTR_FIELD_NAME: ucp_ep_attr_field = 1;
pub const UCP_EP_ATTR_FIELD_LOCAL_SOCKADDR: ucp_ep_attr_field = 2;
pub const UCP_EP_ATTR_FIELD_REMOTE_SOCKADDR: ucp_ep_attr_field = 4;
pub const UCP_EP_ATTR_FIELD_TRANSPORTS: ucp_ep_attr_field = 8;
pub const UCP_EP_ATTR_FIELD_USER_DATA: ucp_ep_attr_field = 16;
pub type ucp_ep_attr_field = c_uint;
#[repr(C)]
#[derive(Debug, Copy, Clone)]
pub struct ucp_ep_attr {
    pub field_mask: u64,
    pub name: [c_char; 32usize],
    pub local_sockaddr: sockaddr_storage,
    pub remote_sockaddr: sockaddr_storage,
    pub transports: ucp_transports_t,
    pub user_data: *mut c_void,
}
pub type ucp_ep_attr_t = ucp_ep_attr;
