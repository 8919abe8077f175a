#!/usr/bin/env bash
# The GPU suite and the GPU benchmarks on the machine at hand, ten minutes in all. Needs torch with CUDA, pytest and the
# base dependencies, not aim and not lm-eval; uses the Python that is active (PYTHON=... for another).
#
#   scripts/test_gpu.sh             suite, then benches
#   scripts/test_gpu.sh suite       or: bench
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1 TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
what=${1:-all}
if [ "$what" != bench ]; then
    "$python" -m pytest -m gpu tests/gpu --timeout 600
fi
if [ "$what" != suite ]; then
    for config in configs/bench/*-gpu.toml; do
        "$python" -m fsdp_pretrain.bench "$config"
    done
fi
