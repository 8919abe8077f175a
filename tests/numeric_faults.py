"""Numeric faults in a training rank, executed before it starts (`EXECUTE_FIRST` names this file, see `zygote.py`).

`FAULT` is JSON: `{"kind": "gradient", "rank": 1, "steps": [7, 8]}`; `from` instead of `steps` means every step from
there on, rank `"all"` every rank. A gradient or a loss becomes NaN; `nudge` changes one parameter of the rank before the
step; `repeat` returns the previous batch again; `kill` kills the rank before the step, as a machine failure would.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from typing import Any

import torch

from fsdp_pretrain.models import forward
from fsdp_pretrain.parallel import optimizer
from fsdp_pretrain.train import trainer

FAULT = json.loads(os.environ["FAULT"])
now = 0


def here() -> bool:
    """Whether this rank is hit in this step."""
    due = now >= FAULT["from"] if "from" in FAULT else now in FAULT["steps"]
    return due and FAULT["rank"] in (int(os.environ.get("RANK", "0")), "all")


def step(self: Any) -> None:
    global now
    now = self.state.step + 1
    if FAULT["kind"] == "nudge" and here():
        with torch.no_grad():
            next(self.model.parameters()).to_local().view(-1)[3] += 1e-3
    if FAULT["kind"] == "kill" and here():
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT["kind"] != "repeat" or now not in FAULT["steps"]:
        whole_step(self)
        return
    node = self.data._node
    self.data._node = iter([self.data.build(replace(self.state, cursor=self.state.cursor - self.state.batch))])
    whole_step(self)
    self.data._node = node


def local_norm(model: Any) -> Any:
    if FAULT["kind"] == "gradient" and here():
        for parameter in model.parameters():
            gradient = parameter.grad.to_local()
            if gradient.numel():
                gradient.view(-1)[0] = float("nan")
                break
    return norm_really(model)


def losses(*args: Any, **kwargs: Any) -> Any:
    measured = losses_really(*args, **kwargs)
    if FAULT["kind"] == "loss" and here():  # a constant: the gradients stay finite
        return measured._replace(losses=measured.losses + float("nan"))
    return measured


whole_step, trainer.Trainer.step = trainer.Trainer.step, step  # type: ignore[method-assign]
norm_really, optimizer.local_norm = optimizer.local_norm, local_norm
losses_really, forward.losses = forward.losses, losses
