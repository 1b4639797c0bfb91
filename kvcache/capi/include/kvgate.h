/*
 * kvgate: moves the paged KV cache of a model between processes, and lets nobody read what has not
 * landed, write what is still read, or reuse what may still be written.
 *
 * SPDX-License-Identifier: Apache-2.0
 * Written by `cargo xtask header` from the sources of kvgate-capi. Do not edit.
 *
 * These rules hold for every function.
 *
 * Status. A call answers enum kv_status. If it is not KV_STATUS_OK, no answer was written and nothing has
 * changed, unless the function says so, and kv_last_error_message() of the same thread says why.
 *
 * Pointers. A pointer that is not NULL points to as much initialised memory as its type or the count
 * beside it says, and nobody changes it during the call; an answer goes to memory that can be written.
 * The library keeps no pointer that it was given: bytes, texts and lists are copied. NULL is allowed
 * where a function says so, and for lists of no elements.
 *
 * Texts end with a zero byte and are UTF-8.
 *
 * Structs that begin with struct_bytes carry their version: set it to sizeof the struct before each
 * call, for answers too. Set fields that you do not use, and reserved ones, to zero.
 *
 * Enums are passed as uint32_t; a value that is none is refused.
 *
 * Handles (struct kv_... *) are made by a function that takes a pointer to one as its last argument, belong
 * to the caller and are ended by the ..._release of their kind, once. They are numbers that never come
 * back, not addresses: a released, foreign or made-up one is refused. What depends on another thing keeps
 * what it needs, so handles may be released in any order.
 *
 * Threads. Every function may be called from every thread, also at the same time with the same handle,
 * and a handle may be released while another thread waits with it. Never call one from a signal handler,
 * and not in a child between fork and exec.
 *
 * Time. timeout_ms ends a wait and nothing else: 0 looks and does not wait, more than a year is a year.
 * Whoever does not want to block asks with 0 and polls the descriptor of kv_agent_event_fd.
 */


#ifndef KVGATE_H
#define KVGATE_H

#include <stddef.h>
#include <stdint.h>

// Version of the binary interface. It grows when something is taken away or changed; what is only added
// keeps it.
#define KV_ABI_VERSION 1

// Bytes of a buffer that every address fits into, with its closing zero.
#define KV_ADDRESS_BYTES 128

// Bytes of a digest and of a fingerprint.
#define KV_DIGEST_BYTES 32

// What every call returns. `KV_STATUS_OK` is 0. A call that returns anything else has changed nothing,
// unless its documentation says so; `kv_last_error_message` says what was wrong, with the values.
typedef enum kv_status {
  // Done.
  KV_STATUS_OK = 0,
  // An argument that cannot work: NULL where a pointer is needed, a handle that does not exist or is
  // of another kind, a wrong `struct_bytes`, an enum value that is not one, text that is not UTF-8,
  // numbers that do not fit together.
  KV_STATUS_INVALID_ARGUMENT = 1,
  // Good arguments at the wrong moment, such as arming a flight twice.
  KV_STATUS_INVALID_STATE = 2,
  // The time is over and the answer is not there yet. Nothing else has changed; ask again, or, where
  // `kv_agent_event_fd` names the call, poll the event descriptor of the agent.
  KV_STATUS_TIMED_OUT = 3,
  // The flight is not armed: every gate of it is closed.
  KV_STATUS_NOT_ARMED = 4,
  // The flight or the operation has failed, and stays so; the message names the cause.
  KV_STATUS_FAILED = 5,
  // The peer was lost and nobody can tell how the operation ended; its memory stays in use.
  KV_STATUS_UNKNOWN = 6,
  // The operation was taken back before it was started.
  KV_STATUS_CANCELLED = 7,
  // No room now, neither in a queue nor in a pool; try again later.
  KV_STATUS_FULL = 8,
  // Somebody else uses it: a region with operations, an address, an epoch, a layer that is held.
  KV_STATUS_BUSY = 9,
  // The host or its control group has less memory than was asked for; nothing was touched.
  KV_STATUS_OUT_OF_MEMORY = 10,
  // The connection to the peer has ended.
  KV_STATUS_PEER_DOWN = 11,
  // Nobody answers at that address. Trying again may help.
  KV_STATUS_UNREACHABLE = 12,
  // The other side, or a check on its behalf, said no: secret, version, fingerprint.
  KV_STATUS_REFUSED = 13,
  // It names something of another life: a former incarnation of a peer, a revoked registration.
  KV_STATUS_STALE = 14,
  // The agent, the region or the flight is closed.
  KV_STATUS_CLOSED = 15,
  // A system call failed; the message holds its name and errno.
  KV_STATUS_SYSTEM = 16,
  // A defect of this library. The call was given up; the handles it was given should be released.
  KV_STATUS_INTERNAL = 17,
  // What a transport needs is not there: a library, a right; the message lists what was tried.
  KV_STATUS_UNAVAILABLE = 18,
} kv_status;

// What a read lease allows.
typedef enum kv_access {
  // Reading.
  KV_ACCESS_READ = 1,
  // Reading, and writing rows behind those that landed. One lease of a flight at a time.
  KV_ACCESS_APPEND = 2,
} kv_access;

// What carries a connection.
typedef enum kv_backend {
  // Another one.
  KV_BACKEND_OTHER = 0,
  // Within one process.
  KV_BACKEND_LOCAL = 1,
  // Memory that two processes of one host map.
  KV_BACKEND_SHM = 2,
  // A TCP connection.
  KV_BACKEND_TCP = 3,
  // The kernel copies between two processes of one host.
  KV_BACKEND_CMA = 4,
  // UCX.
  KV_BACKEND_UCX = 5,
  // libfabric.
  KV_BACKEND_LIBFABRIC = 6,
} kv_backend;

// The kinds of buffers that a layer can have.
typedef enum kv_component {
  // Latents of the sliding window; every layer but the draft block.
  KV_COMPONENT_SWA_LATENT = 0,
  // Compressed latents of ratio 4.
  KV_COMPONENT_C4_LATENT = 1,
  // Indexer keys of ratio 4.
  KV_COMPONENT_INDEX_K = 2,
  // Compressed latents of ratio 128.
  KV_COMPONENT_C128_LATENT = 3,
  // Projections of the open and the last group of ratio 4.
  KV_COMPONENT_C4_STATE = 4,
  // The same for the indexer's compressor.
  KV_COMPONENT_INDEX_STATE = 5,
  // Running softmax of the open group of ratio 128.
  KV_COMPONENT_C128_STATE = 6,
  // Latents of the draft block's window.
  KV_COMPONENT_MTP_LATENT = 7,
} kv_component;

