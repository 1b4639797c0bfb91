/*
 * One hand-off of a KV cache between two processes, in C: register, connect, post, wait at the gates, read,
 * cancel.
 *
 * Started without arguments it is the decode side: it makes pools, listens, and starts itself once more as the
 * prefill side, which writes the cache of a prompt, layer by layer. The decode side gets the address of a page
 * only from a layer whose gate is open. A second request is given up half-way, and its slots come back only when
 * its writer has answered.
 *
 * The rows are a pattern and no model's; what matters here is who may touch them when.
 *
 * Exit code 0: everything was as it should be. 1: something was not. 2: wrong usage.
 */
#define _POSIX_C_SOURCE 200809L

#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kvgate.h"
#include "must.h"

enum {
  PROMPT_TOKENS = 300,
  TOTAL_TOKENS = 364,
  FIRST_SEGMENT_END = 256,
  SEGMENT_COUNT = 2,
  WRITER = 0,
  PATIENCE_MS = 10000,
  OFFER_BYTES = 1 << 16,
};

/* Three layers of DeepSeek-V4: window only, ratio 4, ratio 128, in the formats of the real model. */
static const char config[] =
    "{\"model_type\": \"deepseek_v4\", \"num_hidden_layers\": 3, \"compress_ratios\": [0, 4, 128],"
    " \"head_dim\": 512, \"qk_rope_head_dim\": 64, \"index_head_dim\": 128, \"sliding_window\": 128,"
    " \"rope_theta\": 10000, \"compress_rope_theta\": 160000, \"rope_scaling\": {\"type\": \"yarn\","
    " \"factor\": 16, \"original_max_position_embeddings\": 65536, \"beta_fast\": 32, \"beta_slow\": 1}}";
static const uint8_t weights_digest[KV_DIGEST_BYTES] = "weights of the example";

/* What the two sides tell each other; an offer follows its note. Both are this program. */
enum { OFFER = 1, USED, ABORT, ABORT_ANSWERED, FINISH };
struct note {
  uint32_t kind;
  uint32_t layer;
  uint64_t room;
};

/* One side: a cache of which another process can be told. */
struct side {
  kv_agent *agent;
  kv_schema *schema;
  kv_pools *pools;
  uint32_t layer_count;
  uint32_t peer;
};

static struct side open_side(const char *name) {
  const struct kv_agent_options options = {.struct_bytes = sizeof options, .name = name};
  const struct kv_schema_options shape = {.struct_bytes = sizeof shape,
                                          .latent = KV_LATENT_FORMAT_PACKED_FP8,
                                          .index_k = KV_INDEX_K_FORMAT_BF16,
                                          .config_json = config,
                                          .weights_digest = weights_digest};
  struct kv_pool_options room_for = {
      .struct_bytes = sizeof room_for, .memory = KV_MEMORY_KIND_SHARED, .requests = 2};
  struct side side = {0};
  MUST(kv_agent_create(&options, &side.agent));
  MUST(kv_schema_create(&shape, &side.schema));
  MUST(kv_schema_layer_count(side.schema, &side.layer_count));
  MUST(kv_schema_slots(side.schema, TOTAL_TOKENS, &room_for.pages, &room_for.windows));
  room_for.pages *= room_for.requests;
  room_for.windows *= room_for.requests;
  MUST(kv_pools_create(side.schema, &room_for, &side.pools));
  MUST(kv_pools_register(side.pools, side.agent));
  return side;
}

/* Nothing may be left: every slot free, every thread ended. */
static void close_side(struct side *side) {
  struct kv_pool_stats stats = {.struct_bytes = sizeof stats};
  struct kv_shutdown_report left = {.struct_bytes = sizeof left};
  MUST(kv_pools_stats(side->pools, &stats));
  require(stats.pages.free == stats.pages.capacity && stats.windows.free == stats.windows.capacity &&
              stats.requests.free == stats.requests.capacity,
          "every slot is free again");
  MUST(kv_pools_unregister(side->pools, PATIENCE_MS));
  MUST(kv_pools_release(side->pools));
  MUST(kv_schema_release(side->schema));
  MUST(kv_agent_shutdown(side->agent, PATIENCE_MS, &left));
  require(left.running_threads == 0 && left.unquiet_flights == 0 && left.open_regions == 0 &&
              left.unknown_operations == 0 && left.unsent_messages == 0,
          "nothing is left");
  MUST(kv_agent_release(side->agent));
}

