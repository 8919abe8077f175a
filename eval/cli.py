"""`fsdp-eval VERB`: evaluate checkpoints with lm-eval.

A handler imports what it runs, see `fsdp_pretrain.console`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_pretrain.console import JSON, CommandLine, argument, positive, verb
from fsdp_pretrain.errors import CheckpointError, ConfigError, Exit, UserError
from fsdp_pretrain.record import run_id
from fsdp_pretrain.record.arguments import RUN, SEGMENT, check_begun, import_extra
from fsdp_pretrain.record.files import RunDir, now, replace_file

if TYPE_CHECKING:
    from fsdp_pretrain.checkpoint.store import Checkpoint
    from fsdp_pretrain.config.config import Config

    from .attempt import Results

_DEVICE = argument("--device", help="cpu, cuda, ... (default: the run's eval.device)")


def main() -> int:
    command = CommandLine("fsdp-eval", "Evaluation of checkpoints with lm-eval.")
    command.add(_run, _watch, _samples, _report)
    return command.run()


@verb(
    "run",
    "runs/quickstart/run --tasks heldout_bpb,heldout_choice",
    argument("path", type=Path, metavar="RUN_OR_CHECKPOINT", help="run directory, or a step-N directory in it"),
    argument("--step", type=int, help="step of the run's checkpoint to use"),
    argument("--tasks", help="comma-separated task names (default: the run's eval.tasks)"),
    argument("--heldout", type=Path, help="held-out documents for the bundled tasks (default: the run's)"),
    argument(
        "--include",
        type=Path,
        action="append",
        default=[],
        help="directory with lm-eval task files, which are programs; those of the configuration are not used",
    ),
    argument("--limit", type=positive, help="documents per task"),
    _DEVICE,
    argument("--tokenizer", type=Path, help="tokenizer, if the checkpoint was moved out of its run"),
    argument("--out", type=Path, help="write results.json here (default: only print)"),
    JSON,
)
def _run(args: argparse.Namespace) -> int:
    """Evaluate one checkpoint (of a run: the newest) and print the scores."""
    from fsdp_pretrain.checkpoint.store import CONFIG
    from fsdp_pretrain.config.resume_rules import load_compatible

    from .evaluation import evaluate
    from .tasks import BUNDLED, PROBES

    checkpoint = _find(args.path, args.step)
    config = load_compatible(checkpoint.path / CONFIG)
    settings: dict[str, Any] = {"tasks": args.tasks.split(",")} if args.tasks else {}
    settings |= {key: getattr(args, key) for key in ("heldout", "limit", "device") if getattr(args, key) is not None}
    settings["include"] = args.include
    foreign = set(settings.get("tasks", config.eval.tasks)) - {*BUNDLED, *PROBES}
    if config.eval.include and foreign and not args.include:
        folders = " ".join(f"--include {shlex.quote(str(folder))}" for folder in config.eval.include)
        raise ConfigError(
            f"the configuration of {checkpoint.path} names folders of task files: they are not used here",
            effect="task files are programs: the author of the checkpoint would choose what runs here",
            remedy=f"if you trust them, add: {folders}",
        )
    section = config.eval.model_copy(update=settings)
    results = evaluate(checkpoint, config.model_copy(update={"eval": section}), args.tokenizer)
    text = json.dumps(results.model_dump(exclude_unset=True), indent=1, default=str)
    print(text if args.json else table(results))
    _tell(results)
    if args.out:  # last: if it cannot be written, the results were at least printed
        replace_file(args.out, text + "\n")
    return 0


@verb(
    "watch",
    "runs/quickstart/run --once",
    RUN,
    argument("--once", action="store_true", help="stop when nothing is due (for cron and Slurm); else keep watching"),
    argument("--wait", action="store_true", help="with --once: also wait for evaluations of other workers"),
    argument("--interval", type=positive, default=60, help="seconds between checks (default: 60)"),
    _DEVICE,
)
def _watch(args: argparse.Namespace) -> int:
    """Evaluate every due checkpoint of a run exactly once; any number of workers may run."""
    from fsdp_pretrain.config.resume_rules import load_compatible

    from .jobs import due_jobs, watch_once

    run = args.run
    failed_in_all, held = 0, -1
    while True:
        if (known := run_id.read(run.path)) is not None:
            run_id.bind(run.path, known)
        config = load_compatible(run.config)
        if config.eval.every is None:
            raise ConfigError(f"{run.config} schedules no evaluation", remedy="set eval.every, or use `fsdp-eval run`")
        if args.device:
            config = config.model_copy(update={"eval": config.eval.model_copy(update={"device": args.device})})
        evaluated, failed = watch_once(run, config, partial(_told, config=config))
        failed_in_all += failed
        held, before = len(due_jobs(run, config)), held
        if evaluated or failed or held != before:
            print(f"{now()} evaluated {evaluated}, failed {failed}, held by other workers {held}", flush=True)
        if args.once and not (args.wait and held):
            return int(Exit.UNEXPECTED) if failed_in_all else 0
        time.sleep(5.0 if args.once else args.interval)


def _told(checkpoint: Checkpoint, config: Config) -> Results:
    """Evaluate, and tell bad verdicts."""
    from .evaluation import evaluate

    return _tell(evaluate(checkpoint, config))


def _tell(results: Results) -> Results:
    """Bad verdicts on standard error: the watchdog that raises an alarm ends with the training."""
    for verdict in results.verdicts:
        if verdict.ok is False:
            print(f"ALARM: {verdict.probe} of step {results.step}: {verdict.text}", file=sys.stderr, flush=True)
    return results


@verb(
    "samples",
    "runs/quickstart/run --step 260",
    RUN,
    argument("--step", type=positive, required=True, help="optimiser step, from 1"),
    argument("--checkpoint", type=int, help="step of the checkpoint to use (default: newest before --step)"),
    SEGMENT,
    _DEVICE,
    argument("--top", type=positive, default=10, help="samples to show (default: 10)"),
    JSON,
)
def _samples(args: argparse.Namespace) -> int:
    """The loss of every sample of a step, computed again from a checkpoint, highest first, with its documents."""
    samples = import_extra("eval.samples", "losses are computed")
    result = samples.sample_losses(
        args.run, args.step, checkpoint=args.checkpoint, segment=args.segment, device=args.device
    )
    if args.json:
        print(json.dumps(result.model_dump(exclude_unset=True), indent=1))
    else:
        print(samples.render(result, top=args.top))
    return 0


@verb(
    "report",
    "runs/quickstart/run",
    RUN,
    argument("--json", action="store_true", help="one JSON object per result, each on its line"),
)
def _report(args: argparse.Namespace) -> int:
    """All results of a run, oldest first."""
    from fsdp_pretrain.record import state_files

    from .attempt import Results

    found = sorted(args.run.evals.glob("step-*/*/results.json"))
    for path in found:
        try:
            results = state_files.read(path, Results)
        except UserError as error:
            print(f"left out: {error.cause}", file=sys.stderr)
            continue
        if results is not None:
            print(json.dumps(results.model_dump(exclude_unset=True)) if args.json else table(results))
    if not found:
        print("no results yet", file=sys.stderr)
    return 0


def _find(path: Path, step: int | None) -> Checkpoint:
    """The checkpoint that the arguments of `run` name. Raises ConfigError, CheckpointError."""
    from fsdp_pretrain.checkpoint.locations import stores
    from fsdp_pretrain.checkpoint.store import Store, step_of

    named = step_of(path.name)
    if named is not None:
        if step is not None:
            raise ConfigError(f"{path} is one checkpoint already: --step {step} chooses one of a run directory")
        return Store(path.parent).find(named)
    run = RunDir(path)
    check_begun(run)
    found = stores(run)
    checkpoint = found.find(step) if step is not None else found.newest()
    if checkpoint is None:
        raise CheckpointError(f"{found.directory} holds no complete checkpoint")
    return checkpoint


def table(results: Results) -> str:
    """Scores for people."""
    lines = [f"step {results.step:_}, {results.tokens:_} tokens, {results.seconds}s"]
    for task, row in results.scores.items():
        for metric, value in row.items():
            if metric.endswith("_stderr"):
                continue
            error = row.get(f"{metric}_stderr")
            spread = f" ± {error:.4f}" if error is not None else ""
            documents = results.documents.get(task, "?")
            lines.append(f"  {task:24} {metric:16} {value:.4f}{spread}  ({documents} documents)")
    if results.unigram_bits_per_byte is not None:
        lines.append(f"  {'(unigram model)':24} {'bits_per_byte':16} {results.unigram_bits_per_byte:.4f}")
    words = {True: "ok", False: "ALARM", None: "undecided"}
    lines += [f"  {verdict.probe:24} {words[verdict.ok]}: {verdict.text}" for verdict in results.verdicts]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