// What has happened.
typedef enum kv_event_kind {
  // A control message: `bytes` is what the peer sent. Messages of one peer come in order.
  KV_EVENT_KIND_MESSAGE = 1,
  // A connection was made. Comes before any other event of that peer.
  KV_EVENT_KIND_PEER_UP = 2,
  // A connection has ended; `bytes` is the cause as text. Comes after every other event of that peer,
  // once.
  KV_EVENT_KIND_PEER_DOWN = 3,
  // Somebody connected and was refused; `bytes` says who and why, as text.
  KV_EVENT_KIND_REFUSED = 4,
  // The connection has broken, and another one may take its place in time; `bytes` is the cause as text. What is
  // under way stays under way. `PeerResumed` follows, or `PeerDown`.
  KV_EVENT_KIND_PEER_SUSPENDED = 5,
  // There is a connection to the same life of the peer again.
  KV_EVENT_KIND_PEER_RESUMED = 6,
} kv_event_kind;

// How an indexer key is stored.
typedef enum kv_index_k_format {
  // 128 bf16 values.
  KV_INDEX_K_FORMAT_BF16 = 1,
  // 128 e4m3 values and one f32 scale.
  KV_INDEX_K_FORMAT_FP8 = 2,
  // One f32 per channel.
  KV_INDEX_K_FORMAT_F32 = 3,
} kv_index_k_format;

// How a latent row is stored.
typedef enum kv_latent_format {
  // 584 bytes: 448 e4m3 and 64 bf16 values, 7 ue8m0 scales. Needs `head_dim` 512 and a rope of 64.
  KV_LATENT_FORMAT_PACKED_FP8 = 1,
  // One f32 per channel.
  KV_LATENT_FORMAT_F32 = 2,
} kv_latent_format;

// Where memory lives.
typedef enum kv_memory_kind {
  // Anonymous memory of this process.
  KV_MEMORY_KIND_HOST = 1,
  // A sealed memfd that a peer on the same host can map: what the shm transport writes into. Nothing
  // appears in a file system.
  KV_MEMORY_KIND_SHARED = 2,
} kv_memory_kind;

// Which way a transfer goes.
typedef enum kv_op {
  // Local slots are copied into slots of the peer.
  KV_OP_WRITE = 1,
  // Slots of the peer are copied into local slots. The peer has to keep them as they are until it is told
  // that the read has ended; the transfer itself tells it nothing.
  KV_OP_READ = 2,
} kv_op;

// Which operations of one peer go first.
typedef enum kv_priority {
  // Somebody waits for the bytes.
  KV_PRIORITY_FOREGROUND = 0,
  // Nobody waits: it goes when nothing of the foreground is queued, at the latest after 16 of those, and
  // is not in order with messages.
  KV_PRIORITY_BACKGROUND = 1,
} kv_priority;

// How the bytes of a row lie in a page.
typedef enum kv_row_format {
  // 448 e4m3 and 64 bf16 values; 7 ue8m0 scales and a pad byte in the scale section of the page.
  KV_ROW_FORMAT_LATENT_V4 = 1,
  // `channels` f32 values.
  KV_ROW_FORMAT_F32 = 2,
  // 128 e4m3 values; one f32 in the scale section of the page.
  KV_ROW_FORMAT_INDEX_FP8 = 3,
  // 128 bf16 values.
  KV_ROW_FORMAT_INDEX_BF16 = 4,
  // `parts` vectors of `channels` f32 values, one after the other.
  KV_ROW_FORMAT_F32_ROWS = 5,
} kv_row_format;

// What orders the writing of the source before the transfer.
typedef enum kv_source {
  // For a write: the calling thread has written the bytes, or has synchronised with the thread that did.
  KV_SOURCE_HOST_WRITTEN = 1,
  // For a read: the peer has said in a message that its slots are complete and stay as they are, and the
  // calling thread has taken that message, or has synchronised with the thread that did.
  KV_SOURCE_ANNOUNCED = 2,
} kv_source;

// The state of a gate.
typedef enum kv_stage_state {
  // The flight was not armed: closed.
  KV_STAGE_STATE_NOT_ARMED = 1,
  // Chunks have not landed: closed.
  KV_STAGE_STATE_PENDING = 2,
  // Every chunk is visible to the thread that got this answer: open.
  KV_STAGE_STATE_READY = 3,
  // It will never open.
  KV_STAGE_STATE_FAILED = 4,
} kv_stage_state;

// Where an operation stands.
typedef enum kv_transfer_state {
  // Queued or under way.
  KV_TRANSFER_STATE_IN_FLIGHT = 1,
  // It has ended, and its bytes are as visible as was answered beside it.
  KV_TRANSFER_STATE_DONE = 2,
  // It has ended without landing completely.
  KV_TRANSFER_STATE_FAILED = 3,
  // The peer was lost and may still touch the memory. Never becomes anything else.
  KV_TRANSFER_STATE_UNKNOWN = 4,
} kv_transfer_state;

// How much of what arrives is verified.
typedef enum kv_verify {
  // Nothing.
  KV_VERIFY_OFF = 0,
  // Whom each page is for, and the checksum of its live rows; the writers send both along.
  KV_VERIFY_CANARY = 1,
  // The checksum only.
  KV_VERIFY_CHECKSUM = 2,
} kv_verify;

// How far the bytes of an operation have come.
typedef enum kv_visibility {
  // The source may be reused. Nothing is said about the destination.
  KV_VISIBILITY_LOCAL_DONE = 1,
  // The destination memory holds the bytes; a reader may still see old ones.
  KV_VISIBILITY_REMOTE_DELIVERED = 2,
  // A reader that is ordered after this sees the bytes.
  KV_VISIBILITY_REMOTE_VISIBLE = 3,
} kv_visibility;

// One participant: registered memory, connections, flights. All calls with an agent may be made from
// any thread, at the same time.
typedef struct kv_agent kv_agent;

// A list of slots. Two of them make a transfer: the n-th local slot goes to the n-th remote slot.
typedef struct kv_descriptors kv_descriptors;

// A flight that this agent receives: one attempt to fill a set of slots, with one gate per stage.
//
// Ended by `kv_flight_close` or `kv_flight_abort`; the memory may be reused once
// `kv_flight_wait_quiet` has answered `KV_STATUS_OK`.
typedef struct kv_flight kv_flight;

// A layer that may be touched: to write, before it is committed, or to read, behind its gate.
//
// Addresses that come from it are good until it is released. A program that keeps one longer reads or writes
// what belongs to somebody else; the library cannot prevent that.
typedef struct kv_layer kv_layer;

