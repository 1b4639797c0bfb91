/*
 * Plain slots between two processes, in C: register, connect, post, wait at the gates, read, cancel. pd.c does
 * the same with the cache of a model.
 *
 * Started without arguments it is the decode side: it registers memory, listens, starts itself once more as
 * the prefill side, and receives two flights. The first one is read stage by stage, each behind its gate.
 * The second one is given up half-way, and its memory is free only when its writer has answered.
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
  SLOT_BYTES = 4096,
  SLOT_COUNT = 32,
  STAGE_COUNT = 3,
  SLOTS_PER_STAGE = 4,
  WRITER = 0,
  PATIENCE_MS = 10000,
};

/* What the two sides tell each other. Both are this program, so the struct itself is the message. */
enum { OFFER = 1, USED, ABORT, ABORT_ANSWERED, FINISH };
struct note {
  uint32_t kind;
  uint32_t stage;
  uint64_t epoch;
};

/* Registered slots. */
struct slots {
  kv_memory *memory;
  kv_region *region;
  unsigned char *bytes;
  uint32_t pool;
};

static struct slots register_slots(const kv_agent *agent) {
  struct slots slots = {0};
  const struct kv_pool_geometry geometry = {
      .stride_bytes = SLOT_BYTES, .slot_bytes = SLOT_BYTES, .slot_count = SLOT_COUNT};
  void *address = NULL;
  MUST(kv_memory_create(KV_MEMORY_KIND_SHARED, SLOT_BYTES * SLOT_COUNT, "slots", &slots.memory));
  MUST(kv_memory_address(slots.memory, &address, NULL));
  MUST(kv_agent_register(agent, slots.memory, &geometry, 1, &slots.region));
  MUST(kv_region_pool(slots.region, 0, &slots.pool));
  slots.bytes = address;
  return slots;
}

/* The slot of the decode side that the n-th slot of a stage goes to, and its content. */
static uint32_t target_slot(uint32_t stage, uint32_t n) {
  return SLOT_COUNT - 1 - (stage * SLOTS_PER_STAGE + n);
}

static unsigned char content(uint64_t epoch, uint32_t stage, uint32_t n) {
  return (unsigned char)(epoch * 64 + stage * SLOTS_PER_STAGE + n + 1);
}

static void say(const kv_agent *agent, uint32_t peer, uint32_t kind, uint32_t stage, uint64_t epoch) {
  const struct note note = {.kind = kind, .stage = stage, .epoch = epoch};
  MUST(kv_agent_send(agent, peer, (const uint8_t *)&note, sizeof note));
}

static struct note hear(const kv_agent *agent, uint32_t kind) {
  struct kv_event event = {.struct_bytes = sizeof event};
  struct note note;
  MUST(kv_agent_next_event(agent, PATIENCE_MS, &event));
  require(event.kind == KV_EVENT_KIND_MESSAGE && event.length_bytes == sizeof note,
          "a message comes next");
  memcpy(&note, event.bytes, sizeof note);
  require(kind == 0 || note.kind == kind, "the message is the awaited one");
  return note;
}

/* ---- decode ---- */

/* Waits for a gate without blocking in the library: ask, poll the descriptor, ask again. */
static void await_gate(int fd, const kv_flight *flight, uint32_t stage) {
  for (;;) {
    struct kv_stage answer = {.struct_bytes = sizeof answer};
    struct pollfd readable = {.fd = fd, .events = POLLIN};
    uint64_t count;
    MUST(kv_flight_check(flight, stage, &answer));
    if (answer.state == KV_STAGE_STATE_READY) return;
    require(answer.state == KV_STAGE_STATE_PENDING, "the gate is closed and has not failed");
    require(poll(&readable, 1, PATIENCE_MS) == 1, "the gate opens in time");
    require(read(fd, &count, sizeof count) == sizeof count, "the descriptor can be cleared");
  }
}

static kv_flight *offer(const kv_agent *agent, uint32_t peer, uint64_t epoch) {
  struct kv_chunk chunks[STAGE_COUNT];
  const struct kv_writer writer = {.peer = peer, .rank = WRITER};
  kv_flight *flight = NULL;
  for (uint32_t stage = 0; stage < STAGE_COUNT; stage++) {
    chunks[stage] = (struct kv_chunk){
        .stage = stage, .chunk = 0, .writer = WRITER, .descriptor_count = SLOTS_PER_STAGE};
  }
  MUST(kv_flight_create(agent, epoch, chunks, STAGE_COUNT, &writer, 1, &flight));
  MUST_BE(KV_STATUS_NOT_ARMED, kv_flight_wait(flight, 0, 0));
  MUST(kv_flight_arm(flight));
  /* Only now may somebody learn where to write. */
  say(agent, peer, OFFER, 0, epoch);
  return flight;
}

