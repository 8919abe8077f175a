"""Surgery on the optimiser, as `[[optimizer.surgery]]` declares it: moments are reset, parameters are frozen.

What is done before a step depends only on the configuration and the samples consumed. So a start from any checkpoint
does it again, or finds it done in the state, and nothing about it is saved.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.surgery import Frozen, SurgerySection, is_due
from fsdp_pretrain.errors import ConfigError

from .mesh import local_part
from .optimizer import AdamW

_RESET = {
    "both": ("step", "exp_avg", "exp_avg_sq"),
    "exp_avg": ("exp_avg",),
    "exp_avg_sq": ("step", "exp_avg_sq"),
    "none": (),
}


@dataclass(frozen=True)
class _Operation:
    """An operation on the parameters `names`; frozen while a step begins in [begins, ends), in samples consumed."""

    section: SurgerySection
    names: list[str]
    begins: int
    ends: int

    def __str__(self) -> str:
        section, count = self.section, len(self.names)
        whose = f"{count} parameters" + (f" ({', '.join(section.parameters)})" if section.parameters else "")
        parts = [f"reset {' and '.join(_RESET[section.reset])} of {whose}"] if section.reset != "none" else []
        if self.ends > self.begins:
            moments = "fill" if section.frozen_moments == "fill" else "are kept"
            parts.append(f"{whose if not parts else 'they'} are frozen for {section.freeze}, their moments {moments}")
        return "; ".join([*parts, *([f"because: {section.reason}"] if section.reason else [])])


class Surgery:
    """The operations of a configuration. Raises ConfigError if a pattern matches no parameter of the model."""

    def __init__(self, model: nn.Module, config: Config) -> None:
        names, schedule = [name for name, _ in model.named_parameters()], config.schedule
        self._operations = [
            _Operation(section, _matching(names, section), section.begins(schedule), section.ends(schedule))
            for section in config.optimizer.surgery
        ]

    @torch.no_grad()
    def act(self, optimizer: AdamW, *, consumed: int, batch: int) -> list[str]:
        """Prepare the optimiser for the step that begins at `consumed`, without waiting for the device.

        Args:
            optimizer: its state and `frozen` are changed.
            consumed: samples trained.
            batch: samples of the step before; 0 before the first.

        Returns:
            What was done, in words; mostly nothing.
        """
        frozen, done = dict[str, Frozen](), list[str]()
        for operation in self._operations:
            if is_due(operation.begins, consumed=consumed, batch=batch):
                for name in operation.names:
                    for key in _RESET[operation.section.reset]:
                        if name in optimizer.state:
                            local_part(optimizer.state[name][key]).zero_()
                done.append(str(operation))
            if operation.begins <= consumed < operation.ends:
                treatment = operation.section.frozen_moments
                frozen |= {name: treatment for name in operation.names if frozen.get(name) != "keep"}
            elif operation.ends > operation.begins and is_due(operation.ends, consumed=consumed, batch=batch):
                done.append(f"{len(operation.names)} parameters, frozen at {operation.section.at}, learn again")
        optimizer.frozen = frozen
        return done


def _matching(names: list[str], section: SurgerySection) -> list[str]:
    for pattern in section.parameters:
        if not any(re.search(pattern, name) for name in names):
            raise ConfigError(
                f"optimizer.surgery at {section.at} has {pattern!r}, which matches no parameter",
                effect="the operation would do nothing, or less than was meant",
                remedy=f"names look like {names[0]!r}, {names[-1]!r}",
            )
    patterns = section.parameters or [""]
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]