// A stretch of zeroed memory that never moves. A child made by `fork` does not inherit it.
typedef struct kv_memory kv_memory;

// What a receiver has offered: where the rows of one flight go.
typedef struct kv_offer kv_offer;

// What crosses for one request. Both sides make it from the same facts, so both count the same chunks.
typedef struct kv_plan kv_plan;

// All pools of one cache: one memory, one pool per component of each layer.
typedef struct kv_pools kv_pools;

// A transfer that was checked and can be posted.
typedef struct kv_prepared kv_prepared;

// The right to read a sequence that is received, layer by layer, as far as its gates are open. It keeps the
// slots: while it exists, they are not free, whatever became of the flight.
typedef struct kv_read_lease kv_read_lease;

// The registration of memory with an agent: what transfers may touch.
typedef struct kv_region kv_region;

// What a cache consists of: every component of every layer, with its bytes.
typedef struct kv_schema kv_schema;

// One posted operation.
typedef struct kv_transfer kv_transfer;

// Reserved slots of all components and the only right to write them. It is written here, or becomes a flight
// that others write (`kv_write_lease_expect`).
typedef struct kv_write_lease kv_write_lease;

// Witness that the rows of one layer are written: what a layer is sent with. It keeps the slots.
typedef struct kv_written kv_written;

// How to make an agent. Set `struct_bytes` and `name`, and let the rest be zero for the usual values.
typedef struct kv_agent_options {
  // `sizeof(struct kv_agent_options)`.
  uint32_t struct_bytes;
  // Operations towards one peer that may be queued or under way; 0 for 1024.
  uint32_t queue_capacity;
  // The name, for people: UTF-8, not empty.
  const char *name;
  // Bytes that peers see, see `kv_agent_peer_metadata`; at most 1 MiB.
  const uint8_t *metadata;
  // How many.
  size_t metadata_bytes;
  // The secret that both sides of a connection beyond this host must know. NULL for none.
  const uint8_t *auth_token;
  // How many bytes it has.
  size_t auth_token_bytes;
} kv_agent_options;

// One life of one agent, drawn at random when the agent is made: 16 bytes without meaning.
typedef struct kv_incarnation {
  // The bytes.
  uint8_t bytes[16];
} kv_incarnation;

// A connection as this agent sees it.
typedef struct kv_peer_info {
  // `sizeof(struct kv_peer_info)`; set it before the call.
  uint32_t struct_bytes;
  // 1 while the connection stands, or has broken and may come back; 0 when it has ended.
  uint32_t is_up;
  // What carries it, an `enum kv_backend`.
  uint32_t backend;
  // Pools that the peer had registered when it was connected.
  uint32_t pool_count;
  // Which life of the peer this connection belongs to.
  struct kv_incarnation incarnation;
  // Milliseconds since something was heard from it.
  uint64_t silent_ms;
  // Bytes of its metadata.
  uint64_t metadata_bytes;
} kv_peer_info;

// A pool: equal slots in registered memory.
typedef struct kv_pool_geometry {
  // First byte of slot 0 in the memory.
  uint64_t offset_bytes;
  // Distance between two slots.
  uint64_t stride_bytes;
  // Length of a slot: what a transfer moves.
  uint64_t slot_bytes;
  // Number of slots.
  uint32_t slot_count;
  // Zero.
  uint32_t reserved;
} kv_pool_geometry;

// What was left when an agent was shut down. All zero: nothing.
typedef struct kv_shutdown_report {
  // `sizeof(struct kv_shutdown_report)`; set it before the call.
  uint32_t struct_bytes;
  // Threads that did not end in time.
  uint32_t running_threads;
  // Flights whose memory may still be touched.
  uint64_t unquiet_flights;
  // Regions that are still registered.
  uint64_t open_regions;
  // Operations whose end nobody can tell.
  uint64_t unknown_operations;
  // Messages for peers that were not down before: not sent, or sent over a connection that broke before the
  // peer acknowledged them, so that nobody can tell whether they came.
  uint64_t unsent_messages;
} kv_shutdown_report;

// One event.
typedef struct kv_event {
  // `sizeof(struct kv_event)`; set it before the call.
  uint32_t struct_bytes;
  // An `enum kv_event_kind`.
  uint32_t kind;
  // The connection; 0 for `KV_EVENT_KIND_REFUSED`, which has none.
  uint32_t peer;
  // For `KV_EVENT_KIND_PEER_DOWN`: 1 when the peer is proven not to write here any more. If 0, memory
  // that it was told about stays in use for good.
  uint32_t is_proven;
  // What comes with the event; never NULL. It belongs to the library and is good until the same
  // thread asks for another event or ends. Text ends with a zero byte that `length_bytes` does not count.
  const uint8_t *bytes;
  // How many bytes.
  size_t length_bytes;
} kv_event;

// A chunk of a stage, as an arrival reports it.
typedef struct kv_ticket {
  // The stage, below 65536.
  uint32_t stage;
  // The chunk of that stage, below 65536.
  uint32_t chunk;
} kv_ticket;

// How an operation is posted.
typedef struct kv_post_options {
  // `sizeof(struct kv_post_options)`.
  uint32_t struct_bytes;
  // An `enum kv_source`. There is no usual value: say it.
  uint32_t source;
  // The flight that the arrival counts for: of the peer for a write, of this agent for a read.
  uint64_t epoch;
  // The chunks that this operation completes there. With none, nobody is told.
  const struct kv_ticket *tickets;
  // How many.
  size_t ticket_count;
  // How long to wait for room in the queue; 0 only tries.
  uint64_t timeout_ms;
  // An `enum kv_priority`.
  uint32_t priority;
  // Zero.
  uint32_t reserved;
} kv_post_options;

// One chunk that a flight waits for: what one completion of one writer reports.
typedef struct kv_chunk {
  // The stage, below 65536. Stages are 0, 1, 2, … without a gap.
  uint32_t stage;
  // The chunk of that stage, below 65536; 0, 1, 2, … without a gap.
  uint32_t chunk;
  // The rank of the writer that sends it, below 65536.
  uint32_t writer;
  // Slots that it fills; at least one.
  uint32_t descriptor_count;
} kv_chunk;

// A writer of a flight: which connection delivers the chunks of a rank.
typedef struct kv_writer {
  // The connection.
  uint32_t peer;
  // The rank, below 65536.
  uint32_t rank;
} kv_writer;

// A gate at one moment.
typedef struct kv_stage {
  // `sizeof(struct kv_stage)`; set it before the call.
  uint32_t struct_bytes;
  // An `enum kv_stage_state`. Only `KV_STAGE_STATE_READY` allows reading.
  uint32_t state;
  // Chunks that have not landed.
  uint32_t missing;
  // Zero.
  uint32_t reserved;
} kv_stage;

