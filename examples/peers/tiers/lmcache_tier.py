"""LMCache's backends in the process, through their Python API, without a GPU: lmcache_tier.py cpu|disk FOLDER."""
import asyncio
import os
import sys
import threading
import time

os.environ.setdefault('PYTHONHASHSEED', '0')
os.environ.setdefault('LMCACHE_LOG_LEVEL', 'ERROR')
os.environ['LMCACHE_TRACK_USAGE'] = 'false'
# Its libraries write to the standard output, which speaks the line protocol here.
sys.stdout.flush()
own = os.dup(1)
os.dup2(2, 1)
sys.stdout = os.fdopen(own, 'w', buffering=1)

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from lmcache.v1.storage_backend.local_disk_backend import LocalDiskBackend

from lines import serve

WRITE_LIMIT_S = 50
GIB = 1.5


class Engine:
    def __init__(self, kind, folder):
        torch.set_num_threads(1)
        os.makedirs(folder, exist_ok=True)
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=256, local_cpu=True, max_local_cpu_size=GIB, local_disk=folder, max_local_disk_size=4.0,
            lmcache_instance_id='tier-bench')
        metadata = LMCacheMetadata(
            model_name='bench', world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.bfloat16, kv_shape=(16, 1, 256, 1, 128))
        self.cpu = LocalCPUBackend(config, metadata, dst_device='cpu')
        self.is_disk = kind == 'disk'
        self.backend = self.cpu
        if self.is_disk:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, daemon=True).start()
            self.backend = LocalDiskBackend(config, loop, self.cpu, 'cpu')
        self.keys, self.run = [], 0

    def clear(self, size, count):
        for key in self.keys:
            self.backend.remove(key)
        self.run += 1
        self.keys = [CacheEngineKey('bench', 1, 0, self.run * 10_000_000 + i, torch.bfloat16) for i in range(count)]
        self.source = torch.randint(0, 100, (size // 2,), dtype=torch.int16)
        self.target = torch.empty_like(self.source)

    def stamp(self, number):
        self.source[0], self.source[1], self.source[-1] = number & 0x7fff, number >> 15, number & 0x7fff

    def is_block(self, number):
        target = self.target
        return (int(target[0]), int(target[1]), int(target[-1])) == (number & 0x7fff, number >> 15, number & 0x7fff)

    def put(self, number):
        shape = torch.Size([1, 1, 1, self.source.numel()])
        held = self.cpu.allocate(shape, torch.bfloat16, MemoryFormat.KV_MLA_FMT)
        held.tensor.view(-1).view(torch.int16).copy_(self.source)
        self.backend.submit_put_task(self.keys[number], held)
        held.ref_count_down()

    def written(self):
        if not self.is_disk:
            return
        # The list of pending puts is searched from its start under a lock: the last one first, and not too often.
        until = time.time() + WRITE_LIMIT_S
        for key in reversed(self.keys):
            while self.backend.exists_in_put_tasks(key):
                if time.time() > until:
                    raise TimeoutError('its writes do not end')
                time.sleep(.002)

    def get(self, number):
        held = self.backend.get_blocking(self.keys[number])
        if held is None:
            return False
        self.target.copy_(held.tensor.view(-1).view(torch.int16))
        held.ref_count_down()
        return True


kind, folder = sys.argv[1:3]
serve(f'lmcache_{kind}', Engine(kind, folder))
sys.stdout.flush()
# Its threads do not end by themselves.
os._exit(0)
