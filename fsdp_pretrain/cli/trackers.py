"""`fsdp-pretrain aim`, `tensorboard`, `wandb`: the views of a run in trackers, built from its record."""

from __future__ import annotations

import argparse

from fsdp_pretrain.console import verb
from fsdp_pretrain.run.arguments import RUN

_EXAMPLE = "runs/quickstart/run"


@verb("aim", _EXAMPLE, RUN)
def aim(args: argparse.Namespace) -> int:
    """Build, or bring up to date, the Aim run of a record."""
    return _rebuild(args, "aim", "aim up --repo {}")


@verb("tensorboard", _EXAMPLE, RUN)
def tensorboard(args: argparse.Namespace) -> int:
    """Build the TensorBoard directory of a record."""
    return _rebuild(args, "tensorboard", "tensorboard --logdir {}")


@verb("wandb", _EXAMPLE, RUN)
def wandb(args: argparse.Namespace) -> int:
    """Build the offline Weights & Biases run of a record; nothing is sent."""
    return _rebuild(args, "wandb", "wandb sync {}")


def _rebuild(args: argparse.Namespace, name: str, look: str) -> int:
    from tqdm import tqdm

    from fsdp_pretrain.views.trackers.follow import rebuild

    with tqdm(desc="writing", unit=" records", delay=2, leave=False, disable=None) as bar:
        made, count = rebuild(args.run, name, lambda done: bar.update(done - bar.n))
    print(f"{made}: {count} records; look at them with `{look.format(made)}`")
    return 0