// What decides the shape and the meaning of a cache.
typedef struct kv_schema_options {
  // `sizeof(struct kv_schema_options)`.
  uint32_t struct_bytes;
  // An `enum kv_latent_format`.
  uint32_t latent;
  // An `enum kv_index_k_format`.
  uint32_t index_k;
  // Rows of a page of the window: 64, 256, or 0 for 64.
  uint32_t window_page_rows;
  // 1 when the window of the draft block is part of the cache, else 0.
  uint32_t drafting;
  // Zero.
  uint32_t reserved;
  // The text of the model's `config.json` (DeepSeek-V4).
  const char *config_json;
  // Digest of the weights, `KV_DIGEST_BYTES` bytes: caches of different weights are never exchanged. Any
  // convention will do that both sides share.
  const uint8_t *weights_digest;
  // Digest of the configuration, `KV_DIGEST_BYTES` bytes; NULL for the SHA-256 of the text, whatever its
  // spacing and the order of its fields.
  const uint8_t *config_digest;
} kv_schema_options;

// The pages of one component of one layer. Entry `e` (a token position for windows and states, the number of
// a compressed entry for the others) lies in page `(e / entries_per_page) % page_count` of the sequence
// (`kv_page.page_count`), in row `e % rows_per_page`. The data of row `r` begin at `r * data_stride_bytes`
// from the page's address, its scales, if any, at `scale_offset_bytes + r * scale_stride_bytes`.
typedef struct kv_component_info {
  // `sizeof(struct kv_component_info)`; set it before the call.
  uint32_t struct_bytes;
  // 1 when the layer has this component. If 0, all that follows is 0.
  uint32_t is_present;
  // An `enum kv_row_format`.
  uint32_t format;
  // Values of a part of a row, where the format leaves them open.
  uint32_t channels;
  // Parts of a row.
  uint32_t parts;
  // Tokens of an entry: 1, 4 or 128.
  uint32_t group_tokens;
  // Rows of a page.
  uint32_t rows_per_page;
  // Entries after which the next page begins.
  uint32_t entries_per_page;
  // Bytes of a row, scales and padding included.
  uint64_t row_bytes;
  // Bytes of a page that hold rows.
  uint64_t used_bytes;
  // Bytes of a page: what a transfer moves.
  uint64_t stride_bytes;
  // Distance between the data of two rows.
  uint64_t data_stride_bytes;
  // Where the scales of row 0 begin; 0 where there are none.
  uint64_t scale_offset_bytes;
  // Distance between the scales of two rows; 0 where there are none.
  uint64_t scale_stride_bytes;
} kv_component_info;

// How much pools hold. Counts are usable slots; each pool has a null page besides.
typedef struct kv_pool_options {
  // `sizeof(struct kv_pool_options)`.
  uint32_t struct_bytes;
  // Where the memory lives, an `enum kv_memory_kind`.
  uint32_t memory;
  // Logical pages of 256 tokens.
  uint32_t pages;
  // Window slots, see `kv_schema_slots`.
  uint32_t windows;
  // Requests.
  uint32_t requests;
  // Zero.
  uint32_t reserved;
} kv_pool_options;

// The slots of one space at one moment: free + owned + draining + retired = capacity.
typedef struct kv_space_stats {
  // Free.
  uint32_t free;
  // Held by a lease or a flight.
  uint32_t owned;
  // Ended, and not yet proven quiet.
  uint32_t draining;
  // Of the draining ones, those whose proof may never come.
  uint32_t quarantined;
  // Out of generations.
  uint32_t retired;
  // All usable slots.
  uint32_t capacity;
  // Reservations of a slot that had an owner before.
  uint64_t reuses;
} kv_space_stats;

// The slots of pools by state.
typedef struct kv_pool_stats {
  // `sizeof(struct kv_pool_stats)`; set it before the call.
  uint32_t struct_bytes;
  // Zero.
  uint32_t reserved;
  // Bytes of the memory of all pools.
  uint64_t memory_bytes;
  // Logical pages.
  struct kv_space_stats pages;
  // Window slots.
  struct kv_space_stats windows;
  // Request slots.
  struct kv_space_stats requests;
} kv_pool_stats;

// The layers that one sending process delivers.
typedef struct kv_writer_layers {
  // The rank of the process, below 65536.
  uint32_t rank;
  // Its first layer.
  uint32_t first_layer;
  // The layer behind its last one.
  uint32_t end_layer;
} kv_writer_layers;

// One page.
typedef struct kv_page {
  // `sizeof(struct kv_page)`; set it before the call.
  uint32_t struct_bytes;
  // 1 when it may be written, 0 when only read.
  uint32_t is_writable;
  // The first byte of the page.
  void *address;
  // Bytes from there that hold rows.
  uint64_t length_bytes;
  // Pages that the sequence has of this component.
  uint32_t page_count;
  // Number of the page in its pool, for kernels that take tables.
  uint32_t pool_page;
} kv_page;

// How a cache is received.
typedef struct kv_expect_options {
  // `sizeof(struct kv_expect_options)`.
  uint32_t struct_bytes;
  // An `enum kv_verify`.
  uint32_t verify;
  // The number of the flight, given out by this process and never used twice.
  uint64_t epoch;
  // The writers of the plan, each once.
  const struct kv_writer *writers;
  // How many.
  size_t writer_count;
} kv_expect_options;

// An offer in numbers.
typedef struct kv_offer_info {
  // `sizeof(struct kv_offer_info)`; set it before the call.
  uint32_t struct_bytes;
  // Tokens of the prompt.
  uint32_t prompt_tokens;
  // The receiver's number of the request.
  uint64_t room;
  // The receiver's number of the flight.
  uint64_t epoch;
  // Segments that the prompt is sent in.
  uint32_t segment_count;
  // 1 when the receiver verifies what arrives.
  uint32_t is_verified;
  // Which life of the receiver it is of.
  struct kv_incarnation incarnation;
} kv_offer_info;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// The version of the library that was loaded: compare it with `KV_ABI_VERSION` of the header.
uint32_t kv_abi_version(void);

// The message of the last call of this thread that did not return `KV_STATUS_OK`: one line of UTF-8, never
// NULL, empty before the first failure. The text belongs to the thread: the pointer is good until the next
// failing call of the same thread or the end of that thread, so copy it to keep it or to hand it to another.
const char *kv_last_error_message(void);

// The name of a status in words, such as "timed out"; "no such status" for a value that is none. A
// constant: never NULL, never to be freed.
const char *kv_status_name(uint32_t status);

