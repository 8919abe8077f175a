"""pytest test_parallel_block.py"""

import torch
from parallel_block import ParallelModel

from fsdp_pretrain import extensions, models
from fsdp_pretrain.parallel.fsdp import materialise

SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "ffn": 48, "vocab": 61}


def test_both_branches_read_the_same_input() -> None:
    extensions.load(["parallel_block"])
    config = ParallelModel(family="parallel_block:llama", gain=0.5, **SHAPE)
    model = materialise(models.build(config), seed=1, device=torch.device("cpu"))
    x, rotary = torch.randn(1, 8, 32), model.context(torch.arange(8))
    block = model.blocks[0]
    expected = x + 0.5 * (block.attention(block.attention_norm(x), None, *rotary) + block.mlp(block.mlp_norm(x)))
    torch.testing.assert_close(block(x, None, *rotary), expected)