static void say(const struct side *side, struct note note, const uint8_t *more, size_t more_bytes) {
  static uint8_t message[sizeof(struct note) + OFFER_BYTES];
  memcpy(message, &note, sizeof note);
  if (more_bytes > 0) memcpy(message + sizeof note, more, more_bytes);
  MUST(kv_agent_send(side->agent, side->peer, message, sizeof note + more_bytes));
}

/* The next message; what follows the note is in the event. */
static struct note hear(const struct side *side, struct kv_event *event) {
  struct note note;
  event->struct_bytes = sizeof *event;
  MUST(kv_agent_next_event(side->agent, PATIENCE_MS, event));
  require(event->kind == KV_EVENT_KIND_MESSAGE && event->length_bytes >= sizeof note,
          "a message comes next");
  memcpy(&note, event->bytes, sizeof note);
  return note;
}

/* The byte that every row of a component of a layer consists of. */
static unsigned char content(uint64_t room, uint32_t layer, uint32_t component) {
  return (unsigned char)(room * 64 + layer * 16 + component + 1);
}

/* ---- decode ---- */

struct receiving {
  kv_flight *flight;
  kv_read_lease *lease;
  uint64_t room;
};

static struct receiving offer(const struct side *side, uint64_t room) {
  static uint8_t bytes[OFFER_BYTES];
  const uint32_t ends[SEGMENT_COUNT] = {FIRST_SEGMENT_END, PROMPT_TOKENS};
  const struct kv_writer_layers layers = {.rank = WRITER, .end_layer = side->layer_count};
  const struct kv_writer writer = {.peer = side->peer, .rank = WRITER};
  const struct kv_expect_options options = {.struct_bytes = sizeof options,
                                            .verify = KV_VERIFY_CANARY,
                                            .epoch = room,
                                            .writers = &writer,
                                            .writer_count = 1};
  struct receiving receiving = {.room = room};
  kv_plan *plan = NULL;
  kv_write_lease *slots = NULL;
  size_t length = 0;

  MUST(kv_plan_create(side->schema, PROMPT_TOKENS, ends, SEGMENT_COUNT, &layers, 1, &plan));
  MUST(kv_pools_reserve(side->pools, TOTAL_TOKENS, room, &slots));
  MUST(kv_write_lease_expect(slots, plan, side->agent, &options, &receiving.flight));
  MUST(kv_write_lease_release(slots));
  MUST(kv_plan_release(plan));
  /* Nobody is told where to write before somebody counts what arrives. */
  MUST_BE(KV_STATUS_INVALID_STATE, kv_flight_offer(receiving.flight, bytes, sizeof bytes, &length));
  MUST(kv_flight_arm(receiving.flight));
  MUST(kv_flight_lease(receiving.flight, KV_ACCESS_READ, &receiving.lease));
  MUST(kv_flight_offer(receiving.flight, bytes, sizeof bytes, &length));
  say(side, (struct note){.kind = OFFER, .room = room}, bytes, length);
  return receiving;
}

/* Waits for a layer without blocking in the library: ask, poll the descriptor, ask again. */
static kv_layer *await_layer(const struct side *side, const kv_read_lease *lease, uint32_t number) {
  struct pollfd readable = {.fd = -1, .events = POLLIN};
  MUST(kv_agent_event_fd(side->agent, &readable.fd));
  for (;;) {
    kv_layer *layer = NULL;
    uint64_t count;
    const enum kv_status status = kv_read_lease_layer(lease, number, 0, &layer);
    if (status == KV_STATUS_OK) return layer;
    if (status != KV_STATUS_TIMED_OUT) fail(__LINE__, "kv_read_lease_layer", status);
    require(poll(&readable, 1, PATIENCE_MS) == 1, "the gate opens in time");
    require(read(readable.fd, &count, sizeof count) == sizeof count, "the descriptor can be cleared");
  }
}

