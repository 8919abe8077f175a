"""`fsdp-eval VERB`: evaluate checkpoints with lm-eval.

A handler imports what it runs, see `fsdp_pretrain.console`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fsdp_pretrain.console import CODE, JSON, CommandLine, argument, as_json, positive, verb
from fsdp_pretrain.errors import ConfigError, Exit, UserError
from fsdp_pretrain.processes import run_rank
from fsdp_pretrain.run import run_id
from fsdp_pretrain.run.arguments import RUN, SEGMENT, import_extra
from fsdp_pretrain.run.files import RunDir, make_directory, now, replace_file
from fsdp_pretrain.units import counted

if TYPE_CHECKING:
    from fsdp_pretrain.config.config import Config
    from fsdp_pretrain.config.sections import EvalSection

    from .checkpoints import EvaluatedModel
    from .results import Results

_ASK_SECONDS = 5.0
"""Seconds between two checks for due evaluations, with `watch --once`."""
_DEVICE = argument("--device", help="cpu, cuda, ... (default: the run's eval.device)")


def names(text: str) -> list[str]:
    """Argument type of comma-separated names. Raises ArgumentTypeError."""
    given = [name.strip() for name in text.split(",") if name.strip()]
    if not given:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return given


def main() -> NoReturn:
    command = CommandLine("fsdp-eval", "Evaluation of checkpoints with lm-eval.")
    command.add(_run, _watch, _retry, _samples, _report, _compare, _texts)
    run_rank(command.run)


@verb(
    "run",
    "runs/quickstart/run --tasks heldout_bpb,heldout_choice --limit 20 --out results.json eval.batch=4",
    argument(
        "path",
        type=Path,
        metavar="RUN_OR_CHECKPOINT",
        help="run directory, a step-N directory in it, or an exported folder",
    ),
    argument("--step", type=int, help="step of the run's checkpoint to use"),
    argument("--tasks", type=names, metavar="NAMES", help="comma-separated task names (default: the run's eval.tasks)"),
    argument("--heldout", help="held-out documents for the bundled tasks (default: the run's)"),
    argument(
        "--include",
        action="append",
        default=[],
        metavar="DIR",
        help="directory with lm-eval task files, which are programs; those of the configuration are not used",
    ),
    argument("--limit", metavar="N", help="documents per task, or the share of them if below 1"),
    _DEVICE,
    argument(
        "--out", type=Path, metavar="FILE", help="write results here, and the samples beside (default: only print)"
    ),
    argument("overrides", nargs="*", metavar="key=value", help="replace keys of [eval], such as eval.num_fewshot=5"),
    CODE,
    JSON,
)
def _run(args: argparse.Namespace) -> int:
    """Evaluate one checkpoint, of a run the newest, and print the scores."""
    from .evaluation import assist, evaluate
    from .ranks import join, together

    with join() as world:
        evaluated, section = together(world, lambda: _choose(args))
        if world is not None and not world.is_main:
            assist(evaluated, section, world)
            return 0
        results = evaluate(evaluated, section, world=world, out=args.out)
    text = results.to_json()
    print(text if args.json else table(results))
    results.tell_alarms()
    if args.out:  # last: if it cannot be written, the results were at least printed
        replace_file(args.out, text + "\n")
    return 0


def _choose(args: argparse.Namespace) -> tuple[EvaluatedModel, EvalSection]:
    """The model that `run` evaluates, and the configuration of the evaluation. Raises UserError."""
    from fsdp_pretrain.config.config import replace_in
    from fsdp_pretrain.config.sections import BUNDLED

    from .exported import open_model
    from .separators import NAME

    if args.out:
        make_directory(args.out.parent)
    evaluated = open_model(args.path, args.step)
    before = _configured(evaluated)
    given = {key: getattr(args, key) for key in ("tasks", "heldout", "device")}
    settings = {"include": args.include, **{key: value for key, value in given.items() if value is not None}}
    limit = [] if args.limit is None else [f"eval.limit={args.limit}"]
    section = replace_in(before, "eval", settings, [*limit, *args.overrides], evaluated.path)
    if section.log_samples and not args.out and not before.log_samples:
        raise ConfigError("eval.log_samples needs --out FILE: samples are kept beside the results")
    if before.include and set(section.tasks) - {*BUNDLED, NAME} and not section.include:
        folders = " ".join(f"--include {shlex.quote(str(folder))}" for folder in before.include)
        raise ConfigError(
            f"the configuration of {evaluated.path} names folders of task files: they are not used here",
            effect="task files are programs: the author of the checkpoint would choose what runs here",
            remedy=f"if you trust them, add: {folders}",
        )
    return evaluated, section


def _configured(evaluated: EvaluatedModel) -> EvalSection:
    """The `[eval]` of the run that a checkpoint is in, which may have changed since it was saved; else the recorded
    one, or the default."""
    from fsdp_pretrain.config.resume_rules import load_recorded
    from fsdp_pretrain.config.sections import EvalSection

    if evaluated.trained is None:
        return EvalSection()
    run = RunDir(evaluated.path.parent.parent)
    return (load_recorded(run.config, own=False) if run.config.exists() else evaluated.trained).eval


@verb(
    "watch",
    "runs/quickstart/run --once",
    RUN,
    argument("--once", action="store_true", help="stop when nothing is due (for cron and Slurm); else keep watching"),
    argument(
        "--wait",
        action="store_true",
        help="with --once: also wait for evaluations of other workers, and out pauses after failed attempts",
    ),
    argument("--interval", type=positive, default=60, help="seconds between checks (default: 60)"),
)
def _watch(args: argparse.Namespace) -> int:
    """Evaluate every due checkpoint of a run exactly once; any number of workers may run."""
    from fsdp_pretrain.checkpoint.evaluations import due_jobs, given_up_jobs

    from .attempt import evaluate_job
    from .jobs import drop_dead_claims, unannounced, watch_once

    run, failed_in_all, state = args.run, 0, ""
    while True:
        if (identifier := run_id.read(run.path)) is not None:
            run_id.bind(run.path, identifier)
        config = _scheduled(run)
        evaluated, failed = watch_once(run, config, lambda work: evaluate_job(run, work))
        failed_in_all += failed
        due = due_jobs(run, config)
        pausing = sum(job.pause > 0 for job in due)
        held, given_up = len(due) + len(unannounced(run)) - pausing, len(given_up_jobs(run, config))
        steps = ", ".join(str(job.checkpoint.step) for job in due if not job.pause)
        waits = [
            f"other workers evaluate step {steps}" if steps else "",
            "another worker publishes its results" if held and not steps else "",
            f"{pausing} paused after a failure" if pausing else "",
            f"{given_up} given up (see fsdp-eval retry)" if given_up else "",
        ]
        before, state = state, ", ".join(filter(None, waits)) or "nothing is due now"
        if evaluated or failed or state != before:
            did = [
                f"evaluated {counted(evaluated, 'checkpoint')}" if evaluated else "",
                f"{failed} failed" if failed else "",
            ]
            print(now()[11:19], "; ".join(filter(None, [*did, state])), flush=True)
        if args.once and not (args.wait and held + pausing) and not drop_dead_claims(run):
            return int(Exit.UNEXPECTED) if failed_in_all else 0
        shortest = min((job.pause for job in due if job.pause), default=_ASK_SECONDS)
        time.sleep(min(shortest, _ASK_SECONDS if args.once else args.interval))


def _scheduled(run: RunDir) -> Config:
    """The configuration of a run with scheduled evaluations. Raises ConfigError."""
    from fsdp_pretrain.config.resume_rules import load_recorded

    config = load_recorded(run.config)
    if config.eval.every is None:
        raise ConfigError(f"{run.config} schedules no evaluation", remedy="set eval.every, or use `fsdp-eval run`")
    return config


@verb(
    "retry",
    "runs/quickstart/run",
    RUN,
    argument("step", nargs="?", type=positive, metavar="STEP", help="of the checkpoint (default: all given up)"),
)
def _retry(args: argparse.Namespace) -> int:
    """Forget the failed attempts of evaluations that were given up: a running worker tries them again, at once."""
    from fsdp_pretrain.checkpoint.evaluations import without_results
    from fsdp_pretrain.run.journal import add, who

    run = args.run
    unfinished = without_results(run, _scheduled(run))
    if args.step is None:
        chosen = [job for job in unfinished if job.given_up]
    else:
        chosen = [job for job in unfinished if job.checkpoint.step == args.step and job.failures]
        if not chosen:
            raise ConfigError(
                f"no evaluation of step {args.step} has failed",
                remedy=f"`fsdp-pretrain status {run.path}` names those that have",
            )
    for job in chosen:
        step, count = job.checkpoint.step, len(job.failures)
        job.forget_failures()
        text = f"will be evaluated again; {counted(count, 'failed attempt')} forgotten"
        add(run, "eval-retry", text, step=step, by=who())
        print(f"step {step}: {text}")
    print(f"if no worker runs: fsdp-eval watch {run.path} --once" if chosen else "no evaluation was given up")
    return 0


@verb(
    "samples",
    "runs/quickstart/run --step 260",
    RUN,
    argument("--step", type=positive, required=True, help="optimiser step, from 1"),
    argument("--checkpoint", type=int, help="step of the checkpoint to use (default: newest before --step)"),
    SEGMENT,
    _DEVICE,
    argument("--top", type=positive, default=10, help="samples to show (default: 10)"),
    CODE,
    JSON,
)
def _samples(args: argparse.Namespace) -> int:
    """The loss of every sample of a step, computed again from a checkpoint, highest first, with its documents."""
    samples = import_extra("fsdp_pretrain.eval.samples", "losses are computed")
    result = samples.sample_losses(
        args.run, args.step, checkpoint=args.checkpoint, segment=args.segment, device=args.device
    )
    if args.json:
        print(as_json(result.model_dump(exclude_unset=True)))
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
    from fsdp_pretrain.checkpoint.evaluations import failed_evaluations
    from fsdp_pretrain.config.resume_rules import load_recorded
    from fsdp_pretrain.run import state_files

    from .results import Results

    paths = sorted(args.run.evals.glob("step-*/*/results.json"))
    for path in paths:
        try:
            results = state_files.read(path, Results)
        except UserError as error:
            print(f"left out: {error.cause}", file=sys.stderr)
            continue
        if results is not None:
            print(as_json(results.model_dump(exclude_unset=True), indent=None) if args.json else table(results))
    if not paths:
        print("no results yet", file=sys.stderr)
    if args.run.config.exists():
        for text, _ in failed_evaluations(args.run, load_recorded(args.run.config)):
            print(text, file=sys.stderr if args.json else sys.stdout)
    return 0


@verb(
    "compare",
    "runs/quickstart/run/evals/step-00000150 runs/quickstart/run/evals/step-00000300",
    argument("a", type=Path, metavar="A", help="results.json, or a directory of results, such as RUN/evals/step-N"),
    argument("b", type=Path, metavar="B", help="the same of the other evaluation"),
    argument("--tasks", type=names, metavar="NAMES", help="comma-separated task names (default: all that both have)"),
    JSON,
)
def _compare(args: argparse.Namespace) -> int:
    """Compare two evaluations document by document: what B gains over A, and how sure that is."""
    from . import compare

    comparison = compare.compare(compare.read_side(args.a), compare.read_side(args.b), tasks=args.tasks)
    print(as_json(comparison.model_dump()) if args.json else compare.render(comparison))
    return 0


@verb(
    "texts",
    "configs/runs/quickstart.toml --out runs/quickstart/tasks.jsonl",
    argument("config", type=Path, metavar="CONFIG", help="run configuration"),
    argument("--out", type=Path, required=True, metavar="FILE", help="JSONL file to write"),
)
def _texts(args: argparse.Namespace) -> int:
    """Write the documents of a run's lm-eval tasks, for `fsdp-data validate --protect`. The bundled tasks have none of
    their own."""
    from fsdp_pretrain.config.config import load

    evaluation = import_extra("fsdp_pretrain.eval.evaluation", "tasks are loaded")
    texts = evaluation.texts_of_tasks(load(args.config).eval)
    lines = [json.dumps({"text": text, "task": task}) + "\n" for task, text in texts]
    make_directory(args.out.parent)
    replace_file(args.out, "".join(lines))
    print(f"{args.out}: {counted(len(lines), 'document')}")
    return 0


def table(results: Results) -> str:
    """Scores for people: value ± standard error, documents, few-shot examples."""
    lines = [f"step {results.step:_}, {results.tokens:_} tokens, {results.seconds}s"]
    for task, metric, value, stderr in results.metrics():
        spread = "" if stderr is None else f" ± {stderr:.4f}"
        counted = f"{results.documents.get(task, '?')} documents"
        shown = f"{counted}, {results.num_fewshot[task]}-shot" if task in results.num_fewshot else counted
        lines.append(f"  {task:24} {metric:16} {value:.4f}{spread}  ({shown})")
    words = {True: "ok", False: "ALARM", None: "undecided"}
    lines += [f"  {verdict.probe:24} {words[verdict.ok]}: {verdict.text}" for verdict in results.verdicts]
    for prompt, text in results.texts.items():
        lines += ["  | " + line for line in f"{prompt}{text}".splitlines()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
