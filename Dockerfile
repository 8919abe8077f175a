# A trainer with everything, from this repository:
#
#   docker build --tag fsdp-pretrain .
#   docker run --gpus all --shm-size 8g --volume /data:/data --workdir /data fsdp-pretrain fsdp-pretrain launch run.toml
#
# torch's wheels bring CUDA and NCCL, so the host needs only the driver. Where the network needs a vendor's libraries
# (EFA, ...), start from the vendor's image: --build-arg BASE=...
ARG BASE=python:3.12
FROM ${BASE}
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir -c constraints.txt '.[all]'
RUN fsdp-pretrain init /work
WORKDIR /work
CMD ["fsdp-pretrain", "--help"]