/* The page that holds an entry of a component. */
static struct kv_page page_of(const kv_layer *layer, const struct kv_component_info *info,
                              uint32_t component, uint32_t entry) {
  struct kv_page page = {.struct_bytes = sizeof page};
  MUST(kv_layer_page(layer, component, 0, &page));
  MUST(kv_layer_page(layer, component, entry / info->entries_per_page % page.page_count, &page));
  return page;
}

/* Compares the page that holds an entry with what was sent. */
static void compare(const struct side *side, const kv_layer *layer, uint64_t room, uint32_t number,
                    uint32_t component, uint32_t entry) {
  struct kv_component_info info = {.struct_bytes = sizeof info};
  MUST(kv_schema_component(side->schema, number, component, &info));
  if (!info.is_present) return;
  const struct kv_page page = page_of(layer, &info, component, entry);
  const unsigned char *bytes = page.address;
  for (uint64_t i = 0; i < page.length_bytes; i++) {
    require(bytes[i] == content(room, number, component), "the rows are those that were written");
  }
}

static void read_layer(const struct side *side, const struct receiving *receiving, uint32_t number) {
  kv_layer *layer = await_layer(side, receiving->lease, number);
  MUST(kv_flight_verify(receiving->flight, number, NULL));
  /* The newest entry of each kind: of the last token, of the last group of 4, of the last of 128. */
  compare(side, layer, receiving->room, number, KV_COMPONENT_SWA_LATENT, PROMPT_TOKENS - 1);
  compare(side, layer, receiving->room, number, KV_COMPONENT_C4_LATENT, PROMPT_TOKENS / 4 - 1);
  compare(side, layer, receiving->room, number, KV_COMPONENT_INDEX_K, PROMPT_TOKENS / 4 - 1);
  compare(side, layer, receiving->room, number, KV_COMPONENT_C128_LATENT, PROMPT_TOKENS / 128 - 1);
  MUST(kv_layer_release(layer));
}

/* Writes the row of the next token, with the one right to do that. The page holds rows of the prompt as well:
 * those stay as they are. */
static void append(const struct side *side, const struct receiving *receiving) {
  const uint32_t component = KV_COMPONENT_SWA_LATENT, token = PROMPT_TOKENS;
  struct kv_component_info info = {.struct_bytes = sizeof info};
  kv_read_lease *lease = NULL;
  kv_layer *layer = NULL;
  MUST(kv_schema_component(side->schema, 0, component, &info));
  MUST(kv_flight_lease(receiving->flight, KV_ACCESS_APPEND, &lease));
  MUST(kv_read_lease_layer(lease, 0, 0, &layer));
  const struct kv_page page = page_of(layer, &info, component, token);
  require(page.is_writable == 1, "the page may be written");
  unsigned char *bytes = page.address;
  const uint64_t row = token % info.rows_per_page;
  const uint64_t data = row * info.data_stride_bytes;
  const uint64_t scales = info.scale_offset_bytes + row * info.scale_stride_bytes;
  memset(bytes + data, 0, info.data_stride_bytes);
  memset(bytes + scales, 0, info.scale_stride_bytes);
  uint64_t written = 0;
  for (uint64_t i = 0; i < page.length_bytes; i++) {
    written += bytes[i] != content(receiving->room, 0, component);
  }
  require(written == info.data_stride_bytes + info.scale_stride_bytes, "one row has changed");
  MUST(kv_layer_release(layer));
  MUST(kv_read_lease_release(lease));
}