static void read_stage(const struct slots *slots, uint64_t epoch, uint32_t stage) {
  for (uint32_t n = 0; n < SLOTS_PER_STAGE; n++) {
    const unsigned char *slot = slots->bytes + (size_t)target_slot(stage, n) * SLOT_BYTES;
    for (size_t i = 0; i < SLOT_BYTES; i++) {
      require(slot[i] == content(epoch, stage, n), "the bytes are those that were sent");
    }
  }
}

static void receive(const kv_agent *agent, int fd, uint32_t peer, const struct slots *slots) {
  kv_flight *flight = offer(agent, peer, 1);
  for (uint32_t stage = 0; stage < STAGE_COUNT; stage++) {
    await_gate(fd, flight, stage);
    read_stage(slots, 1, stage);
    printf("decode: stage %" PRIu32 " is there and has been read\n", stage);
    if (stage + 1 < STAGE_COUNT) {
      /* The writer sends the next one when this one has been used. */
      MUST_BE(KV_STATUS_TIMED_OUT, kv_flight_wait(flight, stage + 1, 0));
    }
    say(agent, peer, USED, stage, 1);
  }
  MUST(kv_flight_close(flight));
  MUST(kv_flight_wait_quiet(flight, PATIENCE_MS));
  MUST(kv_flight_release(flight));
  printf("decode: flight 1 is over, its slots may have a new owner\n");
}

static void give_up(const kv_agent *agent, uint32_t peer, const struct slots *slots) {
  kv_flight *flight = offer(agent, peer, 2);
  MUST(kv_flight_wait(flight, 0, PATIENCE_MS));
  read_stage(slots, 2, 0);
  MUST(kv_flight_abort(flight, "the client went away"));
  MUST_BE(KV_STATUS_FAILED, kv_flight_wait(flight, 1, PATIENCE_MS));
  printf("decode: flight 2 is given up: %s\n", kv_last_error_message());
  /* Its writer may still write: the slots belong to nobody yet. */
  MUST_BE(KV_STATUS_TIMED_OUT, kv_flight_wait_quiet(flight, 0));
  say(agent, peer, ABORT, 0, 2);
  (void)hear(agent, ABORT_ANSWERED);
  MUST(kv_flight_writer_answered(flight, peer, WRITER));
  MUST(kv_flight_wait_quiet(flight, PATIENCE_MS));
  MUST(kv_flight_release(flight));
  printf("decode: its writer has answered, its slots may have a new owner\n");
}

