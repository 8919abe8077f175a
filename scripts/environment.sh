# Sourced by the other scripts: creates .venv with this project and the named extras, and puts it first on PATH.
#
#   . scripts/environment.sh all     or: dev, train, ...
#
# An existing environment is reused until pyproject.toml changes. With INSTALL=no nothing is created or installed: the
# active Python (or PYTHON=...) must have the packages, for example by PYTHONPATH.

set -euo pipefail
extras=${1:?which extras}
python=${PYTHON:-python3}
stamp=.venv/installed-$extras
if [ "${INSTALL:-yes}" = no ]; then
    export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
    fsdp-data() { "$python" -m fsdp_pretrain.data.cli "$@"; }
    fsdp-pretrain() { "$python" -m fsdp_pretrain.cli "$@"; }
    fsdp-eval() { "$python" -m fsdp_pretrain.eval.cli "$@"; }
    torchrun() { "$python" -m torch.distributed.run "$@"; }
else
    if [ ! -f "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
        echo "installing fsdp-pretrain[$extras] into .venv"
        [ -x .venv/bin/python ] || "$python" -m venv .venv
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[$extras]"
        touch "$stamp"
    fi
    python=$PWD/.venv/bin/python
    export PATH="$PWD/.venv/bin:$PATH"
fi
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1   # without it torchrun --max-restarts cannot recover a job
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # one thread per rank; torchrun would set the same and warn
