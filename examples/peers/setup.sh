#!/usr/bin/env bash
# Builds the engines that `transfer-bench --compare` sets beside kvgate, and fetches those that come as Python wheels.
# What cannot be had is left out and named; nothing is written into this folder.
#   KVGATE_PEERS   where everything goes (default: kvgate-peers in the user's cache folder); up to 0.8 GB
#   PYTHON         an interpreter for the wheels (default: python3; they exist for CPython 3.11 on x86-64 Linux)
# UCX and libfabric are those of the system: apt-get install gcc libucx-dev libfabric-dev python3-venv
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
peers=${KVGATE_PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/kvgate-peers}
mkdir -p "$peers/build"
peers=$(cd "$peers" && pwd)
build=$peers/build
src=$here/src
compile=(gcc -O2 -march=native -Wall)
loop=("$src/pools.c" "$src/loop.c")

attempt() { # name, then the command
  local name=$1
  shift
  if "$@" >"$build/$name.log" 2>&1; then
    rm -f "$build/$name.log"
    echo "$name: ready"
  else
    echo "$name: left out, $build/$name.log says why"
  fi
}

command -v gcc >/dev/null || { echo "no gcc: apt-get install gcc" >&2; exit 2; }
"${compile[@]}" -shared -fPIC -o "$build/libgrid.so" "${loop[@]}"
cp "$src/grid.py" "$src/nixl_ucx.py" "$src/mooncake_tcp.py" "$build/"
attempt limits "${compile[@]}" -o "$build/limits" "$src/limits.c" "${loop[@]}"
attempt stream "${compile[@]}" -o "$build/stream" "$src/stream.c" "${loop[@]}"
attempt ucx "${compile[@]}" -o "$build/ucx" "$src/ucx.c" "${loop[@]}" -lucp -lucs
attempt ofi "${compile[@]}" -o "$build/ofi" "$src/ofi.c" "${loop[@]}" -lfabric

wheels() {
  [ -x "$peers/venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$peers/venv"
  "$peers/venv/bin/pip" --disable-pip-version-check install -q numpy
  # Without what they declare: torch is not needed to move bytes.
  "$peers/venv/bin/pip" --disable-pip-version-check install -q --no-deps "$@"
}
attempt nixl wheels nixl-cu12==1.5.1
attempt mooncake wheels mooncake-transfer-engine-non-cuda==0.3.13.post1

# A newer UCX than the system's, as NIXL and others ship it.
newer_ucx() {
  [ -d "$peers/ucx-new/libucx" ] || {
    "$peers/venv/bin/pip" --disable-pip-version-check download -q --no-deps -d "$peers/dl" libucx-cu12==1.22.0
    "$peers/venv/bin/python" -m zipfile -e "$peers"/dl/libucx_cu12-*.whl "$peers/ucx-new"
  }
  local u=$peers/ucx-new/libucx
  "${compile[@]}" -I"$u/include" -o "$build/ucx-new" "$src/ucx.c" "${loop[@]}" -L"$u/lib" -lucp -lucs \
    -Wl,-rpath,"$u/lib" -Wl,-rpath,"$peers/ucx-new/libucx_cu12.libs"
}
attempt ucx-new newer_ucx
