"""`fsdp-pretrain finished`: for scripts that start a run again and again."""

from __future__ import annotations

import argparse

from fsdp_pretrain.console import argument, verb


@verb(
    "finished",
    "configs/runs/quickstart.toml",
    argument("config", help="TOML file"),
    argument("overrides", nargs="*", metavar="key=value", help="replace values of the file"),
)
def finished(args: argparse.Namespace) -> int:
    """Whether the run of a configuration is complete, so that starting it would change nothing. Exit 0 yes, 1 no."""
    from fsdp_pretrain.checkpoint.finished import left_to_do
    from fsdp_pretrain.record.overrides import load_run

    config, _ = load_run(args.config, args.overrides)
    left = left_to_do(config)
    print(
        f"{config.run.dir}: {left or 'complete, with this configuration and these corpora: nothing is left to train'}"
    )
    return int(bool(left))
