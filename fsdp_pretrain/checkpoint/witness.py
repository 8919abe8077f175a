"""What the code of a run computes, in a few numbers: so other code never reads a checkpoint unnoticed.

The process that trains has a tiny instance of the model and of the optimiser compute something fixed, in fp32 on the
CPU. Whoever loads the checkpoint does the same: other numbers are other code, of a package or a patched class.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import nn

from fsdp_pretrain import extensions, models
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.data_section import DataSection
from fsdp_pretrain.config.model import AnyModel
from fsdp_pretrain.config.sections import OptimizerSection
from fsdp_pretrain.data.packing.loader import micro_batch
from fsdp_pretrain.data.packing.own_objective import ObjectiveContext
from fsdp_pretrain.data.packing.packer import Packed
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.parallel.fsdp import materialise
from fsdp_pretrain.parallel.optimizer import Optimizer, rule_of

from .code_identity import other_code, same_numbers
from .manifest import PartIdentity, RunIdentity

_STEPS = 3
_NOISE = 0.3
"""Standard deviation of what is added to the initial values of a tiny model."""


def code_identity(config: Config) -> dict[str, PartIdentity]:
    """The code of a configuration's model and optimiser, as this process has it."""
    model, section = config.model, config.optimizer
    family = extensions.parts("families").get(model.family)
    rule = rule_of(section.kind)
    objective = extensions.parts("objectives").get(config.data.objective.kind)
    own = {} if objective is None else {"objective": _of_objective(objective, config.data)}
    return {
        **own,
        "model": PartIdentity(
            part=model.family,
            source=extensions.source_digest(family.code if family else models.__name__),
            witness=_witness_of_model(model),
        ),
        "optimizer": PartIdentity(
            part=section.kind, source=extensions.source_digest(rule.__module__), witness=_witness_of_optimizer(section)
        ),
    }


def _of_objective(part: extensions.Part, data: DataSection) -> PartIdentity:
    settings, sources = data.objective, sorted(source.name for source in data.sources)
    context = ObjectiveContext(vocab=50, model_vocab=61, eod=0, seed=1, names=["text", *sources])
    tokens = np.arange(50, dtype=np.int64).reshape(2, 25) % 49 + 1
    packed = Packed(tokens, [3, 4], np.zeros(2, np.int64), np.array([3, 4]), np.zeros(0, np.int64))
    made = part.load()(settings, context).change(micro_batch(packed, with_lengths=True, across_documents=True), packed)
    labels = made.tokens[:, 1:] if made.labels is None else made.labels
    witness = [float(value) for value in (*made.tokens.flatten(), *labels.flatten())]
    return PartIdentity(part=settings.kind, source=extensions.source_digest(part.code), witness=witness)


def check_model_code(stored: RunIdentity, config: Config, where: object) -> None:
    """Raise ConfigError if the model of a checkpoint would be computed by other code than it was trained with."""
    if text := other_code(stored.code, code_identity(config), "model"):
        raise ConfigError(
            f"{where}: {text}",
            effect="nothing was done: it would be another model than the one that was trained",
            remedy="install the version of the package that trained it; if a class was patched, patch it here, too",
        )


@lru_cache
def _witness_of_model(model: AnyModel) -> list[float]:
    """The loss of fixed tokens, and the norm of each parameter's gradient.

    Raises ConfigError if random numbers are drawn although `uses_dropout` is false.
    """
    witness = _compute(model, seed=0)
    if not model.uses_dropout and not same_numbers(witness, _compute(model, seed=1)):
        raise ConfigError(
            f"a model of family {model.family} draws random numbers, but its settings do not say so",
            effect="they would not be seeded: runs could not be repeated, and recomputed blocks would differ",
            remedy="override `uses_dropout` in its settings, to be true where it draws any",
        )
    return witness


def _compute(model: AnyModel, seed: int) -> list[float]:
    """The numbers, with random numbers of this seed."""
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tiny = materialise(models.build(model.tiny()), 0, torch.device("cpu")).train()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():  # else parameters that begin constant, or small, would not tell what is done with them
            for parameter in tiny.parameters():
                parameter.add_(_NOISE * torch.randn(parameter.shape, generator=generator))
        tokens = (torch.arange(50).reshape(2, 25) * 7 + 3) % model.tiny().vocab
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
    with torch.inference_mode(False):
        matrices, generator = _Matrices(), torch.Generator().manual_seed(1)
        optimizer = Optimizer(matrices, section.model_copy(update={"groups": []}))
        for _ in range(_STEPS):
            for parameter in matrices.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step(lr=0.1, weight_decay=0.1, betas=(0.9, 0.95))
        return [float(parameter.detach().norm()) for parameter in matrices.parameters()]