static void receive(const struct side *side) {
  const struct receiving receiving = offer(side, 1);
  for (uint32_t number = 0; number < side->layer_count; number++) {
    read_layer(side, &receiving, number);
    printf("decode: layer %" PRIu32 " has landed whole and has been read\n", number);
    if (number + 1 < side->layer_count) {
      /* The writer sends the next one when this one has been used. */
      kv_layer *none = NULL;
      MUST_BE(KV_STATUS_TIMED_OUT, kv_read_lease_layer(receiving.lease, number + 1, 0, &none));
    }
    say(side, (struct note){.kind = USED, .layer = number, .room = receiving.room}, NULL, 0);
  }
  append(side, &receiving);
  MUST(kv_read_lease_release(receiving.lease));
  MUST(kv_flight_close(receiving.flight));
  MUST(kv_flight_wait_quiet(receiving.flight, PATIENCE_MS));
  MUST(kv_flight_release(receiving.flight));
  printf("decode: request 1 is over, its slots are free\n");
}

static void give_up(const struct side *side) {
  const struct receiving receiving = offer(side, 2);
  struct kv_event event;
  kv_layer *none = NULL;
  read_layer(side, &receiving, 0);
  MUST(kv_flight_abort(receiving.flight, "the client went away"));
  MUST_BE(KV_STATUS_FAILED, kv_read_lease_layer(receiving.lease, 1, PATIENCE_MS, &none));
  printf("decode: request 2 is given up: %s\n", kv_last_error_message());
  MUST(kv_read_lease_release(receiving.lease));
  /* Its writer may still write: the slots belong to nobody yet. */
  MUST_BE(KV_STATUS_TIMED_OUT, kv_flight_wait_quiet(receiving.flight, 0));
  say(side, (struct note){.kind = ABORT, .room = receiving.room}, NULL, 0);
  require(hear(side, &event).kind == ABORT_ANSWERED, "the writer answers");
  MUST(kv_flight_writer_answered(receiving.flight, side->peer, WRITER));
  MUST(kv_flight_wait_quiet(receiving.flight, PATIENCE_MS));
  MUST(kv_flight_release(receiving.flight));
  printf("decode: its writer has answered, its slots are free\n");
}

static pid_t start_prefill(char *address) {
  char name[] = "pd", prefill[] = "prefill";
  char *arguments[] = {name, prefill, address, NULL};
  fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    execv("/proc/self/exe", arguments);
    _exit(127);
  }
  require(child > 0, "a process can be started");
  return child;
}

static int decode(void) {
  struct side side = open_side("decode");
  struct kv_event event = {.struct_bytes = sizeof event};
  char address[64], bound[KV_ADDRESS_BYTES];
  int status = 0;

  snprintf(address, sizeof address, "shm:kvgate-pd-%ld", (long)getpid());
  MUST(kv_agent_listen(side.agent, address, bound));
  const pid_t child = start_prefill(bound);
  MUST(kv_agent_next_event(side.agent, PATIENCE_MS, &event));
  require(event.kind == KV_EVENT_KIND_PEER_UP, "the other side has connected");
  side.peer = event.peer;
  printf("decode: connected over %s\n", bound);

  receive(&side);
  give_up(&side);

  say(&side, (struct note){.kind = FINISH}, NULL, 0);
  MUST(kv_agent_next_event(side.agent, PATIENCE_MS, &event));
  require(event.kind == KV_EVENT_KIND_PEER_DOWN && event.is_proven,
          "the other side is gone for sure");
  require(waitpid(child, &status, 0) == child, "the other side can be waited for");
  require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the other side has ended well");
  close_side(&side);
  printf("decode: done\n");
  return 0;
}

/* ---- prefill ---- */

/* Writes every page of a layer, as a model would its rows. */
static void write_layer(const struct side *side, const kv_write_lease *lease, uint64_t room,
                        uint32_t number) {
  kv_layer *layer = NULL;
  kv_written *none = NULL;
  MUST(kv_write_lease_layer(lease, number, &layer));
  for (uint32_t component = 0; component <= KV_COMPONENT_MTP_LATENT; component++) {
    struct kv_component_info info = {.struct_bytes = sizeof info};
    struct kv_page page = {.struct_bytes = sizeof page, .page_count = 1};
    MUST(kv_schema_component(side->schema, number, component, &info));
    for (uint32_t ordinal = 0; info.is_present && ordinal < page.page_count; ordinal++) {
      MUST(kv_layer_page(layer, component, ordinal, &page));
      memset(page.address, content(room, number, component), page.length_bytes);
    }
  }
  /* Who still has addresses of a layer cannot say that it is written. */
  MUST_BE(KV_STATUS_BUSY, kv_write_lease_commit(lease, number, 0, PROMPT_TOKENS, &none));
  MUST(kv_layer_release(layer));
}

