"""Options of torchrun, for the commands that start it."""

from __future__ import annotations

import argparse


def add_torchrun_options(parser: argparse.ArgumentParser) -> None:
    """The torchrun options that the launcher fills in or reads; all others pass through."""
    options = parser.add_argument_group("torchrun options (any other is passed on as it is)")
    options.add_argument("--nnodes", default="1", help="number of nodes, or MIN:MAX (default: 1)")
    options.add_argument(
        "--nproc-per-node",
        "--nproc_per_node",
        type=_ranks,
        default="gpu",
        help="ranks per node: a number, gpu, cpu or auto (default: gpu)",
    )
    options.add_argument(
        "--rdzv-endpoint", "--rdzv_endpoint", metavar="HOST[:PORT]", help="first node; the same on every node"
    )
    options.add_argument(
        "--rdzv-conf",
        "--rdzv_conf",
        default="",
        metavar="KEY=VALUE,...",
        help="further settings of the rendezvous; is_host=false for a second launcher on the first node",
    )
    options.add_argument("--rdzv-id", "--rdzv_id", help="name of the job (default: the configuration's file name)")


def _ranks(text: str) -> str:
    if text not in ("gpu", "cpu", "auto") and not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of ranks nor gpu, cpu or auto")
    return text
