"""How a model is spread over ranks: the mesh, FSDP2, the optimiser, the comparison of replicas."""
