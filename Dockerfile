# A trainer with everything, from this repository:
#
#   docker build --tag fsdp-pretrain .
#   docker run --gpus all --network host --ipc host --ulimit memlock=-1 --volume /data:/data --workdir /data \
#       fsdp-pretrain fsdp-pretrain launch run.toml          # where there is InfiniBand: --device /dev/infiniband, too
#
# torch's wheels bring CUDA and NCCL, so the host needs only the driver. Where the network needs a vendor's libraries
# (EFA, ...), start from the vendor's image: --build-arg BASE=...
ARG BASE=python:3.12-bookworm
FROM ${BASE}
# NCCL reaches InfiniBand and RoCE through these; without them it falls back to TCP.
RUN apt-get update && apt-get install -y --no-install-recommends libibverbs1 ibverbs-providers librdmacm1 \
    && rm -rf /var/lib/apt/lists/*
# enroot (pyxis) gives a container GPUs and CUDA only if these ask for them.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir -c constraints.txt '.[all]'
RUN fsdp-pretrain init /work
WORKDIR /work
CMD ["fsdp-pretrain", "--help"]