// Makes an agent, with a fresh incarnation. Release it with `kv_agent_release`.
enum kv_status kv_agent_create(const struct kv_agent_options *options, struct kv_agent **agent);

// Ends the agent if `kv_agent_shutdown` has not, and its handle; NULL is allowed. Blocks for up to two
// seconds while its threads end. Flights of it that miss something fail, and its event descriptor is not to
// be used any more.
enum kv_status kv_agent_release(struct kv_agent *agent);

// Which life this agent is.
enum kv_status kv_agent_incarnation(const struct kv_agent *agent,
                                    struct kv_incarnation *incarnation);

// Listens until the agent is shut down. `address` begins with the transport: `tcp:HOST:PORT`,
// `ucx:HOST:PORT` or `libfabric:HOST:PORT` (port 0 lets the system choose), `shm:NAME` or `cma:NAME` (the name
// of an abstract Unix socket: same host, no file). Over shm the registered memory has to be shared. `bound`,
// unless NULL, gets the address to connect to, in at most `KV_ADDRESS_BYTES` bytes. Whoever connects becomes
// a peer and is announced by `KV_EVENT_KIND_PEER_UP`.
//
// `KV_STATUS_BUSY` when the address is in use, `KV_STATUS_REFUSED` for an address beyond this host without
// a secret, `KV_STATUS_UNAVAILABLE` when this library was built without the transport or what it needs is not
// there.
enum kv_status kv_agent_listen(const struct kv_agent *agent,
                               const char *address,
                               char *bound);

// Connects to an agent that listens at `address` (as for `kv_agent_listen`) and puts the number of the
// connection into `peer`. Blocks until the handshake is done. The peer then knows what was registered
// here before, so register first.
//
// `KV_STATUS_UNREACHABLE` when nobody listens (trying again may help), `KV_STATUS_REFUSED` with the reason of
// either side, `KV_STATUS_UNAVAILABLE` as for `kv_agent_listen`, `KV_STATUS_TIMED_OUT`.
enum kv_status kv_agent_connect(const struct kv_agent *agent,
                                const char *address,
                                uint64_t timeout_ms,
                                uint32_t *peer);

// Connects two agents of this process. `peer_of_one` gets the number of `other` as `one` sees it, and
// `peer_of_other` the number of `one` as `other` sees it.
enum kv_status kv_agent_connect_local(const struct kv_agent *one,
                                      const struct kv_agent *other,
                                      uint32_t *peer_of_one,
                                      uint32_t *peer_of_other);

// What is known of a connection.
enum kv_status kv_agent_peer(const struct kv_agent *agent,
                             uint32_t peer,
                             struct kv_peer_info *info);

// A pool of a peer: its number there, for remote descriptor lists, and its slots. `index` counts from 0
// to `kv_peer_info.pool_count`, in the order in which the peer registered them. Either answer may be
// NULL.
enum kv_status kv_agent_peer_pool(const struct kv_agent *agent,
                                  uint32_t peer,
                                  uint32_t index,
                                  uint32_t *pool,
                                  struct kv_pool_geometry *geometry);

// Copies the bytes that a peer says about itself, see `kv_agent_options.metadata`. `length` gets their
// number, also when `capacity` is smaller and the call fails.
enum kv_status kv_agent_peer_metadata(const struct kv_agent *agent,
                                      uint32_t peer,
                                      uint8_t *buffer,
                                      size_t capacity,
                                      size_t *length);

// Queues a control message: reliable while the connection stands, and in order with everything that was
// posted to this peer before. Never blocks; the bytes are copied.
//
// `KV_STATUS_FULL` when too many wait, `KV_STATUS_PEER_DOWN`.
enum kv_status kv_agent_send(const struct kv_agent *agent,
                             uint32_t peer,
                             const uint8_t *bytes,
                             size_t length_bytes);

// Tells every peer that this process is alive and doing something, at most every 100 ms whatever the
// number of calls; it resets `kv_peer_info.silent_ms` there. Never blocks.
enum kv_status kv_agent_report_progress(const struct kv_agent *agent);

// Ends the agent within `timeout_ms`: nothing is admitted any more, flights that miss something fail,
// queues are drained, connections closed, threads joined. `report`, unless NULL, says what was left;
// memory that somebody may still touch stays mapped. The handle stays until `kv_agent_release`.
enum kv_status kv_agent_shutdown(const struct kv_agent *agent,
                                 uint64_t timeout_ms,
                                 struct kv_shutdown_report *report);

// Takes the next event. Waits for one at most `timeout_ms`; 0 only looks.
//
// `KV_STATUS_TIMED_OUT` when there is none: the descriptor of `kv_agent_event_fd` then becomes readable
// with the next one. `KV_STATUS_CLOSED` after a shutdown, when all were taken.
enum kv_status kv_agent_next_event(const struct kv_agent *agent,
                                   uint64_t timeout_ms,
                                   struct kv_event *event);

// A descriptor for `poll` or `epoll` (an eventfd). It becomes readable when something may have changed
// that a call for this agent has answered with `KV_STATUS_TIMED_OUT`, or with a state that is not final:
// an event (`kv_agent_next_event`), the end of a transfer (`kv_transfer_wait`, `kv_transfer_status`), the gate
// of a flight (`kv_flight_wait`, `kv_flight_check`, `kv_flight_verify`, `kv_read_lease_layer`), the quiet of a
// flight (`kv_flight_wait_quiet`), the quiet of the slots of a writer (`kv_write_lease_close`, if its pools were
// registered with this agent at that time). Whoever was told that a flight is not armed is woken when it is
// armed or ended. No other call leaves anything with the descriptor: not `kv_agent_connect`, and none that
// answers `KV_STATUS_BUSY` or `KV_STATUS_FULL`.
//
// Read eight bytes from it to clear it, *then* ask again for everything that is awaited. It is readable
// at first, so a loop of poll, read and ask needs no special beginning. Do not write to it and do not
// close it; it goes with the agent.
enum kv_status kv_agent_event_fd(const struct kv_agent *agent,
                                 int32_t *fd);

// Allocates `length_bytes` bytes, zeroed and populated. `kind` is an `enum kv_memory_kind`. `name` shows
// in `/proc/self/maps` for shared memory; NULL for none.
//
// `KV_STATUS_OUT_OF_MEMORY` when the host or its control group has less to give; nothing was touched then.
enum kv_status kv_memory_create(uint32_t kind,
                                uint64_t length_bytes,
                                const char *name,
                                struct kv_memory **memory);

