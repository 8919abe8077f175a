#!/usr/bin/env bash
# One node's part of a training job: torchrun with the environment the trainer wants. Run the same command on every node.
#
#   scripts/launch.sh configs/runs/my-run.toml                                         one node, all its GPUs
#   NODES=16 HEAD=node001 JOB=run42 scripts/launch.sh configs/runs/my-run.toml         sixteen nodes, the same on each
#   NODES=1 RANKS_PER_NODE=4 scripts/launch.sh configs/runs/quickstart.toml            four processes (CPU, say)
#
# NODES           number of nodes (default 1)
# HEAD            host name or address of the first node, where the ranks meet (required for more than one)
# PORT            its port (default 29400)
# ADDRESS         this node's address, where its host name resolves to one that the others cannot reach
# JOB             name of the job, the same on every node (default: the configuration's file name)
# RANKS_PER_NODE  processes per node (default: one per GPU)
# RESTARTS        how often torchrun restarts the ranks after a failure before it gives up (default 3)
set -euo pipefail
if [ "$#" -eq 0 ]; then
    sed -n '2,15s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 2
fi
nodes=${NODES:-1} port=${PORT:-29400} job=${JOB:-$(basename "$1" .toml)}

export PYTHONSAFEPATH=1                      # `data` and `eval` are common names: never import them from a working directory
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # torchrun's restarts do not recover without it
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

if [ "$nodes" -gt 1 ]; then
    : "${HEAD:?HEAD must name the first node}"
    # torchrun compares HEAD with this machine's host name; with an address, or an alias, no node would be the host.
    is_host=$(python - "$HEAD" <<'PY'
import socket, sys
import psutil
here = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
try:
    head = {info[4][0] for info in socket.getaddrinfo(sys.argv[1], None)}
except OSError as error:
    sys.exit(f"HEAD={sys.argv[1]} does not resolve on this node: {error}")
print("true" if here & head else "false")
PY
)
    rendezvous=(
        --rdzv-backend c10d --rdzv-endpoint "$HEAD:$port" --rdzv-id "$job"
        --rdzv-conf "is_host=$is_host,join_timeout=300,close_timeout=30,read_timeout=60"
    )
    if [ -n "${ADDRESS:-}" ]; then
        rendezvous+=(--local-addr "$ADDRESS")
    fi
else
    rendezvous=(--standalone)
fi
exec torchrun \
    --nnodes "$nodes" --nproc-per-node "${RANKS_PER_NODE:-gpu}" --max-restarts "${RESTARTS:-3}" "${rendezvous[@]}" \
    -m fsdp_pretrain.train "$@"
