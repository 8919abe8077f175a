"""Benchmarks: `python -m fsdp_pretrain.bench CONFIG.toml`."""
