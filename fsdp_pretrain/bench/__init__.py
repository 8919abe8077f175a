"""Benchmarks of the trainer's step: `python -m fsdp_pretrain.bench CONFIG.toml`."""
