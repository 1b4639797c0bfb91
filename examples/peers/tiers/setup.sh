#!/usr/bin/env bash
# Fetches the stores that `tier-bench --compare` sets beside kvgate. What cannot be had is left out and named; nothing is
# written into this folder.
#   KVGATE_PEERS       where everything goes (default: kvgate-peers in the user's cache folder); 1.5 GB, more with LMCache
#   PYTHON             an interpreter for the wheels (default: python3; Mooncake's exists for CPython 3.11 on x86-64 Linux)
#   KVGATE_LMCACHE     1: LMCache too, with torch from PyPI (several GB)
#   KVGATE_TORCH_FROM  an interpreter of the same version that has torch: LMCache with that one
# Redis is that of the system: apt-get install redis-server
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
peers=${KVGATE_PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/kvgate-peers}
mkdir -p "$peers/build"
peers=$(cd "$peers" && pwd)
build=$peers/build

attempt() { # name, then the command
  local name=$1
  shift
  # A subshell with errexit of its own: one that is tested has none.
  set +e
  (set -e; "$@") >"$build/$name.log" 2>&1
  local code=$?
  set -e
  if [ "$code" = 0 ]; then
    rm -f "$build/$name.log"
    echo "$name: ready"
  else
    echo "$name: left out, $build/$name.log says why"
  fi
}

cp "$here/lines.py" "$here/lmcache_tier.py" "$here/mooncake_store.py" "$build/"

engines() {
  mkdir -p "$peers/engines"
  rm -rf "$peers/engines/src"
  cp -r "$here/engines/Cargo.toml" "$here/engines/src" "$peers/engines/"
  cd "$peers/engines"
  CARGO_TARGET_DIR=$peers/engines/target cargo build --release
  cp target/release/tier-engines "$build/"
}
attempt tier-engines engines

pip() { "$peers/venv/bin/python" -m pip --disable-pip-version-check -q "$@"; }
venv() { [ -x "$peers/venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$peers/venv"; }

mooncake() {
  venv
  pip install numpy
  pip install --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1
}
attempt mooncake-store mooncake

lmcache() {
  venv
  if [ -n "${KVGATE_TORCH_FROM:-}" ]; then
    "$KVGATE_TORCH_FROM" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' \
      >"$("$peers/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_torch.pth"
  elif [ "${KVGATE_LMCACHE:-}" = 1 ]; then
    pip install torch
  else
    echo "needs torch: KVGATE_LMCACHE=1, or KVGATE_TORCH_FROM=an interpreter that has it"
    return 1
  fi
  # What it declares for CUDA is not needed by its backends for memory and disk: only what they import.
  pip install --no-deps lmcache==0.5.6
  pip install aiofile aiofiles aiohttp blake3 cachetools cryptography fastapi msgspec numba nvtx opentelemetry-sdk \
    prometheus_client psutil py-cpuinfo pydantic-settings pyyaml pyzmq redis requests safetensors sortedcontainers \
    uvicorn uvloop xxhash
  # Its native part may want a newer C++ library than the system's; only what uses it says so.
  "$peers/venv/bin/python" -c 'import lmcache.v1.storage_backend.local_cpu_backend'
}
attempt lmcache lmcache
command -v redis-server >/dev/null && echo "redis: ready" || echo "redis: left out, apt-get install redis-server"