/* Commits and sends a written layer, segment by segment. */
static void send_layer(const struct side *side, const kv_write_lease *lease, const kv_offer *to,
                       const kv_plan *plan, uint32_t number) {
  const uint32_t ends[SEGMENT_COUNT] = {FIRST_SEGMENT_END, PROMPT_TOKENS};
  for (uint32_t segment = 0; segment < SEGMENT_COUNT; segment++) {
    const uint32_t start = segment == 0 ? 0 : ends[segment - 1];
    kv_written *written = NULL;
    kv_transfer *transfer = NULL;
    MUST(kv_write_lease_commit(lease, number, start, ends[segment], &written));
    MUST(kv_written_post(written, plan, segment, side->agent, side->peer, to, PATIENCE_MS, &transfer));
    /* The lease counts the operation; nobody has to watch this one. */
    MUST(kv_transfer_release(transfer));
    MUST(kv_written_release(written));
  }
}

static void serve(const struct side *side, const uint8_t *bytes, size_t length_bytes) {
  const struct kv_writer_layers layers = {.rank = WRITER, .end_layer = side->layer_count};
  struct kv_offer_info info = {.struct_bytes = sizeof info};
  struct kv_event event;
  kv_offer *to = NULL;
  kv_plan *plan = NULL;
  kv_write_lease *lease = NULL;
  int is_wanted = 1;

  MUST(kv_offer_parse(side->schema, bytes, length_bytes, &to));
  MUST(kv_offer_describe(to, &info));
  MUST(kv_offer_plan(to, &layers, 1, &plan));
  MUST(kv_pools_reserve(side->pools, info.prompt_tokens, info.room, &lease));
  for (uint32_t number = 0; is_wanted && number < side->layer_count; number++) {
    write_layer(side, lease, info.room, number);
    send_layer(side, lease, to, plan, number);
    const struct note note = hear(side, &event);
    require(note.room == info.room, "the note is about this request");
    is_wanted = note.kind == USED;
    require(is_wanted ? note.layer == number : note.kind == ABORT, "the note is one of the two");
  }
  /* Every operation has ended when the slots are free: only then is an abort answered. */
  MUST(kv_write_lease_close(lease, PATIENCE_MS));
  if (!is_wanted) say(side, (struct note){.kind = ABORT_ANSWERED, .room = info.room}, NULL, 0);
  MUST(kv_write_lease_release(lease));
  MUST(kv_plan_release(plan));
  MUST(kv_offer_release(to));
}

static int prefill(const char *address) {
  role = "prefill";
  struct side side = open_side("prefill");
  struct kv_event event = {.struct_bytes = sizeof event};
  MUST(kv_agent_connect(side.agent, address, PATIENCE_MS, &side.peer));
  MUST(kv_agent_next_event(side.agent, PATIENCE_MS, &event));
  require(event.kind == KV_EVENT_KIND_PEER_UP, "the connection is announced");
  for (;;) {
    const struct note note = hear(&side, &event);
    if (note.kind == FINISH) break;
    require(note.kind == OFFER, "an offer comes next");
    serve(&side, event.bytes + sizeof note, event.length_bytes - sizeof note);
  }
  close_side(&side);
  return 0;
}

int main(int argc, char **argv) {
  if (kv_abi_version() != KV_ABI_VERSION) {
    fprintf(stderr, "pd: built for interface %d, the library has %" PRIu32 "\n", KV_ABI_VERSION,
            kv_abi_version());
    return 1;
  }
  if (argc == 1) return decode();
  if (argc == 3 && strcmp(argv[1], "prefill") == 0) return prefill(argv[2]);
  fprintf(stderr, "usage: pd\n");
  return 2;
}
