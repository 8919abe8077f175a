"""What the code of a run computes, in a few numbers: so other code never reads a checkpoint unnoticed.

The process that trains has a tiny instance of the model and of the optimiser compute something fixed, in fp32 on the
CPU. Whoever loads the checkpoint does the same: other numbers are other code, of a package or a patched class.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache

import torch
from torch import nn

from fsdp_pretrain import extensions, models
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.model import AnyModel
from fsdp_pretrain.config.sections import OptimizerSection
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.parallel.fsdp import materialise
from fsdp_pretrain.parallel.optimizer import Optimizer, rule_of

from .manifest import PartIdentity, RunIdentity

_TOLERANCE = 1e-4
"""Largest relative difference of the numbers of equal code: kernels of processors differ in the last digits, 1e-6."""
_STEPS = 3


def code_identity(config: Config) -> dict[str, PartIdentity]:
    """The code of a configuration's model and optimiser, as this process has it."""
    model, section = config.model, config.optimizer
    family = extensions.parts("families").get(model.family)
    rule = rule_of(section.kind)
    return {
        "model": PartIdentity(
            part=model.family,
            source=extensions.source_digest(family.code if family else models.__name__),
            witness=_witness_of_model(model),
        ),
        "optimizer": PartIdentity(
            part=section.kind, source=extensions.source_digest(rule.__module__), witness=_witness_of_optimizer(section)
        ),
    }


def other_code(stored: Mapping[str, PartIdentity], current: Mapping[str, PartIdentity], key: str) -> str | None:
    """How a part computes something else than its stored witness, in words; None if it does not, or is another part."""
    was, is_ = stored.get(key), current[key]
    if was is None or was.part != is_.part or _same(was.witness, is_.witness):
        return None
    return (
        f"{key}: the code of {is_.part} ({is_.source}) computes something else than the code that trained "
        f"({was.source}): on fixed input {is_.witness[0]:.6g} instead of {was.witness[0]:.6g}"
    )


def new_sources(stored: Mapping[str, PartIdentity], current: Mapping[str, PartIdentity]) -> Iterator[str]:
    """The parts whose source changed, and which compute what they computed."""
    for key, is_ in current.items():
        was = stored.get(key)
        if was is None or was.part != is_.part or was.source == is_.source or other_code(stored, current, key):
            continue
        yield f"code of {key}: {was.source} -> {is_.source}, computes the same"


def check_model_code(stored: RunIdentity, config: Config, where: object) -> None:
    """Raise ConfigError if the model of a checkpoint would be computed by other code than it was trained with."""
    if text := other_code(stored.code, code_identity(config), "model"):
        raise ConfigError(
            f"{where}: {text}",
            effect="nothing was done: it would be another model than the one that was trained",
            remedy="install the version of the package that trained it; if a class was patched, patch it here, too",
        )


def _same(ours: list[float], theirs: list[float]) -> bool:
    return len(ours) == len(theirs) and all(
        math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=1e-6) for a, b in zip(ours, theirs, strict=True)
    )


@lru_cache
def _witness_of_model(model: AnyModel) -> list[float]:
    """The loss of fixed tokens, and the norm of each parameter's gradient."""
    tiny = materialise(models.build(model.tiny()), 0, torch.device("cpu")).train()
    tokens = (torch.arange(50).reshape(2, 25) * 7 + 3) % model.tiny().vocab
    with torch.enable_grad():
        loss = tiny(tokens[:, :-1], tokens[:, 1:]).mean()
        loss.backward()
    norms = [0.0 if parameter.grad is None else parameter.grad.norm().item() for parameter in tiny.parameters()]
    return [loss.item(), *norms]


class _Matrices(nn.Module):
    """Parameters with the names that decide on their treatment."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(7, 6, generator=generator))
        shapes = (6, 10), (9, 6)
        self.blocks = nn.ParameterList([torch.randn(shape, generator=generator) for shape in shapes])
        self.norm = nn.ParameterDict({"weight": torch.ones(6)})


def _witness_of_optimizer(section: OptimizerSection) -> list[float]:
    """Norms of fixed parameters after some steps with fixed gradients; without groups, since they are settings."""
    matrices, generator = _Matrices(), torch.Generator().manual_seed(1)
    optimizer = Optimizer(matrices, section.model_copy(update={"groups": []}))
    for _ in range(_STEPS):
        for parameter in matrices.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step(lr=0.1, weight_decay=0.1, betas=(0.9, 0.95))
    return [float(parameter.detach().norm()) for parameter in matrices.parameters()]
