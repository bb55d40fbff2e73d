#!/bin/sh
# Builds the native module with AddressSanitizer and UBSan in a venv of its own and runs the native tests with it.
# A venv of its own: an editable install's import hook beats PYTHONPATH. Its dependencies are those of .venv.
# Extra arguments go to pytest instead of the default tests.
set -eu
cd "$(dirname "$0")/.."
sanitizers=${GENAI_SANITIZE:-address,undefined}
python=.venv/bin/python
venv=.venv-asan
[ -x $venv/bin/python ] || $python -m venv --without-pip $venv
site() { "$1" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }
site "$PWD/$python" >"$(site "$PWD/$venv/bin/python")/dependencies.pth"
mkdir -p build
flock build/.lock $venv/bin/python -m pip install --quiet --no-deps --no-build-isolation -e . \
  -Cbuild-dir=build/asan -Ccmake.build-type=RelWithDebInfo -Ccmake.define.GENAI_SANITIZE="$sanitizers" \
  -Ccmake.define.GENAI_ISAS="portable;avx2;avx512vnni"
[ $# -gt 0 ] || set -- tests/ops/test_cpu_kernels.py tests/ops/test_cpu_attention.py tests/ops/test_cpu_backend.py \
  tests/ops/test_cpu_guards.py tests/ops/test_kernels.py tests/ops/test_attention.py -k "not (feeding and 40)"
# Python itself leaks by design, and ORT's libraries are not instrumented.
# libstdc++ must be there when ASan looks for __cxa_throw.
library() { "${CXX:-c++}" -print-file-name="$1"; }
LD_PRELOAD="$(library libasan.so) $(library libstdc++.so)" ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0 \
  UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 exec $venv/bin/python -m pytest -q "$@"
