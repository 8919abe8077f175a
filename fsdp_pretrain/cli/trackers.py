"""`fsdp-pretrain aim`, `tensorboard`, `wandb`: the views of a run in trackers, built from its record."""

from __future__ import annotations

import argparse

from fsdp_pretrain.console import CommandLine, verb
from fsdp_pretrain.record.arguments import RUN

_LOOK = {"aim": "aim up --repo", "tensorboard": "tensorboard --logdir", "wandb": "wandb sync"}
"""What shows a view, by tracker."""


def add(command: CommandLine) -> None:
    """Add the verbs."""
    for name in _LOOK:
        command.add(verb(name, "runs/quickstart/run", RUN)(_rebuild)).set_defaults(tracker=name)


def _rebuild(args: argparse.Namespace) -> int:
    """Build, or bring up to date, the view of a run in this tracker from its record; nothing is sent."""
    from tqdm import tqdm

    from fsdp_pretrain.trackers.follow import rebuild

    with tqdm(desc="writing", unit=" records", delay=2, leave=False, disable=None) as bar:
        made, count = rebuild(args.run, args.tracker, lambda done: bar.update(done - bar.n))
    print(f"{made}: {count} records; look at them with `{_LOOK[args.tracker]} {made}`")
    return 0
