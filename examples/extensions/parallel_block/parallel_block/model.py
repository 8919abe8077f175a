"""The model, and its layout in a Hugging Face folder."""

from typing import Any

from torch import Tensor, nn

from fsdp_pretrain.hf.layout import HFLayout
from fsdp_pretrain.models.layers import Rotary
from fsdp_pretrain.models.llama import Llama, LlamaBlock
from fsdp_pretrain.models.masks import Mask

from . import ParallelModel


class ParallelBlock(LlamaBlock):
    """`x += gain * (attention(norm(x)) + mlp(norm(x)))`."""

    def __init__(self, config: ParallelModel) -> None:
        super().__init__(config)
        self.gain = config.gain

    def forward(self, x: Tensor, mask: Mask, rotary: Rotary) -> Tensor:
        added = self.attention(self.attention_norm(x), mask, rotary) + self.mlp(self.mlp_norm(x))
        out: Tensor = x + self.gain * added
        return out


class Parallel(Llama):
    """Llama with these blocks."""

    config: ParallelModel

    def block(self, index: int) -> nn.Module:
        return ParallelBlock(self.config)


def hf_config(model: ParallelModel) -> dict[str, Any]:
    """What its own class of transformers would read."""
    names = {"architectures": ["ParallelForCausalLM"], "model_type": "parallel"}
    left_out = {"family", "vocab", "vocab_multiple", "declared_params"}
    return {**names, **model.model_dump(mode="json", exclude_none=True, exclude=left_out)}


LAYOUT = HFLayout(hf_config)