// The first byte of the memory and, unless NULL, its length. The address is good until the handle and
// every registration of the memory are gone.
//
// Slots that a flight fills are to be read only after `kv_flight_wait` for their stage has answered
// `KV_STATUS_OK`; slots that a transfer reads are not to be written before it has ended. For the cache of a
// model, use pools, which give out addresses through their gates only.
enum kv_status kv_memory_address(const struct kv_memory *memory,
                                 void **address,
                                 uint64_t *length_bytes);

// Ends the handle; NULL is allowed. The memory stays mapped as long as it is registered.
enum kv_status kv_memory_release(struct kv_memory *memory);

// Registers memory as `pool_count` pools. Peers that connect later learn of it, so register before
// connecting.
enum kv_status kv_agent_register(const struct kv_agent *agent,
                                 const struct kv_memory *memory,
                                 const struct kv_pool_geometry *pools,
                                 size_t pool_count,
                                 struct kv_region **region);

// The number of a pool, for local descriptor lists. `index` is its place in the registration.
enum kv_status kv_region_pool(const struct kv_region *region, uint32_t index, uint32_t *pool);

// Ends a registration. Blocks until no operation uses the memory and every peer that writes by itself
// has let go of it or is proven dead.
//
// `KV_STATUS_BUSY` when that is not so within `timeout_ms`: the region takes no new operation, its memory
// stays mapped, and closing it can be tried again. `KV_STATUS_BUSY` also, at once, while another thread waits
// in this call. `KV_STATUS_CLOSED` when it is closed already, and in no other case.
enum kv_status kv_region_close(const struct kv_region *region,
                               uint64_t timeout_ms);

// Ends the handle; NULL is allowed. If the region is not closed, this begins to close it and does not
// wait: the memory stays mapped until it is quiet, or for good.
enum kv_status kv_region_release(struct kv_region *region);

// Makes an empty list: of slots of this agent when `remote` is NULL, otherwise of slots of the peer in
// that life of it. A transfer towards another life is refused, since its numbers name other memory.
enum kv_status kv_descriptors_create(const struct kv_incarnation *remote,
                                     struct kv_descriptors **list);

// Appends slots of one pool, in this order. `pool` is a number from `kv_region_pool` for a local list and
// from `kv_agent_peer_pool` for a remote one.
enum kv_status kv_descriptors_push(const struct kv_descriptors *list,
                                   uint32_t pool,
                                   const uint32_t *slots,
                                   size_t slot_count);

// Ends the handle; NULL is allowed. Transfers that were prepared from the list keep what they need.
enum kv_status kv_descriptors_release(struct kv_descriptors *list);

// Checks a transfer once, so that it can be posted many times: both lists name existing slots of equal
// size, pair by pair, no destination twice, and the remote list is for this life of the peer. The message
// names the pair that does not fit. `op` is an `enum kv_op`.
//
// `KV_STATUS_STALE` for a list of another incarnation, `KV_STATUS_PEER_DOWN`.
enum kv_status kv_agent_prepare(const struct kv_agent *agent,
                                uint32_t op,
                                const struct kv_descriptors *local,
                                const struct kv_descriptors *remote,
                                uint32_t peer,
                                struct kv_prepared **prepared);

// Ends the handle; NULL is allowed. Operations that were posted go on.
enum kv_status kv_prepared_release(struct kv_prepared *prepared);

// Queues an operation. The source slots must not be written before it has ended.
//
// `KV_STATUS_FULL` when there is no room within `options->timeout_ms`: nothing was posted, post again later.
// `KV_STATUS_PEER_DOWN`, `KV_STATUS_STALE` when a registration was revoked since the transfer was prepared.
enum kv_status kv_agent_post(const struct kv_agent *agent,
                             const struct kv_prepared *prepared,
                             const struct kv_post_options *options,
                             struct kv_transfer **transfer);

// Where an operation stands now: `state` gets an `enum kv_transfer_state` and `visibility`, unless NULL, an
// `enum kv_visibility` when it is done and 0 otherwise. Never blocks. When the answer is
// `KV_TRANSFER_STATE_IN_FLIGHT`, the agent's event descriptor becomes readable at the end of the operation.
enum kv_status kv_transfer_status(const struct kv_transfer *transfer,
                                  uint32_t *state,
                                  uint32_t *visibility);

// Waits for the end of an operation, at most `timeout_ms`; 0 only looks.
//
// `KV_STATUS_OK` when it has ended well; `visibility`, unless NULL, then gets an `enum kv_visibility`.
// `KV_STATUS_TIMED_OUT`: it goes on. `KV_STATUS_CANCELLED`: it was taken back. `KV_STATUS_FAILED`,
// `KV_STATUS_PEER_DOWN` and others say how it failed. `KV_STATUS_UNKNOWN`: nobody can tell, for good.
enum kv_status kv_transfer_wait(const struct kv_transfer *transfer,
                                uint64_t timeout_ms,
                                uint32_t *visibility);

// Takes the operation back if nobody has started it; otherwise does nothing. Says nothing about memory:
// ask for the state.
enum kv_status kv_transfer_cancel(const struct kv_transfer *transfer);

// Ends the handle; NULL is allowed. The operation goes on.
enum kv_status kv_transfer_release(struct kv_transfer *transfer);

// Begins to expect a flight: completions of `epoch` by these writers are weighed against these chunks.
// Every gate is closed until `kv_flight_arm`. The receiver gives out the epoch and never uses a number
// twice. A writer that is lost before all of its chunks have landed fails every stage at once.
//
// `KV_STATUS_BUSY` when a flight of that epoch is not quiet yet, `KV_STATUS_PEER_DOWN`.
enum kv_status kv_flight_create(const struct kv_agent *agent,
                                uint64_t epoch,
                                const struct kv_chunk *chunks,
                                size_t chunk_count,
                                const struct kv_writer *writers,
                                size_t writer_count,
                                struct kv_flight **flight);

// Begins to count what arrives. Call it once, before a writer is told where to write.
//
// `KV_STATUS_INVALID_STATE` when it was armed before, or the pools of its cache are not registered;
// `KV_STATUS_INVALID_ARGUMENT` when they are registered with another agent than that of the flight;
// `KV_STATUS_BUSY` when the end of their registration has begun.
enum kv_status kv_flight_arm(const struct kv_flight *flight);

// The state of one gate now. Never blocks. When it is pending, the agent's event descriptor becomes readable
// when it may have changed; when the flight is not armed, once it is armed or ended.
enum kv_status kv_flight_check(const struct kv_flight *flight,
                               uint32_t stage,
                               struct kv_stage *answer);

