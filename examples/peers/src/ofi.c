// libfabric as an application would use it: one fi_readmsg or fi_writemsg for each page, 512 under way, writes complete on
// delivery. argv: label, provider ("shm", "tcp", "tcp;ofi_rxm"). GRID_NO_DELIVERY=1 takes the default level: the
// checks must then find bad pages.
#include "grid.h"
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>

#define WINDOW 512
#define CTXS 8192
struct eng {
  struct fi_info *info;
  struct fid_fabric *fabric;
  struct fid_domain *domain;
  struct fid_ep *ep;
  struct fid_cq *cq;
  struct fid_av *av;
  struct fid_mr *mr;
  fi_addr_t peer;
  uint64_t remote, rkey, posted, done, write_flags;
  char *L;
};
static struct fi_context ctxs[CTXS];
#define CK(x) do { int r_ = (x); if (r_) { fprintf(stderr, "%s: %d %s\n", #x, r_, fi_strerror(-r_)); exit(3); } } while (0)

static void setup(struct eng *e, const char *prov, char *base) {
  struct fi_info *h = fi_allocinfo();
  h->caps = FI_RMA | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE | FI_MSG;
  h->ep_attr->type = FI_EP_RDM;
  h->mode = FI_CONTEXT;
  h->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  h->domain_attr->threading = FI_THREAD_SAFE;
  h->fabric_attr->prov_name = strdup(prov);
  if (strcmp(prov, "shm")) {
    h->addr_format = FI_SOCKADDR_IN;
    CK(fi_getinfo(FI_VERSION(1, 17), "127.0.0.1", 0, FI_SOURCE, h, &e->info));
  } else {
    CK(fi_getinfo(FI_VERSION(1, 17), 0, 0, 0, h, &e->info));
  }
  CK(fi_fabric(e->info->fabric_attr, &e->fabric, 0));
  CK(fi_domain(e->fabric, e->info, &e->domain, 0));
  struct fi_cq_attr ca = {.format = FI_CQ_FORMAT_CONTEXT, .size = CTXS};
  CK(fi_cq_open(e->domain, &ca, &e->cq, 0));
  struct fi_av_attr aa = {.type = FI_AV_UNSPEC};
  CK(fi_av_open(e->domain, &aa, &e->av, 0));
  CK(fi_endpoint(e->domain, e->info, &e->ep, 0));
  CK(fi_ep_bind(e->ep, &e->cq->fid, FI_TRANSMIT | FI_RECV));
  CK(fi_ep_bind(e->ep, &e->av->fid, 0));
  CK(fi_enable(e->ep));
  CK(fi_mr_reg(e->domain, base, POOL_BYTES, FI_REMOTE_READ | FI_REMOTE_WRITE | FI_READ | FI_WRITE, 0, getpid(), 0, &e->mr, 0));
}

static int poll_cq(struct eng *e) {
  struct fi_cq_entry c[64];
  ssize_t n = fi_cq_read(e->cq, c, 64);
  if (n > 0) return e->done += n, 0;
  if (n == -FI_EAGAIN) return 0;
  struct fi_cq_err_entry er = {0};
  fi_cq_readerr(e->cq, &er, 0);
  fprintf(stderr, "completion error: %s\n", fi_strerror(er.err));
  return 1;
}

static int xfer(void *ctx, int wr, uint64_t sz, uint64_t n, const uint32_t *li, const uint32_t *ri) {
  struct eng *e = ctx;
  void *desc = fi_mr_desc(e->mr);
  e->posted = e->done = 0;
  for (uint64_t i = 0; i < n;) {
    if (e->posted - e->done >= WINDOW) {
      if (poll_cq(e)) return 1;
      continue;
    }
    struct iovec v = {e->L + (uint64_t)li[i] * sz, sz};
    struct fi_rma_iov r = {e->remote + (uint64_t)ri[i] * sz, sz, e->rkey};
    struct fi_msg_rma m = {.msg_iov = &v, .desc = &desc, .iov_count = 1, .addr = e->peer, .rma_iov = &r, .rma_iov_count = 1, .context = &ctxs[i % CTXS]};
    ssize_t x = wr ? fi_writemsg(e->ep, &m, e->write_flags) : fi_readmsg(e->ep, &m, FI_COMPLETION);
    if (x == -FI_EAGAIN) {
      if (poll_cq(e)) return 1;
      continue;
    }
    if (x) return fprintf(stderr, "post: %s\n", fi_strerror(-x)), 1;
    e->posted++;
    i++;
  }
  while (e->done < e->posted)
    if (poll_cq(e)) return 1;
  return 0;
}

int main(int c, char **v) {
  if (c < 3) return 2;
  char path[64];
  struct eng e = {.write_flags = FI_COMPLETION | (getenv("GRID_NO_DELIVERY") ? 0 : FI_DELIVERY_COMPLETE)};
  sprintf(path, "/dev/shm/grid_%d", getpid());
  char *R = grid_map(path, POOL_BYTES, 1);
  unlink(path);
  e.L = mmap(0, POOL_BYTES, 3, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  grid_fill(R, POOL_BYTES, 1);
  grid_fill(e.L, POOL_BYTES, 2);
  int sv[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, sv)) return 3;
  int pid = fork();
  struct { char name[256]; uint64_t len, base, key; } x = {.len = 256}, y = {{0}};
  setup(&e, v[2], pid ? e.L : R);
  CK(fi_getname(&e.ep->fid, x.name, &x.len));
  x.base = (e.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) ? (uint64_t)R : 0;
  x.key = fi_mr_key(e.mr);
  int s = pid ? sv[0] : sv[1];
  if (write(s, &x, sizeof x) != sizeof x || recv(s, &y, sizeof y, MSG_WAITALL) != sizeof y) return 3;
  if (fi_av_insert(e.av, y.name, 1, &e.peer, 0, 0) != 1) return fprintf(stderr, "av insert\n"), 3;
  if (!pid) { // manual progress: the target must turn the crank; it yields after a while without events
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (uint64_t idle = 0;;) {
      struct fi_cq_entry q;
      fi_cq_read(e.cq, &q, 1);
      if (++idle > 3000) sched_yield();
    }
  }
  e.remote = y.base;
  e.rkey = y.key;
  grid_serve(v[1], pid, e.L, R, POOL_BYTES, xfer, &e);
  kill(pid, SIGKILL);
  waitpid(pid, 0, 0);
  char left[64]; // the shm provider leaves a file of a process that was killed
  sprintf(left, "/dev/shm/%d:0:0", pid);
  unlink(left);
  sprintf(left, "/dev/shm/%d:0:0", getpid());
  unlink(left);
  _exit(0);
}
