"""`fsdp-pretrain VERB`: the operator's commands for a run. Read-only verbs need no torch, except `plan` without
`--at`.

A handler imports what it runs, see `fsdp_pretrain.console`.
"""

from __future__ import annotations

from fsdp_pretrain.console import CommandLine

from .alarms import ack, alarms
from .checkpoints import checkpoints
from .control import control
from .init import init
from .launch import doctor, launch
from .lineage import fork, rollback
from .plan import config_reference, plan
from .sample import sample
from .steps import profile, replay, where
from .views import TRACKERS, goodput, journal, note, report, status, track, watch

_MEANT = {
    **dict.fromkeys(("train", "run", "start", "resume"), "launch"),
    **{word: f"control RUN {word}" for word in ("stop", "save", "pause", "set")},
    "notify": "alarms RUN test",
    **{word: f"checkpoints RUN {word}" for word in ("export", "import", "merge")},
    **dict.fromkeys(("eval", "evaluate", "compare"), "the command fsdp-eval"),
    **dict.fromkeys(("prepare", "validate", "data"), "the command fsdp-data"),
}


def main() -> int:
    """Entry point of the console script."""
    command = CommandLine("fsdp-pretrain", "Plan, watch and steer pre-training runs.", _MEANT)
    command.add(init, plan, launch, doctor, group="start")
    command.add(watch, status, report, journal, goodput, where, sample, profile, replay, group="look")
    command.add(checkpoints, track, group="keep and share")
    command.add(control, note, alarms, rollback, fork, group="steer")
    command.add(ack, *TRACKERS, config_reference, group=None)  # short forms, and what makes docs/config.md
    return command.run()