// Waits until the gate of a stage is open, at most `timeout_ms`; 0 only looks.
//
// `KV_STATUS_OK`: every byte of the stage is visible to this thread. `KV_STATUS_FAILED` with the cause, for
// good. `KV_STATUS_NOT_ARMED`. `KV_STATUS_TIMED_OUT`: the gate is as it was.
enum kv_status kv_flight_wait(const struct kv_flight *flight,
                              uint32_t stage,
                              uint64_t timeout_ms);

// Ends the flight after use. A writer whose chunks have all landed is quiet; the others have to answer
// (`kv_flight_writer_answered`) or to be proven dead. If something is missing, the gates are shut.
//
// `KV_STATUS_INVALID_STATE` when it was ended before.
enum kv_status kv_flight_close(const struct kv_flight *flight);

// Gives the flight up: gates that miss something fail with `reason`, at once. Its memory is not free
// by that: tell the writers, let each answer, and wait for the quiet.
//
// `KV_STATUS_INVALID_STATE` when it was ended before.
enum kv_status kv_flight_abort(const struct kv_flight *flight,
                               const char *reason);

// Says that a peer has answered: its operations of this flight, as `rank`, have all ended.
//
// `KV_STATUS_INVALID_ARGUMENT` when this connection is not that writer: another life of a process cannot
// answer for a former one. `KV_STATUS_INVALID_STATE` before the flight was ended.
enum kv_status kv_flight_writer_answered(const struct kv_flight *flight,
                                         uint32_t peer,
                                         uint32_t rank);

// Waits until nobody can touch the memory of the flight any more, at most `timeout_ms`; 0 only looks.
//
// `KV_STATUS_OK` is the right to reuse the memory, and nothing else is: `KV_STATUS_TIMED_OUT` changes nothing.
// `KV_STATUS_INVALID_STATE` before the flight was ended.
enum kv_status kv_flight_wait_quiet(const struct kv_flight *flight,
                                    uint64_t timeout_ms);

// Ends the handle; NULL is allowed. A flight that was not ended is aborted. Nobody is told any more when its
// memory is quiet: plain slots are then lost to reuse, slots of a cache go back to their pools by
// themselves.
enum kv_status kv_flight_release(struct kv_flight *flight);

// Makes the schema of a model's cache. The message names the field of the configuration that does not
// fit, with its value and what was expected.
enum kv_status kv_schema_create(const struct kv_schema_options *options,
                                struct kv_schema **schema);

// Layers with storage: the main layers, and behind them the draft block when drafting.
enum kv_status kv_schema_layer_count(const struct kv_schema *schema, uint32_t *layer_count);

// How the pages of one component of one layer are made. `component` is an `enum kv_component`; that a layer
// does not have it is an answer (`is_present` 0) and no failure.
enum kv_status kv_schema_component(const struct kv_schema *schema,
                                   uint32_t layer,
                                   uint32_t component,
                                   struct kv_component_info *info);

// The slots that a request of `total_tokens` tokens, prompt and output, takes from pools: logical pages of
// 256 tokens, and window slots. Beside those it takes one request slot.
enum kv_status kv_schema_slots(const struct kv_schema *schema,
                               uint32_t total_tokens,
                               uint32_t *pages,
                               uint32_t *windows);

// The hash over every field that decides the shape or the meaning of a byte, `KV_DIGEST_BYTES` bytes. Offers
// carry these fields and are refused where one differs; this is for logs.
enum kv_status kv_schema_fingerprint(const struct kv_schema *schema,
                                     uint8_t *fingerprint);

// Ends the handle; NULL is allowed.
enum kv_status kv_schema_release(struct kv_schema *schema);

// Allocates zeroed pools for every component of the schema.
//
// `KV_STATUS_OUT_OF_MEMORY` when the host or its control group has less to give; nothing was touched then.
enum kv_status kv_pools_create(const struct kv_schema *schema,
                               const struct kv_pool_options *options,
                               struct kv_pools **pools);

// Registers the pools with an agent, once. Peers that connect later learn of them, so register before
// connecting.
//
// `KV_STATUS_INVALID_STATE` when they are registered already, also while `kv_pools_unregister` waits.
enum kv_status kv_pools_register(const struct kv_pools *pools,
                                 const struct kv_agent *agent);

// Ends the registration once no operation and no peer uses the memory. Blocks at most `timeout_ms`.
//
// Answers `KV_STATUS_OK` when there is no registration.
//
// `KV_STATUS_BUSY` when that is not so in time: the pools stay registered, take no new operation and can be asked
// again. `KV_STATUS_BUSY` also, at once, while another thread waits in this call.
enum kv_status kv_pools_unregister(const struct kv_pools *pools,
                                   uint64_t timeout_ms);

// The slots by state, after freeing what has been proven quiet.
enum kv_status kv_pools_stats(const struct kv_pools *pools, struct kv_pool_stats *stats);

// Reserves the slots of all components for a request of `total_tokens` tokens, prompt and output, or none.
// `room` is the caller's number of the request, the same on both sides of a hand-off.
//
// `KV_STATUS_FULL` when slots are short now, `KV_STATUS_INVALID_ARGUMENT` when they can never suffice.
enum kv_status kv_pools_reserve(const struct kv_pools *pools,
                                uint32_t total_tokens,
                                uint64_t room,
                                struct kv_write_lease **lease);

// Ends the handle; NULL is allowed. The memory stays as long as a lease, a flight or a peer needs it.
enum kv_status kv_pools_release(struct kv_pools *pools);

// Makes the plan for a prompt of `prompt_tokens` tokens. `segment_ends` are token counts: rising, all but
// the last a multiple of 256, the last one the length of the prompt; a segment is what is sent of a layer
// in one piece. Every layer is delivered by exactly one of `writers`.
enum kv_status kv_plan_create(const struct kv_schema *schema,
                              uint32_t prompt_tokens,
                              const uint32_t *segment_ends,
                              size_t segment_count,
                              const struct kv_writer_layers *writers,
                              size_t writer_count,
                              struct kv_plan **plan);

// Ends the handle; NULL is allowed.
enum kv_status kv_plan_release(struct kv_plan *plan);

// Gives a layer out for writing and for reading what was written. Release it with `kv_layer_release` before
// it is committed.
enum kv_status kv_write_lease_layer(const struct kv_write_lease *lease,
                                    uint32_t layer,
                                    struct kv_layer **answer);

// States that the rows of a layer for tokens `first_token` up to, not including, `end_token` are written, by
// this thread or by threads that it has synchronised with. The witness covers everything committed so far.
//
// `KV_STATUS_BUSY` while the layer is given out: who commits has let go of its addresses.
// `KV_STATUS_INVALID_STATE` when tokens between the last commit and this one are missing, or there are more than
// were reserved.
enum kv_status kv_write_lease_commit(const struct kv_write_lease *lease,
                                     uint32_t layer,
                                     uint32_t first_token,
                                     uint32_t end_token,
                                     struct kv_written **written);

