#!/usr/bin/env bash
# Make .venv with exactly the packages of cpu.txt. `make` calls it when .venv/.installed is absent or older than the pins.
#
# Usage: requirements/install.sh [python3.11]
#
# The marker is written last, and without it everything is made anew: an interrupted installation may have left half a
# package, which pip would take for a whole one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
  echo "error: $1" >&2
  exit 1
}

pin() {
  grep -E "^($1)==" "requirements/${2:-cpu.txt}"
}

find_python() {
  local candidate
  for candidate in "$@"; do
    if [ "$("$candidate" -c 'import sys; print(*sys.version_info[:2])' 2> /dev/null)" = "3 11" ]; then
      echo "$candidate"
      return
    fi
  done
  fail "no Python 3.11 (tried: $*); install python3.11, python3.11-venv and python3.11-dev, or make PYTHON=/path/to/python3.11"
}

check_compiler() {
  local header
  header=$("$1" -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")')
  [ -e "$header" ] || fail "$header not found; some packages are compiled here: install python3.11-dev"
  command -v c++ > /dev/null || fail "no C++ compiler (c++); some packages are compiled here: install g++"
}

if [ $# -gt 0 ]; then
  python=$(find_python "$1")
else
  python=$(find_python python3.11 python3 python)
fi
check_compiler "$python"

# Two calls of make at once: the second waits here, then finds the work done.
exec 9< requirements/cpu.txt
flock 9
if [ -e .venv/.installed ] && [ .venv/.installed -nt requirements/cpu.txt ] && [ .venv/.installed -nt requirements/gpu.txt ]; then
  exit 0
fi

pip=(.venv/bin/python -m pip --disable-pip-version-check install)
mapfile -t build_tools < <(pin 'pip|setuptools|packaging')
echo "[1/5] .venv with $("$python" --version) (2 GiB, or 7 GiB where pip finds only torch's CUDA build; minutes, once)"
"$python" -m venv --clear .venv
echo "[2/5] build tools"
"${pip[@]}" --quiet --no-deps "${build_tools[@]}"
echo "[3/5] $(grep -c == requirements/cpu.txt) packages"
"${pip[@]}" --no-deps --no-build-isolation --ignore-requires-python -r requirements/cpu.txt
echo "[4/5] what torch itself needs, where something is missing"
grep -E '^(cuda|nvidia)-' requirements/gpu.txt > .venv/cuda-pins.txt
"${pip[@]}" -c .venv/cuda-pins.txt "$(pin torch)"
echo "[5/5] Transformer Engine's Python part, in a folder of its own (gspo_megatron/mcore/te_construct.py)"
"${pip[@]}" --quiet --no-deps --target .venv/transformer-engine "$(pin transformer-engine gpu.txt)"
touch .venv/.installed
