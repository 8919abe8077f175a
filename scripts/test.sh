#!/usr/bin/env bash
# Lint, types and tests, from nothing: creates a virtual environment on a fresh clone.
#
#   scripts/test.sh             everything except the long tests (under ten minutes on two cores)
#   scripts/test.sh -m quick    while editing (under three minutes)
#   scripts/test.sh -m slow     long fault and soak tests
#   scripts/test.sh tests/test_packer.py -k lanes      any pytest arguments
#   INSTALL=no scripts/test.sh  with the packages of the active Python; nothing is installed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh dev
# With everything installed, no test may be skipped for a missing package (tests/skips.py).
[ "${INSTALL:-yes}" = no ] || export TEST_PACKAGES=all

"$python" -m ruff format --check .
"$python" -m ruff check .
"$python" -m mypy
unset PYTHONDONTWRITEBYTECODE  # else every process that the tests start compiles our modules again
if [ "$#" -eq 0 ]; then
    set -- -m "not slow and not gpu"
fi
# Three files at a time: many tests wait for processes they have started. TEST_WORKERS=0 runs them serially.
exec "$python" -m pytest --numprocesses "${TEST_WORKERS:-3}" --dist loadfile --no-loadscope-reorder "$@"
