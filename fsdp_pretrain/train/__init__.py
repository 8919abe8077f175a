"""The main job: `torchrun ... -m fsdp_pretrain.train CONFIG.toml`."""
