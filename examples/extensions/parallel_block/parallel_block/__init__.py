"""A family whose blocks compute attention and feed-forward layer side by side, as in GPT-J and PaLM. No torch here."""

from typing import Annotated, Literal

from pydantic import Field

from fsdp_pretrain.config.model import LlamaModel
from fsdp_pretrain.extensions import Extension, Part


class ParallelModel(LlamaModel):
    """Llama's settings, and one more."""

    family: Literal["parallel_block:llama"]  # type: ignore[assignment]
    """Model family."""
    gain: Annotated[float, Field(gt=0)] = 1.0
    """Factor of what a block adds."""


extension = Extension(
    families={"llama": Part(ParallelModel, code="parallel_block.model:Parallel", layout="parallel_block.model:LAYOUT")}
)
