// Pools, lists, checks and clocks.
#include "grid.h"
#include <sys/mman.h>
#include <time.h>

uint64_t grid_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

uint64_t grid_cpu_pid(int pid) {
  struct timespec t;
  clockid_t c = (~(clockid_t)pid << 3) | 2; // the kernel's encoding of "process clock of pid"
  if (clock_gettime(c, &t)) return 0;
  return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static inline uint64_t mix(uint64_t x) { // splitmix64
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

void grid_fill(char *b, uint64_t bytes, uint64_t seed) {
  uint64_t *p = (uint64_t *)b, s = mix(seed);
  for (uint64_t i = 0; i < bytes / 8; i++) p[i] = s ^ (i * 0x9E3779B97F4A7C15ull);
}

void grid_copy(char *d, const char *s, const uint32_t *di, const uint32_t *si, uint64_t n, uint64_t sz) {
  for (uint64_t i = 0; i < n; i++) memcpy(d + (uint64_t)di[i] * sz, s + (uint64_t)si[i] * sz, sz);
}

uint64_t grid_diff(const char *d, const char *s, const uint32_t *di, const uint32_t *si, uint64_t n, uint64_t sz) {
  uint64_t bad = 0;
  for (uint64_t i = 0; i < n; i++) bad += !!memcmp(d + (uint64_t)di[i] * sz, s + (uint64_t)si[i] * sz, sz);
  return bad;
}

void grid_wipe(char *d, const uint32_t *di, uint64_t n, uint64_t sz) {
  for (uint64_t i = 0; i < n; i++) memset(d + (uint64_t)di[i] * sz, 0xEE, sz);
}

void grid_perm(uint32_t *o, uint64_t n, uint64_t slots, uint64_t seed) { // partial Fisher-Yates
  uint32_t *a = malloc(4 * slots);
  for (uint64_t i = 0; i < slots; i++) a[i] = i;
  uint64_t x = mix(seed);
  for (uint64_t i = 0; i < n; i++) {
    x = mix(x);
    uint64_t j = i + x % (slots - i);
    uint32_t t = a[i];
    a[i] = a[j];
    a[j] = t;
  }
  memcpy(o, a, 4 * n);
  free(a);
}

char *grid_map(const char *path, uint64_t bytes, int create) {
  int fd = open(path, O_RDWR | (create ? O_CREAT : 0), 0600);
  if (fd < 0) return 0;
  if (create && ftruncate(fd, bytes)) return 0;
  char *p = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  close(fd);
  return p == MAP_FAILED ? 0 : p;
}
