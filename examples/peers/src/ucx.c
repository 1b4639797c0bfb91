// UCX as an application would use it: one ucp_get_nbx or ucp_put_nbx for each page, with its registration, then a flush
// of the endpoint. argv[1] is the label; UCX_TLS chooses the transports. GRID_NO_FLUSH=1 leaves the flush out: the
// checks must then find bad pages.
#include "grid.h"
#include <sys/mman.h>
#include <sys/socket.h>
#include <ucp/api/ucp.h>

struct eng {
  ucp_context_h ctx;
  ucp_worker_h w;
  ucp_ep_h ep;
  ucp_mem_h mem;
  ucp_rkey_h rkey;
  uint64_t remote;
  char *L;
  int noflush;
};
static volatile uint64_t pending;
static int bad;

static void die(const char *m, ucs_status_t s) {
  fprintf(stderr, "%s: %s\n", m, ucs_status_string(s));
  exit(3);
}
#define CK(x) do { ucs_status_t s_ = (x); if (s_ != UCS_OK) die(#x, s_); } while (0)

static void setup(struct eng *e, char *base) {
  ucp_params_t p = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP};
  ucp_config_t *c;
  CK(ucp_config_read(0, 0, &c));
  CK(ucp_init(&p, c, &e->ctx));
  ucp_config_release(c);
  ucp_worker_params_t wp = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE, .thread_mode = UCS_THREAD_MODE_SINGLE};
  CK(ucp_worker_create(e->ctx, &wp, &e->w));
  ucp_mem_map_params_t m = {.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
                            .address = base,
                            .length = POOL_BYTES};
  CK(ucp_mem_map(e->ctx, &m, &e->mem));
}

static void put(int f, const void *b, size_t n) {
  if (write(f, b, n) != (ssize_t)n) exit(4);
}
static void get(int f, void *b, size_t n) {
  for (char *p = b; n;) {
    ssize_t x = read(f, p, n);
    if (x <= 0) exit(4);
    p += x;
    n -= x;
  }
}

static void done(void *r, ucs_status_t s, void *u) {
  if (s) bad = 1;
  pending--;
  ucp_request_free(r);
}
static void ep_error(void *a, ucp_ep_h e, ucs_status_t s) {
  fprintf(stderr, "endpoint error: %s\n", ucs_status_string(s));
  bad = 1;
}

static int xfer(void *ctx, int wr, uint64_t sz, uint64_t n, const uint32_t *li, const uint32_t *ri) {
  struct eng *e = ctx;
  ucp_request_param_t q = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_MEMH, .cb.send = done, .memh = e->mem};
  for (uint64_t i = 0; i < n; i++) {
    void *l = e->L + (uint64_t)li[i] * sz;
    uint64_t r = e->remote + (uint64_t)ri[i] * sz;
    ucs_status_ptr_t s = wr ? ucp_put_nbx(e->ep, l, sz, r, e->rkey, &q) : ucp_get_nbx(e->ep, l, sz, r, e->rkey, &q);
    if (UCS_PTR_IS_ERR(s)) return fprintf(stderr, "post: %s\n", ucs_status_string(UCS_PTR_STATUS(s))), 1;
    if (s) pending++;
  }
  if (!e->noflush) {
    ucp_request_param_t f = {.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK, .cb.send = done};
    ucs_status_ptr_t s = ucp_ep_flush_nbx(e->ep, &f);
    if (UCS_PTR_IS_ERR(s)) return 1;
    if (s) pending++;
  }
  while (pending) ucp_worker_progress(e->w);
  return bad;
}

int main(int c, char **v) {
  char path[64];
  struct eng e = {.noflush = !!getenv("GRID_NO_FLUSH")};
  sprintf(path, "/dev/shm/grid_%d", getpid());
  char *R = grid_map(path, POOL_BYTES, 1);
  unlink(path);
  e.L = mmap(0, POOL_BYTES, 3, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  grid_fill(R, POOL_BYTES, 1);
  grid_fill(e.L, POOL_BYTES, 2);
  int sv[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, sv)) return 3;
  int pid = fork();
  if (!pid) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setup(&e, R);
    void *rb;
    size_t rl, al;
    ucp_address_t *ad;
    CK(ucp_rkey_pack(e.ctx, e.mem, &rb, &rl));
    CK(ucp_worker_get_address(e.w, &ad, &al));
    uint64_t base = (uint64_t)R;
    put(sv[1], &al, 8);
    put(sv[1], ad, al);
    put(sv[1], &rl, 8);
    put(sv[1], rb, rl);
    put(sv[1], &base, 8);
    for (;;) { // emulated RMA needs the target to progress
      while (ucp_worker_progress(e.w)) {}
      ucp_worker_wait(e.w);
    }
  }
  setup(&e, e.L);
  size_t al, rl;
  get(sv[0], &al, 8);
  void *ad = malloc(al);
  get(sv[0], ad, al);
  get(sv[0], &rl, 8);
  void *rb = malloc(rl);
  get(sv[0], rb, rl);
  get(sv[0], &e.remote, 8);
  ucp_ep_params_t ep = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER,
                        .address = ad,
                        .err_mode = UCP_ERR_HANDLING_MODE_NONE,
                        .err_handler.cb = ep_error};
  CK(ucp_ep_create(e.w, &ep, &e.ep));
  CK(ucp_ep_rkey_unpack(e.ep, rb, &e.rkey));
  grid_serve(c > 1 ? v[1] : "ucx", pid, e.L, R, POOL_BYTES, xfer, &e);
  kill(pid, SIGKILL);
  _exit(0);
}
