// What the engines of the comparison share: pools, lists, checks, clocks, and the measuring loop.
#pragma once
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define POOL_BYTES (1ull << 30)         // mapped on each side
#define POOL_LEAST_BYTES (256ull << 20) // a configuration uses so much of it, or SLOTS_MOST slots
#define SLOTS_MOST 65536ull
#define LISTS 4 // lists in different random order, on each side

uint64_t grid_now(void);         // monotonic, ns
uint64_t grid_cpu_pid(int pid);  // processor time of all threads of a process so far, ns
// A file in /dev/shm, every page of it there.
char *grid_map(const char *path, uint64_t bytes, int create);
void grid_fill(char *base, uint64_t bytes, uint64_t seed);
// Slot si[i] of src to slot di[i] of dst.
void grid_copy(char *dst, const char *src, const uint32_t *di, const uint32_t *si, uint64_t n, uint64_t page_bytes);
// Slots that differ.
uint64_t grid_diff(const char *dst, const char *src, const uint32_t *di, const uint32_t *si, uint64_t n, uint64_t page_bytes);
void grid_wipe(char *dst, const uint32_t *di, uint64_t n, uint64_t page_bytes);
// n different slots of `slots`.
void grid_perm(uint32_t *out, uint64_t n, uint64_t slots, uint64_t seed);

// Moves n pages between slots li[i] here and ri[i] there. Returns 0 when the bytes are where they belong, also for
// a reader in the other process; anything else is an error.
typedef int (*grid_xfer_fn)(void *ctx, int write, uint64_t page_bytes, uint64_t n, const uint32_t *li, const uint32_t *ri);
// Speaks the line protocol of README.md until "Q" or the end of the input. `there` is the target's pool as this
// process has mapped it, for the checks and the plain copies.
int grid_serve(const char *engine, int target_pid, char *here, char *there, uint64_t bytes, grid_xfer_fn xfer, void *ctx);
