"""What `torch.compile` launches for a block and for the loss on an H100, so that no fusion is lost unnoticed; see
`inductor_kernels.py`."""

from __future__ import annotations

import pytest
from inductor_kernels import FAMILIES, Kernels, of_block, of_loss


@pytest.mark.parametrize(
    ("family", "products", "forward", "backward"),
    [
        # Norm; rotation of queries and keys; residual and norm; SwiGLU; residual.
        ("llama", 7, 5, 9),
        # No rotation. A gradient of a bias takes two launches, or one with what makes it.
        pytest.param("gpt", 6, 4, 22, marks=pytest.mark.slow),
        pytest.param("glm", 7, 5, 23, marks=pytest.mark.slow),
        pytest.param("qwen2", 7, 6, 16, marks=pytest.mark.slow),
        pytest.param("qwen3", 7, 6, 16, marks=pytest.mark.slow),
    ],
)
def test_a_block_is_products_attention_and_few_kernels(family: str, products: int, forward: int, backward: int) -> None:
    """`forward`, `backward`: the most launches beside products and attention. torch 2.11 has one fewer backward."""
    codes = of_block(FAMILIES[family])
    found = {name: Kernels.of(code) for name, code in codes.items()}
    assert (found["forward"].products, found["forward"].attention) == (products, 1)
    assert (found["backward"].products, found["backward"].attention) == (2 * products, 1)
    assert 0 < found["forward"].fused <= forward and not found["forward"].further
    assert found["backward"].fused > 0 and set(found["backward"].further) <= {"sum"}  # sums of partial sums
    assert found["backward"].fused + len(found["backward"].further) <= backward


def test_the_loss_is_few_kernels() -> None:
    """Forward the normalisers, and the logits of the targets; backward all in one."""
    found = {name: Kernels.of(code) for name, code in of_loss().items()}
    assert found["forward"] == Kernels(products=0, attention=0, fused=2, further=())
    assert found["backward"] == Kernels(products=0, attention=0, fused=1, further=())
