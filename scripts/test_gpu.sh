#!/usr/bin/env bash
# The GPU suite and the GPU benchmarks on this machine, ten minutes in all. Installs nothing: the active Python (or
# PYTHON=...) needs torch with CUDA, the rest of the extra `train`, and pytest, but neither aim nor lm-eval.
#
#   scripts/test_gpu.sh             suite, then benches
#   scripts/test_gpu.sh suite       or: bench
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
INSTALL=no
. scripts/environment.sh train
what=${1:-all}
if [ "$what" != bench ]; then
    "$python" -m pytest -m gpu tests/gpu -o timeout=600
fi
if [ "$what" != suite ]; then
    for config in configs/bench/*-gpu.toml; do
        "$python" -m fsdp_pretrain.bench "$config"
    done
fi
