"""The model `fsdp_pretrain` of lm-eval's own command line: `--model fsdp_pretrain --model_args checkpoint=RUN`.

Importing this registers it, which `fsdp-eval lm-eval` does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lm_eval import models as _models  # noqa: F401  lm-eval adds its own only to an empty registry
from lm_eval.api.registry import register_model
from lm_eval.utils import simple_parse_args_string

from fsdp_pretrain.config.sections import EvalSection
from fsdp_pretrain.errors import ConfigError

from .checkpoints import open_checkpoint
from .evaluation import open_adapter
from .finding import find_checkpoint
from .harness import CheckpointLM

_ARGUMENTS = ("checkpoint", "step", "tokenizer")
_FROM_OPTIONS = ("batch_size", "max_batch_size", "device")


@register_model("fsdp_pretrain")
class RegisteredLM(CheckpointLM):
    """Makes a `CheckpointLM` from what lm-eval's command line passes."""

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Any:
        """See `create_from_arg_obj`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Any:
        """The model of a checkpoint.

        `checkpoint` is a run directory or a `step-N` directory in it, `step` a step of the run (else the newest is
        used), `tokenizer` a path if the checkpoint was moved out of its run. A batch size that is no number means the
        run's `eval.batch`.

        Raises:
            UserError: an argument is unknown or missing, or what it names cannot be used.
        """
        given = {**arg_dict, **{key: value for key, value in (additional_config or {}).items() if value is not None}}
        unknown = [key for key in given if key not in (*_ARGUMENTS, *_FROM_OPTIONS)]
        if unknown or "checkpoint" not in given:
            problem = f"has no argument {', '.join(unknown)}" if unknown else "needs checkpoint=RUN"
            raise ConfigError(f"the model fsdp_pretrain {problem}; its arguments are {', '.join(_ARGUMENTS)}")
        step, tokenizer = given.get("step"), given.get("tokenizer")
        if step is not None and not isinstance(step, int):
            raise ConfigError(f"the model fsdp_pretrain needs a whole number as its step, not {step!r}")
        path = None if tokenizer is None else Path(str(tokenizer))
        judged = open_checkpoint(find_checkpoint(Path(str(given["checkpoint"])), step), path)
        section = EvalSection() if judged.trained is None else judged.trained.eval
        batch = str(given.get("batch_size", ""))
        changes: dict[str, object] = {"device": _device(given, section.device)}
        if batch.isdecimal() and int(batch):
            changes["batch"] = int(batch)
        return open_adapter(judged, section.model_copy(update=changes))


def _device(given: Mapping[str, Any], default: str) -> str:
    """The device to use: lm-eval's command line names `cuda:0` unasked, also where there is no GPU."""
    device = str(given.get("device") or default)
    if device.startswith("cuda") and not torch.cuda.is_available():
        print(f"fsdp_pretrain: there is no GPU for device {device}; using the CPU", file=sys.stderr)
        return "cpu"
    return device
