#!/bin/sh
# Builds the C++ and installs the package in place (editable). Incremental; one builder at a time.
# Extra arguments go to pip, e.g. -Ccmake.define.GENAI_ISAS="portable;avx2".
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
mkdir -p build
exec flock build/.lock "$python" -m pip install --quiet --no-deps --no-build-isolation -e . "$@"
