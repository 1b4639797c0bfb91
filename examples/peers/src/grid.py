"""The measuring loop of loop.c for engines that are driven from Python.

An engine has: name; prepare(c), once for each configuration; xfer(c, k), which moves list k and returns when the
bytes are at their destination, or raises; release(c). c has: write, page_bytes, n, slots, here and there (lists of
slots).
"""

import ctypes
import json
import os
import sys
import time

import numpy as np

lib = ctypes.CDLL(os.path.join(os.environ["GRID_BUILD"], "libgrid.so"))
_list = np.ctypeslib.ndpointer(np.uint32, flags="C")
_at, _u64, _int = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int
for _name, _result, _arguments in (
    ("map", _at, [ctypes.c_char_p, _u64, _int]),
    ("fill", None, [_at, _u64, _u64]),
    ("copy", None, [_at, _at, _list, _list, _u64, _u64]),
    ("diff", _u64, [_at, _at, _list, _list, _u64, _u64]),
    ("wipe", None, [_at, _list, _u64, _u64]),
    ("perm", None, [_list, _u64, _u64, _u64]),
    ("cpu_pid", _u64, [_int]),
):
    _function = getattr(lib, "grid_" + _name)
    _function.restype, _function.argtypes = _result, _arguments

POOL_BYTES = 1 << 30
LISTS = 4
SLICE_NS = 2_000_000
now = time.monotonic_ns


def pools(path):
    """The target's pool, a file until the target has mapped it, and the pool here."""
    there = lib.grid_map(path.encode(), POOL_BYTES, 1)
    here = lib.grid_map((path + "-here").encode(), POOL_BYTES, 1)
    os.unlink(path + "-here")
    lib.grid_fill(there, POOL_BYTES, 1)
    lib.grid_fill(here, POOL_BYTES, 2)
    return here, there


def serve(engine, here, there, target_pid):
    """Speaks the protocol until Q."""
    print("READY", engine.name, flush=True)
    for line in sys.stdin:
        if line.startswith("Q"):
            return
        print(json.dumps(_answer(engine, line, here, there, target_pid)), flush=True)


class Configuration:
    def __init__(self, line):
        op, page_bytes, n, ms, seed = line.split()[:5]
        self.op, self.write = op, op.startswith("W")
        self.page_bytes, self.n, self.ms = int(page_bytes), int(n), int(ms)
        self.slots = max(self.n, min((256 << 20) // self.page_bytes, 65536))
        seed = int(seed)
        self.here = [self._random(seed * 100 + k) for k in range(LISTS)]
        self.there = [self._random(seed * 100 + 50 + k) for k in range(LISTS)]
        is_long = self.n >= 16384 or self.n * self.page_bytes > (64 << 20)
        self.verified = 1 if is_long else LISTS

    def _random(self, seed):
        drawn = np.empty(self.n, np.uint32)
        lib.grid_perm(drawn, self.n, self.slots, seed)
        return drawn


def _answer(engine, line, here, there, target_pid):
    c = Configuration(line)
    about = {"engine": engine.name, "op": c.op, "size": c.page_bytes, "n": c.n}
    if c.slots * c.page_bytes > POOL_BYTES:
        return {"skip": 1}
    began = now()
    try:
        engine.prepare(c)
        about["setup_us"] = (now() - began) / 1e3
        return {**about, **_measure(engine, c, here, there, target_pid)}
    except Exception as error:  # whatever the engine raises is its result
        return {**about, "err": f"{type(error).__name__}: {error}"}
    finally:
        try:
            engine.release(c)
        except Exception as error:
            print("release:", error, file=sys.stderr)


def _measure(engine, c, here, there, target_pid):
    target, source = (there, here) if c.write else (here, there)
    to, come_from = (c.there, c.here) if c.write else (c.here, c.there)

    def verified():
        bad = 0
        for k in range(c.verified):
            lib.grid_wipe(target, to[k], c.n, c.page_bytes)
            engine.xfer(c, k)
            bad += lib.grid_diff(target, source, to[k], come_from[k], c.n, c.page_bytes)
        return bad

    bad_first = verified()
    request = c.n * c.page_bytes
    engine_gbps, memcpy_gbps, latencies = [], [], []
    cpu = {"init": 0, "target": 0, "memcpy": 0}
    wall = requests = copies = 0
    until = now() + c.ms * 2_000_000
    while len(engine_gbps) < 3 or now() < until:
        init, far = time.process_time_ns(), lib.grid_cpu_pid(target_pid)
        began = last = now()
        count = 0
        while last - began < SLICE_NS:
            engine.xfer(c, count % LISTS)
            end = now()
            latencies.append(end - last)
            last = end
            count += 1
        cpu["init"] += time.process_time_ns() - init
        cpu["target"] += lib.grid_cpu_pid(target_pid) - far
        wall += last - began
        requests += count
        engine_gbps.append(count * request / (last - began))

        init, began = time.process_time_ns(), now()
        last, count = began, 0
        while last - began < SLICE_NS:
            k = count % LISTS
            lib.grid_copy(target, source, to[k], come_from[k], c.n, c.page_bytes)
            last = now()
            count += 1
        cpu["memcpy"] += time.process_time_ns() - init
        copies += count
        memcpy_gbps.append(count * request / (last - began))
    bad_last = verified()

    rounds = len(engine_gbps)
    ratios = sorted(one / other for one, other in zip(engine_gbps, memcpy_gbps))
    engine_gbps.sort()
    memcpy_gbps.sort()
    latencies.sort()
    p90 = min(int(rounds * 0.9), rounds - 1)
    return {
        "gbps_med": engine_gbps[rounds // 2],
        "gbps_p90": engine_gbps[p90],
        "memcpy_med": memcpy_gbps[rounds // 2],
        "memcpy_p90": memcpy_gbps[p90],
        "ratio_med": ratios[rounds // 2],
        "ratio_p90": engine_gbps[p90] / memcpy_gbps[p90],
        "descs_s": int(engine_gbps[p90] * 1e9 / c.page_bytes),
        "p50_us": latencies[len(latencies) // 2] / 1e3,
        "p99_us": latencies[int(len(latencies) * 0.99)] / 1e3,
        "min_us": latencies[0] / 1e3,
        "reqs": requests,
        "rounds": rounds,
        "cpu_init": cpu["init"] / wall,
        "cpu_target": cpu["target"] / wall,
        "cpu_ns_kib": (cpu["init"] + cpu["target"]) / (requests * request / 1024),
        "memcpy_cpu_ns_kib": cpu["memcpy"] / (copies * request / 1024),
        "bad_first": bad_first,
        "bad_last": bad_last,
    }
