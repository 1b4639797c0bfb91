"""NIXL over UCX: prepared lists, index selection for each request. argv[1] is the label.

UCX_TLS chooses UCX's transports; GRID_NIXL_ERRORS its mode of error handling (peer, none: with peer it has no shared
memory).
"""

import os
import subprocess
import sys

_protocol = os.dup(1)
os.dup2(2, 1)  # the library writes to stdout
sys.stdout = os.fdopen(_protocol, "w")
os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
import numpy as np
import grid
from nixl_cu12 import _api as nixl


def agent(name):
    config = nixl.nixl_agent_config(enable_prog_thread=True, num_threads=0, backends=[])
    made = nixl.nixl_agent(name, config)
    made.create_backend("UCX", {"ucx_error_handling_mode": os.environ.get("GRID_NIXL_ERRORS", "peer")})
    return made


def send(stream, data):
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def receive(stream):
    return stream.read(int.from_bytes(stream.read(8), "little"))


def target(path):
    pool = grid.lib.grid_map(path.encode(), grid.POOL_BYTES, 0)
    own = agent("target")
    _registered = own.register_memory([(pool, grid.POOL_BYTES, 0, "")], "DRAM")
    send(sys.stdout.buffer, own.get_agent_metadata())
    send(sys.stdout.buffer, pool.to_bytes(8, "little"))
    own.add_remote_agent(receive(sys.stdin.buffer))
    sys.stdin.buffer.read(1)  # until the initiator ends
    os._exit(0)


class Engine:
    def __init__(self, name):
        self.name = name
        path = f"/dev/shm/kvgate_peer_{os.getpid()}"
        self.here, self.view = grid.pools(path)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, __file__, "target", path], **pipes)
        self.agent = agent("initiator")
        self.registered = self.agent.register_memory([(self.here, grid.POOL_BYTES, 0, "")], "DRAM")
        self.peer = self.agent.add_remote_agent(receive(self.process.stdout))
        self.there = int.from_bytes(receive(self.process.stdout), "little")
        os.unlink(path)
        send(self.process.stdin, self.agent.get_agent_metadata())

    def prepare(self, c):
        c.nixl_op = "WRITE" if c.write else "READ"

        def pages(base):
            described = np.zeros((c.slots, 3), np.uint64)
            described[:, 0] = base + np.arange(c.slots, dtype=np.uint64) * c.page_bytes
            described[:, 1] = c.page_bytes
            return described

        c.near = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", pages(self.here), "DRAM")
        c.far = self.agent.prep_xfer_dlist(self.peer, pages(self.there), "DRAM")
        c.near_slots = [slots.astype(np.int32) for slots in c.here]
        c.far_slots = [slots.astype(np.int32) for slots in c.there]

    def xfer(self, c, k):
        handle = self.agent.make_prepped_xfer(c.nixl_op, c.near, c.near_slots[k], c.far, c.far_slots[k], b"")
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(state)
        self.agent.release_xfer_handle(handle)

    def release(self, c):
        self.agent.release_dlist_handle(c.near)
        self.agent.release_dlist_handle(c.far)


if sys.argv[1] == "target":
    target(sys.argv[2])
engine = Engine(sys.argv[1])
grid.serve(engine, engine.here, engine.view, engine.process.pid)
engine.process.kill()
os._exit(0)
