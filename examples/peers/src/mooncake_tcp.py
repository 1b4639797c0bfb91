"""Mooncake's transfer engine over TCP, peer to peer. argv[1] is the label."""

import os
import subprocess
import sys

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
os.environ.setdefault("GLOG_minloglevel", "3")
os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")
import grid
import numpy as np
from mooncake.engine import TransferEngine


def start(pool):
    engine = TransferEngine()
    failed = engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
    if failed or engine.register_memory(pool, grid.POOL_BYTES):
        raise SystemExit("the engine does not start")
    return engine


def target(path):
    protocol = os.dup(1)
    os.dup2(2, 1)  # the library writes to stdout
    pool = grid.lib.grid_map(path.encode(), grid.POOL_BYTES, 0)
    engine = start(pool)
    os.write(protocol, f"{engine.get_rpc_port()} {pool}\n".encode())
    sys.stdin.read(1)  # until the initiator ends
    os._exit(0)


class Engine:
    def __init__(self, name):
        self.name = name
        path = f"/dev/shm/kvgate_peer_{os.getpid()}"
        self.here, self.view = grid.pools(path)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, __file__, "target", path], **pipes)
        protocol = os.dup(1)
        os.dup2(2, 1)
        self.engine = start(self.here)
        os.dup2(protocol, 1)
        port, there = self.process.stdout.readline().split()
        self.peer, self.there = f"127.0.0.1:{int(port)}", int(there)
        os.unlink(path)

    def prepare(self, c):
        def addresses(base, lists):
            return [(base + slots.astype(np.uint64) * c.page_bytes).tolist() for slots in lists]

        c.near, c.far = addresses(self.here, c.here), addresses(self.there, c.there)
        c.lengths = [c.page_bytes] * c.n
        engine = self.engine
        c.call = engine.batch_transfer_sync_write if c.write else engine.batch_transfer_sync_read

    def xfer(self, c, k):
        code = c.call(self.peer, c.near[k], c.far[k], c.lengths)
        if code != 0:
            raise RuntimeError(f"code {code}")

    def release(self, c):
        pass


if sys.argv[1] == "target":
    target(sys.argv[2])
engine = Engine(sys.argv[1])
grid.serve(engine, engine.here, engine.view, engine.process.pid)
engine.process.kill()
os._exit(0)
