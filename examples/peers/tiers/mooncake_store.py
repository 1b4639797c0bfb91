"""Mooncake Store on loopback: a master of our own, and one client whose segment lies in this process, so that what is
measured are copies and no network: mooncake_store.py FOLDER."""
import os
import signal
import socket
import subprocess
import sys
import time

import numpy

folder = sys.argv[1]
os.makedirs(folder, exist_ok=True)
# The library writes to the standard output.
own = os.dup(1)
log = open(os.path.join(folder, 'log'), 'w')
os.dup2(log.fileno(), 1)
sys.stdout = os.fdopen(own, 'w', buffering=1)

from lines import serve

SEGMENT_BYTES = 2 << 30


def port():
    with socket.socket() as one:
        one.bind(('127.0.0.1', 0))
        return one.getsockname()[1]


class Engine:
    def __init__(self, store):
        self.store, self.run, self.size = store, 0, 0

    def clear(self, size, count):
        if self.run:
            time.sleep(.7)  # until the leases of its reads are over
            self.store.remove_all()
        self.run += 1
        if size != self.size:
            self.size = size
            self.source = numpy.frombuffer(os.urandom(size), numpy.uint8).copy()
            self.target = numpy.empty(size, numpy.uint8)

    def stamp(self, number):
        self.source[:8] = numpy.frombuffer(number.to_bytes(8, 'little'), numpy.uint8)
        self.source[-8:] = self.source[:8]

    def is_block(self, number):
        mark = number.to_bytes(8, 'little')
        return self.target[:8].tobytes() == mark and self.target[-8:].tobytes() == mark

    def put(self, number):
        code = self.store.put(f'{self.run}-{number}', self.source.tobytes())
        if code != 0:
            raise OSError(f'put: {code}')

    def written(self):
        pass

    def get(self, number):
        found = self.store.get(f'{self.run}-{number}')
        if len(found) != self.size:
            return False
        self.target[:] = numpy.frombuffer(found, numpy.uint8)
        return True


signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
rpc, names, metrics = port(), port(), port()
master = subprocess.Popen(
    [os.path.join(os.path.dirname(sys.executable), 'mooncake_master'), '--rpc_address=127.0.0.1', f'--rpc_port={rpc}',
     '--enable_http_metadata_server=true', '--http_metadata_server_host=127.0.0.1',
     f'--http_metadata_server_port={names}', f'--metrics_port={metrics}', '--default_kv_lease_ttl=500'],
    stdout=log, stderr=log)
try:
    for one in (rpc, names):
        until = time.time() + 20
        while True:
            try:
                socket.create_connection(('127.0.0.1', one), 1).close()
                break
            except OSError:
                if time.time() > until or master.poll() is not None:
                    raise SystemExit('mooncake_master does not answer')
                time.sleep(.05)
    from mooncake.store import MooncakeDistributedStore
    store = MooncakeDistributedStore()
    code = store.setup('127.0.0.1', f'http://127.0.0.1:{names}/metadata', SEGMENT_BYTES, 512 << 20, 'tcp', '',
                       f'127.0.0.1:{rpc}')
    if code:
        raise SystemExit(f'setup: {code}')
    serve('mooncake_store', Engine(store))
    store.close()
finally:
    master.terminate()
    try:
        master.wait(4)
    except subprocess.TimeoutExpired:
        master.kill()
