// Limit of a byte stream: the whole scattered list in one message, no bounds checks, no security, no retry.
// READ  = header + slot list; the peer sends the pages by writev from scattered slots, we readv into scattered slots.
// WRITE = header + slot list + pages by writev; the peer readv's into its slots and acks one byte AFTER the data is applied.
#include "grid.h"
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>

#define IOVS 512
#define SLOTS_PER_MSG (1u << 20)
struct hdr {
  uint64_t wr, sz, n;
};
struct eng {
  int sock;
  char *L, *R;
};

static int write_all(int f, const void *b, size_t n) {
  const char *p = b;
  while (n) {
    ssize_t x = write(f, p, n);
    if (x <= 0) return 1;
    p += x;
    n -= x;
  }
  return 0;
}
static int read_all(int f, void *b, size_t n) {
  char *p = b;
  while (n) {
    ssize_t x = read(f, p, n);
    if (x <= 0) return 1;
    p += x;
    n -= x;
  }
  return 0;
}
static int pages(int f, int out, char *base, uint64_t sz, uint64_t n, const uint32_t *ix) {
  struct iovec v[IOVS];
  for (uint64_t i = 0; i < n;) {
    int k = 0, a = 0;
    uint64_t left = 0;
    for (; k < IOVS && i < n; k++, i++) {
      v[k].iov_base = base + (uint64_t)ix[i] * sz;
      v[k].iov_len = sz;
      left += sz;
    }
    while (left) {
      ssize_t x = out ? writev(f, v + a, k - a) : readv(f, v + a, k - a);
      if (x <= 0) return 1;
      left -= x;
      while (a < k && (size_t)x >= v[a].iov_len) x -= v[a++].iov_len;
      if (a < k) {
        v[a].iov_base = (char *)v[a].iov_base + x;
        v[a].iov_len -= x;
      }
    }
  }
  return 0;
}

static void target(int f, char *R) {
  static uint32_t ix[SLOTS_PER_MSG];
  struct hdr h;
  for (;;) {
    if (read_all(f, &h, sizeof h) || h.n > SLOTS_PER_MSG || read_all(f, ix, 4 * h.n)) return;
    if (h.wr) {
      char b = 1;
      if (pages(f, 0, R, h.sz, h.n, ix) || write_all(f, &b, 1)) return;
    } else if (pages(f, 1, R, h.sz, h.n, ix)) {
      return;
    }
  }
}

static int xfer(void *ctx, int wr, uint64_t sz, uint64_t n, const uint32_t *li, const uint32_t *ri) {
  struct eng *e = ctx;
  struct hdr h = {wr, sz, n};
  struct iovec v[2] = {{&h, sizeof h}, {(void *)ri, 4 * n}};
  size_t all = sizeof h + 4 * n;
  ssize_t x = writev(e->sock, v, 2);
  if (x < (ssize_t)sizeof h) return 1;
  if ((size_t)x < all && write_all(e->sock, (char *)ri + (x - sizeof h), all - x)) return 1;
  if (!wr) return pages(e->sock, 0, e->L, sz, n, li);
  if (pages(e->sock, 1, e->L, sz, n, li)) return 1;
  char b;
  return read_all(e->sock, &b, 1);
}

int main(void) {
  int ls, one = 1;
  char p[64];
  struct eng e;
  sprintf(p, "/dev/shm/grid_%d", getpid());
  e.R = grid_map(p, POOL_BYTES, 1);
  unlink(p);
  e.L = mmap(0, POOL_BYTES, 3, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  grid_fill(e.R, POOL_BYTES, 1);
  grid_fill(e.L, POOL_BYTES, 2);
  struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t al = sizeof a;
  ls = socket(AF_INET, SOCK_STREAM, 0);
  if (bind(ls, (void *)&a, sizeof a) || listen(ls, 1) || getsockname(ls, (void *)&a, &al)) return perror("listen"), 3;
  int pid = fork();
  if (!pid) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int f = accept(ls, 0, 0), b = 4 << 20;
    setsockopt(f, IPPROTO_TCP, TCP_NODELAY, &one, 4);
    setsockopt(f, SOL_SOCKET, SO_SNDBUF, &b, 4);
    target(f, e.R);
    _exit(0);
  }
  e.sock = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(e.sock, (void *)&a, sizeof a)) return perror("connect"), 3;
  setsockopt(e.sock, IPPROTO_TCP, TCP_NODELAY, &one, 4);
  grid_serve("stream", pid, e.L, e.R, POOL_BYTES, xfer, &e);
  kill(pid, SIGKILL);
  return 0;
}