static pid_t start_prefill(char *address) {
  char name[] = "slots", prefill[] = "prefill";
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
  const struct kv_agent_options options = {.struct_bytes = sizeof options, .name = "decode"};
  struct kv_event event = {.struct_bytes = sizeof event};
  struct kv_shutdown_report left = {.struct_bytes = sizeof left};
  char address[64], bound[KV_ADDRESS_BYTES];
  kv_agent *agent = NULL;
  int fd = -1, status = 0;

  snprintf(address, sizeof address, "shm:kvgate-slots-%ld", (long)getpid());
  MUST(kv_agent_create(&options, &agent));
  struct slots slots = register_slots(agent);
  MUST(kv_agent_listen(agent, address, bound));
  MUST(kv_agent_event_fd(agent, &fd));
  const pid_t child = start_prefill(bound);
  MUST(kv_agent_next_event(agent, PATIENCE_MS, &event));
  require(event.kind == KV_EVENT_KIND_PEER_UP, "the other side has connected");
  const uint32_t peer = event.peer;
  printf("decode: connected over %s\n", bound);

  receive(agent, fd, peer, &slots);
  give_up(agent, peer, &slots);

  say(agent, peer, FINISH, 0, 0);
  MUST(kv_agent_next_event(agent, PATIENCE_MS, &event));
  require(event.kind == KV_EVENT_KIND_PEER_DOWN && event.is_proven,
          "the other side is gone for sure");
  require(waitpid(child, &status, 0) == child, "the other side can be waited for");
  require(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the other side has ended well");
  MUST(kv_region_close(slots.region, PATIENCE_MS));
  MUST(kv_region_release(slots.region));
  MUST(kv_memory_release(slots.memory));
  MUST(kv_agent_shutdown(agent, PATIENCE_MS, &left));
  require(left.running_threads == 0 && left.unquiet_flights == 0 && left.open_regions == 0 &&
              left.unknown_operations == 0 && left.unsent_messages == 0,
          "nothing is left");
  MUST(kv_agent_release(agent));
  printf("decode: done\n");
  return 0;
}

/* ---- prefill ---- */

static kv_transfer *send_stage(const kv_agent *agent, uint32_t peer, const struct slots *slots,
                               uint64_t epoch, uint32_t stage) {
  struct kv_peer_info info = {.struct_bytes = sizeof info};
  const struct kv_ticket ticket = {.stage = stage, .chunk = 0};
  const struct kv_post_options options = {.struct_bytes = sizeof options,
                                          .source = KV_SOURCE_HOST_WRITTEN,
                                          .epoch = epoch,
                                          .tickets = &ticket,
                                          .ticket_count = 1,
                                          .timeout_ms = PATIENCE_MS};
  uint32_t here[SLOTS_PER_STAGE], there[SLOTS_PER_STAGE], remote_pool = 0;
  kv_descriptors *local = NULL, *remote = NULL;
  kv_prepared *prepared = NULL;
  kv_transfer *transfer = NULL;

  for (uint32_t n = 0; n < SLOTS_PER_STAGE; n++) {
    here[n] = stage * SLOTS_PER_STAGE + n;
    there[n] = target_slot(stage, n);
    memset(slots->bytes + (size_t)here[n] * SLOT_BYTES, content(epoch, stage, n), SLOT_BYTES);
  }
  MUST(kv_agent_peer(agent, peer, &info));
  MUST(kv_agent_peer_pool(agent, peer, 0, &remote_pool, NULL));
  MUST(kv_descriptors_create(NULL, &local));
  MUST(kv_descriptors_create(&info.incarnation, &remote));
  MUST(kv_descriptors_push(local, slots->pool, here, SLOTS_PER_STAGE));
  MUST(kv_descriptors_push(remote, remote_pool, there, SLOTS_PER_STAGE));
  MUST(kv_agent_prepare(agent, KV_OP_WRITE, local, remote, peer, &prepared));
  MUST(kv_agent_post(agent, prepared, &options, &transfer));
  MUST(kv_prepared_release(prepared));
  MUST(kv_descriptors_release(remote));
  MUST(kv_descriptors_release(local));
  return transfer;
}

static void serve_offer(const kv_agent *agent, uint32_t peer, const struct slots *slots,
                        uint64_t epoch) {
  for (uint32_t stage = 0; stage < STAGE_COUNT; stage++) {
    kv_transfer *transfer = send_stage(agent, peer, slots, epoch, stage);
    const struct note note = hear(agent, 0);
    if (note.kind == ABORT) {
      /* What nobody has started is taken back; the rest is waited for. Then nothing is under way. */
      MUST(kv_transfer_cancel(transfer));
      const enum kv_status ended = kv_transfer_wait(transfer, PATIENCE_MS, NULL);
      require(ended == KV_STATUS_OK || ended == KV_STATUS_CANCELLED, "the last transfer has ended");
      MUST(kv_transfer_release(transfer));
      say(agent, peer, ABORT_ANSWERED, 0, epoch);
      return;
    }
    require(note.kind == USED && note.stage == stage, "the reader has used the stage");
    uint32_t visibility = 0;
    MUST(kv_transfer_wait(transfer, PATIENCE_MS, &visibility));
    require(visibility == KV_VISIBILITY_REMOTE_VISIBLE, "its bytes are visible to the reader");
    MUST(kv_transfer_release(transfer));
  }
}

static int prefill(const char *address) {
  const struct kv_agent_options options = {.struct_bytes = sizeof options, .name = "prefill"};
  struct kv_event event = {.struct_bytes = sizeof event};
  kv_agent *agent = NULL;
  uint32_t peer = 0;

  role = "prefill";
  MUST(kv_agent_create(&options, &agent));
  struct slots slots = register_slots(agent);
  MUST(kv_agent_connect(agent, address, PATIENCE_MS, &peer));
  MUST(kv_agent_next_event(agent, PATIENCE_MS, &event));
  require(event.kind == KV_EVENT_KIND_PEER_UP && event.peer == peer, "the connection is announced");
  for (;;) {
    const struct note note = hear(agent, 0);
    if (note.kind == FINISH) break;
    require(note.kind == OFFER, "an offer comes next");
    serve_offer(agent, peer, &slots, note.epoch);
  }
  MUST(kv_region_close(slots.region, PATIENCE_MS));
  MUST(kv_region_release(slots.region));
  MUST(kv_memory_release(slots.memory));
  MUST(kv_agent_release(agent));
  return 0;
}

int main(int argc, char **argv) {
  if (kv_abi_version() != KV_ABI_VERSION) {
    fprintf(stderr, "slots: built for interface %d, the library has %" PRIu32 "\n", KV_ABI_VERSION,
            kv_abi_version());
    return 1;
  }
  if (argc == 1) return decode();
  if (argc == 3 && strcmp(argv[1], "prefill") == 0) return prefill(argv[2]);
  fprintf(stderr, "usage: slots\n");
  return 2;
}
