"""Options of torchrun and of the hardware check, for the commands that start them and those that read them."""

from __future__ import annotations

import argparse
import math


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
    options.add_argument(
        "--local-addr", "--local_addr", help="address of this node, if other nodes resolve its host name differently"
    )


def _ranks(text: str) -> str:
    if text not in ("gpu", "cpu", "auto") and not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of ranks nor gpu, cpu or auto")
    return text


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


def add_check_options(parser: argparse.ArgumentParser) -> None:
    """Options of the hardware check, as `fsdp-pretrain doctor` passes them to `fsdp_pretrain.launch.doctor`."""
    parser.add_argument(
        "--slow",
        type=_positive,
        default=1.15,
        help="a matrix product that takes this many times the median is slow (default: 1.15)",
    )
    parser.add_argument("--slow-sum", type=_positive, default=1.5, help="the same for all-reduce sums (default: 1.5)")
    parser.add_argument("--json", action="store_true")
