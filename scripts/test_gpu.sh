#!/bin/sh
# Tests and measures on a CUDA device; fails, never skips, without one. Needs no network: it takes the checkout's venv, or
# else the Python given (PYTHON=...) with the packages that it has, and builds the C++ in place where that is missing.
set -eu
cd "$(dirname "$0")/.."
python=.venv/bin/python
"$python" -c 'import numpy' 2>/dev/null || python=${PYTHON:-python3}
if ! "$python" -c 'import genai_cli._native' 2>/dev/null; then
  echo "building the C++ with $("$python" --version)" >&2
  "$python" -m pip install --quiet --no-index --no-deps --no-build-isolation -e .
fi
exec "$python" scripts/gpu_report.py --markdown docs/gpu.md "$@"
