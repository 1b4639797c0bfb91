/*
 * Checks that the C examples share: every call of the library is made through one of them. Included once per
 * program.
 */
#ifndef MUST_H
#define MUST_H

#include <stdio.h>
#include <stdlib.h>

#include "kvgate.h"

/* Which side this process is, for what it has to complain about. */
static const char *role = "decode";

static void fail(int line, const char *what, enum kv_status status) {
  fprintf(stderr, "%s: line %d: %s: %s: %s\n", role, line, what, kv_status_name(status),
          kv_last_error_message());
  exit(1);
}

/* A call that has to end in one particular way; MUST: well. */
#define MUST_BE(expected, call)                                \
  do {                                                         \
    enum kv_status status_ = (call);                           \
    if (status_ != (expected)) fail(__LINE__, #call, status_); \
  } while (0)
#define MUST(call) MUST_BE(KV_STATUS_OK, call)

static void require(int is_so, const char *what) {
  if (!is_so) {
    fprintf(stderr, "%s: it does not hold that %s\n", role, what);
    exit(1);
  }
}

#endif
