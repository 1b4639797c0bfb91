// The measuring loop: 2 ms of the engine and 2 ms of plain copies of the very same pages, in turn; before and after
// it every list is wiped, moved and compared at once, so that a torn or early completion is a bad page.
#include "grid.h"

#define SLICE_NS 2000000ull
#define SLICES_MAX 65536
#define LAT_MAX (1u << 20)

struct run {
  const char *engine;
  int target_pid;
  char *L, *R;
  uint64_t bytes;
  grid_xfer_fn xfer;
  void *ctx;
};

static int cmp_u64(const void *a, const void *b) {
  uint64_t x = *(uint64_t *)a, y = *(uint64_t *)b;
  return x < y ? -1 : x > y;
}
static int cmp_f64(const void *a, const void *b) {
  double x = *(double *)a, y = *(double *)b;
  return x < y ? -1 : x > y;
}

static void run_line(struct run *e, const char *line) {
  char op[16];
  unsigned long sz, n, ms, seed;
  if (sscanf(line, "%15s %lu %lu %lu %lu", op, &sz, &n, &ms, &seed) != 5) return;
  int wr = op[0] == 'W', err = 0;
  uint64_t slots = POOL_LEAST_BYTES / sz;
  if (slots > SLOTS_MOST) slots = SLOTS_MOST;
  if (slots < n) slots = n;
  if (slots * sz > e->bytes) {
    printf("{\"skip\":1}\n");
    fflush(stdout);
    return;
  }
  uint32_t *li[LISTS], *ri[LISTS], **di = wr ? ri : li, **si = wr ? li : ri;
  for (int k = 0; k < LISTS; k++) {
    li[k] = malloc(4 * n);
    ri[k] = malloc(4 * n);
    grid_perm(li[k], n, slots, seed * 100 + k);
    grid_perm(ri[k], n, slots, seed * 100 + 50 + k);
  }
  char *d = wr ? e->R : e->L, *s = wr ? e->L : e->R;
  uint64_t bad_first = 0, bad_last = 0;
  int verified = (n >= 16384 || n * sz > (64ull << 20)) ? 1 : LISTS;

  // wiped, moved, compared at once: a torn or early completion shows as a bad page (also warms up)
  for (int k = 0; k < verified && !err; k++) {
    grid_wipe(d, di[k], n, sz);
    err |= e->xfer(e->ctx, wr, sz, n, li[k], ri[k]);
    bad_first += grid_diff(d, s, di[k], si[k], n, sz);
  }

  static double eng[SLICES_MAX], ref[SLICES_MAX], ratio[SLICES_MAX];
  uint64_t *lat = malloc(8ull * LAT_MAX), nlat = 0;
  uint64_t cpu_i = 0, cpu_t = 0, cpu_m = 0, wall = 0, reqs = 0, mreqs = 0, t_end = grid_now() + ms * 2000000ull;
  double bytes = (double)n * sz;
  int nr = 0;
  while (!err && nr < SLICES_MAX && (nr < 3 || grid_now() < t_end)) {
    uint64_t a = grid_now(), c0 = grid_cpu_pid(getpid()), c1 = grid_cpu_pid(e->target_pid), t = a, k = 0;
    do {
      uint64_t t0 = t;
      err |= e->xfer(e->ctx, wr, sz, n, li[k % LISTS], ri[k % LISTS]);
      t = grid_now();
      if (nlat < LAT_MAX) lat[nlat++] = t - t0;
      k++;
    } while (!err && t - a < SLICE_NS);
    cpu_i += grid_cpu_pid(getpid()) - c0;
    cpu_t += grid_cpu_pid(e->target_pid) - c1;
    wall += t - a;
    reqs += k;
    eng[nr] = k * bytes / (t - a);

    uint64_t m0 = grid_cpu_pid(getpid()), b = grid_now(), j = 0, u = b;
    do {
      grid_copy(d, s, di[j % LISTS], si[j % LISTS], n, sz);
      j++;
      u = grid_now();
    } while (u - b < SLICE_NS);
    cpu_m += grid_cpu_pid(getpid()) - m0;
    mreqs += j;
    ref[nr] = j * bytes / (u - b);
    ratio[nr] = eng[nr] / ref[nr];
    nr++;
  }

  for (int k = 0; k < verified && !err; k++) {
    grid_wipe(d, di[k], n, sz);
    err |= e->xfer(e->ctx, wr, sz, n, li[k], ri[k]);
    bad_last += grid_diff(d, s, di[k], si[k], n, sz);
  }
  if (err || !nlat) {
    printf("{\"err\":%d}\n", err);
  } else {
    qsort(eng, nr, 8, cmp_f64);
    qsort(ref, nr, 8, cmp_f64);
    qsort(ratio, nr, 8, cmp_f64);
    qsort(lat, nlat, 8, cmp_u64);
    int q = nr * 0.9;
    if (q >= nr) q = nr - 1;
    printf("{\"engine\":\"%s\",\"op\":\"%s\",\"size\":%lu,\"n\":%lu,\"gbps_med\":%.4f,\"gbps_p90\":%.4f,\"memcpy_med\":%.4f,"
           "\"memcpy_p90\":%.4f,\"ratio_med\":%.4f,\"ratio_p90\":%.4f,\"descs_s\":%.0f,\"p50_us\":%.2f,\"p99_us\":%.2f,"
           "\"min_us\":%.2f,\"reqs\":%lu,\"rounds\":%d,\"cpu_init\":%.3f,\"cpu_target\":%.3f,\"cpu_ns_kib\":%.2f,"
           "\"memcpy_cpu_ns_kib\":%.2f,\"bad_first\":%lu,\"bad_last\":%lu}\n",
           e->engine, wr ? "WRITE" : "READ", sz, n, eng[nr / 2], eng[q], ref[nr / 2], ref[q], ratio[nr / 2],
           eng[q] / ref[q], eng[q] * 1e9 / sz, lat[nlat / 2] / 1e3, lat[(uint64_t)(nlat * 0.99)] / 1e3, lat[0] / 1e3,
           (unsigned long)reqs, nr, (double)cpu_i / wall, (double)cpu_t / wall,
           (double)(cpu_i + cpu_t) / (reqs * bytes / 1024), (double)cpu_m / (mreqs * bytes / 1024),
           (unsigned long)bad_first, (unsigned long)bad_last);
  }
  fflush(stdout);
  free(lat);
  for (int k = 0; k < LISTS; k++) {
    free(li[k]);
    free(ri[k]);
  }
}

int grid_serve(const char *engine, int target_pid, char *L, char *R, uint64_t bytes, grid_xfer_fn xfer, void *ctx) {
  struct run e = {engine, target_pid, L, R, bytes, xfer, ctx};
  char line[256];
  printf("READY %s\n", engine);
  fflush(stdout);
  while (fgets(line, sizeof line, stdin)) {
    if (line[0] == 'Q') break;
    run_line(&e, line);
  }
  return 0;
}
