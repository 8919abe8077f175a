#!/usr/bin/env bash
# The GPU suite and the benchmarks on this machine, in under nine minutes. Every part has a time limit, and none ends
# another. Installs nothing: the active Python (or PYTHON=...) needs torch with CUDA, the rest of the extra `train`, and
# pytest, for example by PYTHONPATH; neither aim nor lm-eval. transformers and torchtitan are compared with if present.
#
#   scripts/test_gpu.sh [OUTDIR]             everything; JSON files, logs and summary.md in OUTDIR or a temporary directory
#   scripts/test_gpu.sh --list               the parts, the most valuable first, and their limits in seconds
#   scripts/test_gpu.sh --only suite,peers-7b [OUTDIR]
#   scripts/test_gpu.sh --minutes 4 [OUTDIR] what does not fit any more is not started
#   scripts/test_gpu.sh --dry [OUTDIR]       all parts with toys, on any machine
set -euo pipefail
from=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
INSTALL=no
. scripts/environment.sh train
cd "$from"
exec "$python" -m fsdp_pretrain.bench.gpu "$@"
