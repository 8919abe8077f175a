#!/usr/bin/env bash
# Lint, types and tests, from nothing: makes its own virtual environment on a fresh clone.
#
#   scripts/test.sh             everything but the long tests (under ten minutes on two cores)
#   scripts/test.sh -m quick    while editing (under three minutes)
#   scripts/test.sh -m slow     long fault and soak tests
#   scripts/test.sh tests/test_packer.py -k lanes      any pytest arguments
#   INSTALL=no scripts/test.sh  with the packages of the active Python; nothing is installed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh dev
# Where everything is installed no test may be skipped for want of a package (tests/skips.py).
[ "${INSTALL:-yes}" = no ] || export TEST_PACKAGES=all

"$python" -m ruff format --check .
"$python" -m ruff check .
"$python" -m mypy
if [ "$#" -eq 0 ]; then
    set -- -m "not slow and not gpu"
fi
# Three files at a time: many tests wait for processes they have started. TEST_WORKERS=0 for one after the other.
exec "$python" -m pytest --numprocesses "${TEST_WORKERS:-3}" --dist loadfile --no-loadscope-reorder "$@"
