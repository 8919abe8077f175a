"""`fsdp-pretrain where`, `replay` and `profile`: examine chosen steps of a run."""

from __future__ import annotations

import argparse

from fsdp_pretrain.console import argument, as_json, positive, step_number, verb
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.run.arguments import RUN, SEGMENT, import_extra

from .control import running_job, send_request
from .launch import torchrun_options


@verb(
    "where",
    "runs/quickstart/run --step 120 --text",
    RUN,
    argument("--step", type=positive, required=True, help="optimiser step, from 1"),
    SEGMENT,
    argument("--rank", type=int, help="only the samples of this rank"),
    argument("--text", action="store_true", help="show the text of every piece"),
    argument("--ids", action="store_true", help="show the token ids, the last of which is only a label"),
    argument("--json", action="store_true", help="print JSON"),
)
def where(args: argparse.Namespace) -> int:
    """Which documents a step was trained on: samples, shards, documents, token ranges, text. Proves by the recorded
    digest that it is the batch that was trained. Needs the run directory and the corpora, no GPU."""
    from fsdp_pretrain.lineage import provenance

    step = provenance.trained_step(args.run, args.step, args.segment)
    shown = provenance.describe_step(step, rank=args.rank, text=args.text, ids=args.ids)
    print(as_json(shown.model_dump(exclude_unset=True), indent=None) if args.json else provenance.render(shown))
    return 0


@verb(
    "replay",
    "runs/quickstart/run --from 0 --steps 3",
    RUN,
    argument(
        "--from",
        dest="start",
        type=step_number,
        required=True,
        metavar="STEP",
        help="step of a checkpoint; 0: initial values",
    ),
    argument("--steps", type=positive, default=1, metavar="N", help="number of steps (default: 1)"),
    argument("--precision", choices=("bf16", "bf16+fp8", "fp16", "fp32"), help="instead of the run's"),
    SEGMENT,
    torchrun_options("RUN --from STEP [options] [torchrun options]", nproc_per_node=None, rdzv_id="replay"),
)
def replay(args: argparse.Namespace) -> int:
    """Train the samples of recorded steps again, from a checkpoint, beside the run, which is not touched, and compare
    with the record: equal to the bit, as with nothing changed on the same ranks, or does data, settings or numerics
    differ first? Exit 0 if equal, 1 if not. What is not listed here goes to torchrun."""
    from fsdp_pretrain.launch import torchrun
    from fsdp_pretrain.replay.window import ReplayRequest, open_window
    from fsdp_pretrain.run import environment

    request = ReplayRequest(
        run=str(args.run.path),
        start=args.start,
        steps=args.steps,
        segment=args.segment,
        precision=args.precision,
    )
    window = open_window(request)  # refused here, once, and not on every rank
    recorded = environment.view(args.run, window.records[0].segment)
    if args.nproc_per_node is None:
        args.nproc_per_node = str(max(recorded.hosts.values(), default=recorded.world.size if recorded.world else 1))
    if (args.nnodes, args.nproc_per_node) == ("1", "1"):
        if args.passed_on:
            raise ConfigError(
                f"unrecognized arguments: {' '.join(args.passed_on)}", remedy="fsdp-pretrain replay --help"
            )
        return int(import_extra("fsdp_pretrain.replay.main", "a run is replayed").replay(request))
    return torchrun.run_once(
        torchrun.command(args, args.passed_on, "fsdp_pretrain.replay", [request.model_dump_json()])
    )


def _ranks(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks such as 0,8")
    return tuple(sorted(set(map(int, parts))))


@verb(
    "profile",
    "runs/quickstart/run --steps 3 --ranks 0",
    RUN,
    argument("--steps", type=positive, default=3, metavar="N", help="number of steps (default: 3)"),
    argument(
        "--at",
        type=positive,
        default=0,
        metavar="STEP",
        help="the first step (default: the next that all ranks can trace)",
    ),
    argument("--ranks", type=_ranks, default=(0,), metavar="R,R", help="ranks that write a trace (default: 0)"),
)
def profile(args: argparse.Namespace) -> int:
    """Trace steps of the running job with PyTorch's profiler: one file per rank in RUN/profiles, for Perfetto or
    chrome://tracing. All ranks begin at the same step; no number of the run changes."""
    from fsdp_pretrain.run import environment
    from fsdp_pretrain.run.requests import MOST_RANKS, MOST_STEPS

    report = running_job(args.run)
    if args.at and args.at <= (report.status.step or 0):
        raise ConfigError(f"--at {args.at}: the job is at step {report.status.step} already")
    if args.at and report.status.total_steps and args.at > report.status.total_steps:
        raise ConfigError(f"--at {args.at}: the run ends with step {report.status.total_steps}")
    world = environment.view(args.run, int(args.run.segments[-1].name)).world
    ranks = world.size if world is not None else 1
    if args.steps > MOST_STEPS or len(args.ranks) > MOST_RANKS or args.ranks[-1] >= ranks:
        raise ConfigError(
            f"--steps {args.steps} --ranks {','.join(map(str, args.ranks))}: at most {MOST_STEPS} steps, {MOST_RANKS} "
            f"ranks at once, and the job has ranks 0 to {ranks - 1}"
        )
    send_request(args.run, "profile", report, steps=args.steps, at=args.at, ranks=args.ranks)
    print(
        f"asked to trace; the journal says which steps, and when the files are in {args.run.profiles}\n"
        "open them at https://ui.perfetto.dev (they stay in the browser) or in chrome://tracing"
    )
    return 0