// Ends a write lease: its slots are free once every operation that reads them has ended and every
// `kv_written` of it is released. Waits for that at most `timeout_ms`; 0 only looks.
//
// `KV_STATUS_TIMED_OUT`: the lease has ended and its slots are still read; ask again. The event descriptor of the
// agent that the pools are registered with tells when; for pools without an agent nothing does.
// `KV_STATUS_BUSY` while a layer is given out, `KV_STATUS_INVALID_STATE` when it became a flight: then nothing has
// changed.
enum kv_status kv_write_lease_close(const struct kv_write_lease *lease,
                                    uint64_t timeout_ms);

// Ends the handle; NULL is allowed. If the lease is not closed, this closes it and does not wait: the pools
// free its slots when nobody uses them any more. Layers that it gave out keep it until they are released.
enum kv_status kv_write_lease_release(struct kv_write_lease *lease);

// Sends what one segment adds to a written layer to the peer that made the offer. `plan` is the one that
// `kv_offer_plan` has made from it. Waits at most `timeout_ms` for room in the queue.
//
// `transfer` gets the operation, or NULL when the segment adds nothing to this layer. The operation keeps what
// it reads; its handle may be released at once, and `kv_write_lease_close` waits for its end.
//
// `KV_STATUS_INVALID_STATE` when the witness proves too little, or, for the last segment, too much;
// `KV_STATUS_REFUSED` when the offer is for a cache of another fingerprint, `KV_STATUS_STALE` when it is of another
// life of the peer, `KV_STATUS_FULL`, `KV_STATUS_PEER_DOWN`.
enum kv_status kv_written_post(const struct kv_written *written,
                               const struct kv_plan *plan,
                               uint32_t segment,
                               const struct kv_agent *agent,
                               uint32_t peer,
                               const struct kv_offer *offer,
                               uint64_t timeout_ms,
                               struct kv_transfer **transfer);

// Ends the handle; NULL is allowed. What was posted goes on.
enum kv_status kv_written_release(struct kv_written *written);

// Waits until every component of a layer has landed, at most `timeout_ms`, and gives the layer out. Release
// it with `kv_layer_release`.
//
// `KV_STATUS_TIMED_OUT`: the gate is as it was, and the event descriptor of the agent becomes readable when it
// may have opened. `KV_STATUS_FAILED` with the cause, for good. `KV_STATUS_NOT_ARMED`.
enum kv_status kv_read_lease_layer(const struct kv_read_lease *lease,
                                   uint32_t layer,
                                   uint64_t timeout_ms,
                                   struct kv_layer **answer);

// Ends the handle; NULL is allowed. Layers that it gave out stay good until they are released.
enum kv_status kv_read_lease_release(struct kv_read_lease *lease);

// One page of a component of the layer. `component` is an `enum kv_component` that the layer has, `ordinal`
// counts the pages of the sequence from 0 (see `struct kv_component_info`).
//
// `KV_STATUS_FAILED` when the flight has failed since the layer was given out.
enum kv_status kv_layer_page(const struct kv_layer *layer,
                             uint32_t component,
                             uint32_t ordinal,
                             struct kv_page *page);

// Gives a layer back; NULL is allowed. Its addresses are no longer to be used.
enum kv_status kv_layer_release(struct kv_layer *layer);

// Turns reserved slots into a flight that `plan` describes, with one gate per layer. Arm it with
// `kv_flight_arm`, tell the writers with `kv_flight_offer`, read it with `kv_flight_lease`; it ends as every
// flight does, and its slots are free when it is quiet and its leases are released.
//
// The write lease is used up; its handle is still to be released. If the call fails, it is as before.
//
// `KV_STATUS_BUSY` while a layer of the lease is given out; `KV_STATUS_INVALID_ARGUMENT` when the plan needs more
// slots than were reserved.
enum kv_status kv_write_lease_expect(const struct kv_write_lease *lease,
                                     const struct kv_plan *plan,
                                     const struct kv_agent *agent,
                                     const struct kv_expect_options *options,
                                     struct kv_flight **flight);

// What a writer has to know: where the rows of this flight go, and what the cache here looks like. The bytes
// are for `kv_offer_parse` on the other side; send them as a message. `length` gets their number, also when
// `capacity` is smaller and the call fails.
//
// `KV_STATUS_INVALID_STATE` before the flight is armed: until then nobody may write. Also when the pools are not
// registered any more; `KV_STATUS_BUSY` when the end of their registration has begun, `KV_STATUS_INVALID_ARGUMENT`
// when they are registered with another agent meanwhile.
enum kv_status kv_flight_offer(const struct kv_flight *flight,
                               uint8_t *buffer,
                               size_t capacity,
                               size_t *length);

// A lease of a flight of a cache. `access` is an `enum kv_access`.
//
// `KV_STATUS_BUSY` when another lease has the right to append; `KV_STATUS_INVALID_STATE` when the flight has ended.
enum kv_status kv_flight_lease(const struct kv_flight *flight,
                               uint32_t access,
                               struct kv_read_lease **lease);

// Compares a layer whose gate is open with what its writers have said about it (`kv_expect_options.verify`),
// before the first row of it is read or written. `violation_count`, unless NULL, gets the pages that are not
// what they should be.
//
// `KV_STATUS_FAILED` when there is one; the message describes the first. `KV_STATUS_TIMED_OUT` while the gate is
// closed. `KV_STATUS_INVALID_STATE` when the flight is not verified.
enum kv_status kv_flight_verify(const struct kv_flight *flight,
                                uint32_t layer,
                                uint32_t *violation_count);

// Reads an offer. `schema` is that of the cache here.
//
// `KV_STATUS_REFUSED` when the caches differ; the message names the field and both values.
// `KV_STATUS_INVALID_ARGUMENT` for bytes that are no offer.
enum kv_status kv_offer_parse(const struct kv_schema *schema,
                              const uint8_t *bytes,
                              size_t length_bytes,
                              struct kv_offer **offer);

// What an offer says.
enum kv_status kv_offer_describe(const struct kv_offer *offer, struct kv_offer_info *info);

// Makes the plan of an offer, with its prompt and its segments. `writers` are those of the receiver's plan.
enum kv_status kv_offer_plan(const struct kv_offer *offer,
                             const struct kv_writer_layers *writers,
                             size_t writer_count,
                             struct kv_plan **plan);

// Ends the handle; NULL is allowed.
enum kv_status kv_offer_release(struct kv_offer *offer);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* KVGATE_H */
