"""Benchmarks in processes of their own: none inherits memory, caches or a failure from another."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fsdp_pretrain.processes import NoAnswerError, run_module

from .times import MeasuredSteps

LIMIT = 900.0
"""Seconds after which a process is ended: a compilation and slow steps fit in."""


def measure(command: Sequence[str], *, limit: float, ranks: int = 1) -> MeasuredSteps | str:
    """The result of `python -m fsdp_pretrain.bench COMMAND` on some ranks of this node, or why there is none."""
    # Not passed on otherwise: torchrun sets it for ranks.
    threads = {name: value for name, value in os.environ.items() if name == "OMP_NUM_THREADS"}
    module = ["fsdp_pretrain.bench"]
    if ranks > 1:
        module = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m", *module]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        try:
            done = run_module(*module, *command, "--result", str(result), environment=threads, limit=limit)
        except NoAnswerError:
            return f"not finished after {limit:.0f} seconds"
        if done.returncode or not result.exists():
            return reason(done.stderr.decode(errors="replace"))
        return MeasuredSteps.from_json(json.loads(result.read_text(encoding="utf-8")))


def reason(errors: str) -> str:
    """The line of an error output that says why a process failed; torchrun's report of it comes last."""
    lines = [line.strip() for line in errors.splitlines()]
    raised = r"(\[rank\d+\]: ?)?(?!torch\.distributed\.elastic)[\w.]+(Error|Exception|Unsupported)\b"
    told = [line for line in lines if line.startswith("error:") or re.match(raised, line)]
    killed = [line for line in lines if "Signal " in line]
    return (told or killed or ["it ended without a message"])[-1][:200]
