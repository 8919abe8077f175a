"""Lean FSDP2 pre-training: the trainer, its checkpoints, its record and its operator commands.

`data` and `eval` are folders beside this one, imported through links: `fsdp_pretrain.data`, `fsdp_pretrain.eval`.
"""

__version__ = "0.1.0"
