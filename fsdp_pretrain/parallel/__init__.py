"""Distributed training: the mesh, FSDP2, the optimiser, the comparison of replicas."""
