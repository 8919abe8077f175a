"""The trainer: `torchrun ... -m fsdp_pretrain.train CONFIG.toml`."""
