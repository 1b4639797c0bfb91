// The limits of one host: plain copies between two mapped pools, and copies by the kernel from process to process.
// argv[1]: memcpy | cma (1,024 vectors a call) | broken (loses the last page, so that the checks must speak)
#include "grid.h"
#include <sys/mman.h>
#include <sys/uio.h>

#define VECTORS 1024

enum mode { COPY, KERNEL, BROKEN };

struct engine {
  enum mode mode;
  int pid;
  char *here, *there;
};

static int by_kernel(struct engine *e, int write, uint64_t bytes, uint64_t n, const uint32_t *li, const uint32_t *ri) {
  struct iovec near[VECTORS], far[VECTORS];
  for (uint64_t i = 0; i < n;) {
    int k = 0;
    for (; k < VECTORS && i < n; k++, i++) {
      near[k].iov_base = e->here + (uint64_t)li[i] * bytes;
      far[k].iov_base = e->there + (uint64_t)ri[i] * bytes; // the forked target has it at the same address
      near[k].iov_len = far[k].iov_len = bytes;
    }
    ssize_t moved = write ? process_vm_writev(e->pid, near, k, far, k, 0) : process_vm_readv(e->pid, near, k, far, k, 0);
    if (moved != (ssize_t)(k * bytes)) return fprintf(stderr, "kernel copied %zd: %s\n", moved, strerror(errno)), 1;
  }
  return 0;
}

static int xfer(void *ctx, int write, uint64_t bytes, uint64_t n, const uint32_t *li, const uint32_t *ri) {
  struct engine *e = ctx;
  if (e->mode == KERNEL) return by_kernel(e, write, bytes, n, li, ri);
  uint64_t moved = e->mode == BROKEN ? n - 1 : n;
  if (write)
    grid_copy(e->there, e->here, ri, li, moved, bytes);
  else
    grid_copy(e->here, e->there, li, ri, moved, bytes);
  return 0;
}

int main(int argc, char **argv) {
  if (argc < 2) return 2;
  struct engine e = {.mode = COPY};
  if (!strcmp(argv[1], "cma")) e.mode = KERNEL;
  if (!strcmp(argv[1], "broken")) e.mode = BROKEN;
  char path[64];
  sprintf(path, "/dev/shm/kvgate_peer_%d", getpid());
  e.there = grid_map(path, POOL_BYTES, 1);
  unlink(path);
  e.here = mmap(0, POOL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (!e.there || e.here == MAP_FAILED) return perror("map"), 3;
  grid_fill(e.there, POOL_BYTES, 1);
  grid_fill(e.here, POOL_BYTES, 2);
  e.pid = fork();
  if (!e.pid) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) pause();
  }
  grid_serve(argv[1], e.pid, e.here, e.there, POOL_BYTES, xfer, &e);
  kill(e.pid, SIGKILL);
  return 0;
}
