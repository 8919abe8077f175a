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
# JOB             name of the job, the same on every node (default: the configuration's file name)
# RANKS_PER_NODE  processes per node (default: one per GPU)
# RESTARTS        how often torchrun restarts the ranks after a failure before it gives up (default 3)
set -euo pipefail
if [ "$#" -eq 0 ]; then
    sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 2
fi
nodes=${NODES:-1} port=${PORT:-29400} job=${JOB:-$(basename "$1" .toml)}

export PYTHONSAFEPATH=1                      # `data` and `eval` are common names: never import them from a working directory
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # torchrun's restarts do not recover without it
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}

# Keep-alive and join times: a lost node is noticed in about 15 s, and the rest does not wait ten minutes for it.
rendezvous=(--rdzv-conf "join_timeout=300,close_timeout=30,read_timeout=60")
if [ "$nodes" -gt 1 ]; then
    : "${HEAD:?HEAD must name the first node}"
    rendezvous=(
        --rdzv-backend c10d --rdzv-endpoint "$HEAD:$port" --rdzv-id "$job"
        --rdzv-conf "join_timeout=300,close_timeout=30,read_timeout=60"
    )
else
    rendezvous=(--standalone)
fi
exec torchrun \
    --nnodes "$nodes" --nproc-per-node "${RANKS_PER_NODE:-gpu}" --max-restarts "${RESTARTS:-3}" "${rendezvous[@]}" \
    -m fsdp_pretrain.train "$@"
