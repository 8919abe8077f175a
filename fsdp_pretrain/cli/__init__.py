"""The command `fsdp-pretrain`."""
