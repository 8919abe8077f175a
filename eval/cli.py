"""`fsdp-eval VERB`: judge checkpoints with lm-eval."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from fsdp_pretrain.arguments import add_run, check_begun
from fsdp_pretrain.changes import load_compatible
from fsdp_pretrain.checkpoint.store import CONFIG, Checkpoint, Store, step_of
from fsdp_pretrain.checkpoint.stores import stores
from fsdp_pretrain.checkpoint.tokenizer import find_tokenizer
from fsdp_pretrain.config import Config
from fsdp_pretrain.console import Command, positive
from fsdp_pretrain.errors import CheckpointError, ConfigError, Exit, UserError
from fsdp_pretrain.record import run_id, state_files
from fsdp_pretrain.record.files import RunDir, now, replace_file

from .attempt import RefusedError, Results
from .jobs import due_jobs, task_set, watch_once
from .tasks import BUNDLED


def main() -> int:
    """Entry point of the console script."""
    command = Command("fsdp-eval", "Evaluation of checkpoints with lm-eval.")
    parser = command.verb(
        "run",
        _run,
        "Evaluate one checkpoint (of a run: the newest) and print the scores.",
        "fsdp-eval run runs/quickstart/run --tasks heldout_bpb,heldout_choice",
    )
    parser.add_argument(
        "path", type=Path, metavar="RUN_OR_CHECKPOINT", help="run directory, or a step-N directory in it"
    )
    parser.add_argument("--step", type=int, help="step of the run's checkpoint to use")
    parser.add_argument("--tasks", help="comma-separated task names (default: the run's eval.tasks)")
    parser.add_argument("--heldout", type=Path, help="held-out documents for the bundled tasks (default: the run's)")
    parser.add_argument(
        "--include",
        type=Path,
        action="append",
        default=[],
        help="directory with lm-eval task files, which are programs; those of the configuration are not used",
    )
    parser.add_argument("--limit", type=positive, help="documents per task")
    parser.add_argument("--device", help="cpu, cuda, ... (default: the run's eval.device)")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer, if the checkpoint was moved out of its run")
    parser.add_argument("--out", type=Path, help="write results.json here (default: only print)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser = command.verb(
        "watch",
        _watch,
        "Evaluate every due checkpoint of a run exactly once; any number of workers may run.",
        "fsdp-eval watch runs/quickstart/run --once",
    )
    add_run(parser)
    parser.add_argument(
        "--once",
        action="store_true",
        help="stop when nothing is due (for cron and Slurm); else keep watching",
    )
    parser.add_argument("--wait", action="store_true", help="with --once: also wait for what other workers hold")
    parser.add_argument("--interval", type=positive, default=60, help="seconds between looks (default: 60)")
    parser.add_argument("--device", help="cpu, cuda, ... (default: the run's eval.device)")
    parser = command.verb(
        "samples",
        _samples,
        "The loss of every sample of a step, computed again from a checkpoint, highest first, with its documents.",
        "fsdp-eval samples runs/quickstart/run --step 260",
    )
    add_run(parser)
    parser.add_argument("--step", type=positive, required=True, help="optimiser step, from 1")
    parser.add_argument("--checkpoint", type=int, help="step of the checkpoint to use (default: newest before --step)")
    parser.add_argument("--segment", type=int, help="the start that trained it, to see a step that a resume replaced")
    parser.add_argument("--device", help="cpu, cuda, ... (default: the run's eval.device)")
    parser.add_argument("--top", type=positive, default=10, help="samples to show (default: 10)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser = command.verb(
        "report", _report, "All results of a run, oldest first.", "fsdp-eval report runs/quickstart/run"
    )
    add_run(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object per result, each on its line")
    return command.run()


def _run(args: argparse.Namespace) -> int:
    checkpoint = _find(args.path, args.step)
    config = load_compatible(checkpoint.path / CONFIG)
    settings: dict[str, Any] = {"tasks": args.tasks.split(",")} if args.tasks else {}
    settings |= {key: getattr(args, key) for key in ("heldout", "limit", "device") if getattr(args, key) is not None}
    settings["include"] = args.include
    foreign = set(settings.get("tasks", config.eval.tasks)) - set(BUNDLED)
    if config.eval.include and foreign and not args.include:
        folders = " ".join(f"--include {shlex.quote(str(folder))}" for folder in config.eval.include)
        raise ConfigError(
            f"the configuration of {checkpoint.path} names folders of task files: they are not used here",
            effect="task files are programs: who made the checkpoint would choose what runs here",
            remedy=f"if you trust them, add: {folders}",
        )
    section = config.eval.model_copy(update=settings)
    results = evaluate(checkpoint, config.model_copy(update={"eval": section}), args.tokenizer)
    print(json.dumps(results, indent=1, default=str) if args.json else table(results))
    if args.out:  # last: what cannot be written was at least shown
        replace_file(args.out, json.dumps(results, indent=1, default=str) + "\n")
    return 0


def _watch(args: argparse.Namespace) -> int:
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
        evaluated, failed = watch_once(run, config, lambda checkpoint, config=config: evaluate(checkpoint, config))
        failed_in_all += failed
        held, before = len(due_jobs(run, config)), held
        if evaluated or failed or held != before:
            print(f"{now()} evaluated {evaluated}, failed {failed}, held by other workers {held}", flush=True)
        if args.once and not (args.wait and held):
            return int(Exit.UNEXPECTED) if failed_in_all else 0
        time.sleep(5.0 if args.once else args.interval)


def _samples(args: argparse.Namespace) -> int:
    from . import samples

    result = samples.sample_losses(
        args.run, args.step, checkpoint=args.checkpoint, segment=args.segment, device=args.device
    )
    print(json.dumps(result, indent=1) if args.json else samples.render(result, top=args.top))
    return 0


def _report(args: argparse.Namespace) -> int:
    found = sorted(args.run.evals.glob("step-*/*/results.json"))
    for path in found:
        try:
            results = state_files.read(path, Results)
        except UserError as error:
            print(f"left out: {error.cause}", file=sys.stderr)
            continue
        if results is not None:
            content = results.model_dump(exclude_unset=True)
            print(json.dumps(content) if args.json else table(content))
    if not found:
        print("no results yet", file=sys.stderr)
    return 0


def _find(path: Path, step: int | None) -> Checkpoint:
    """The checkpoint that the arguments of `run` name. Raises ConfigError, CheckpointError."""
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
        raise CheckpointError(f"{found.directory} holds no checkpoint that looks whole")
    return checkpoint


def evaluate(checkpoint: Checkpoint, config: Config, tokenizer_path: Path | None = None) -> dict[str, Any]:
    """Run the configured tasks on a checkpoint; the contents of a `results.json`.

    Raises:
        UserError: a task, the held-out file, the tokenizer or the checkpoint cannot be used.
    """
    _be_quiet()
    try:
        import lm_eval
        from lm_eval import evaluator
    except ImportError:
        raise RefusedError("lm-eval is not installed", remedy="in the checkout: pip install -e '.[eval]'") from None
    from .checkpoints import read_checkpoint
    from .harness import CheckpointLM
    from .tasks import load_tasks, scores, unigram_bits_per_byte

    start = time.perf_counter()
    section = config.eval
    tasks = load_tasks(section.tasks, section.heldout, section.include)
    model, trained = read_checkpoint(checkpoint, section.device)
    tokenizer = find_tokenizer(checkpoint, trained, tokenizer_path)
    data = trained.data
    adapter = CheckpointLM(model, tokenizer, length=data.sequence_length, batch=section.batch, objective=data.objective)
    found = evaluator.evaluate(adapter, tasks, limit=section.limit, bootstrap_iters=200, log_samples=False)
    results = {
        "step": checkpoint.step,
        "tokens": checkpoint.train_state().tokens,
        "checkpoint": str(checkpoint.path),
        "tasks": task_set(section.tasks),
        "scores": scores(found["results"]),
        "documents": {name: counts["effective"] for name, counts in found["n-samples"].items()},
        "versions": found["versions"],
        "lm_eval": lm_eval.__version__,
        "limit": section.limit,
        "seconds": round(time.perf_counter() - start, 1),
        "time": now(),
    }
    sources = [source.path for source in trained.data.sources]
    if BUNDLED[0] in section.tasks and section.heldout and all((path / "manifest.json").exists() for path in sources):
        results["unigram_bits_per_byte"] = unigram_bits_per_byte(sources, tokenizer, section.heldout)
    return results


def _be_quiet() -> None:
    """lm-eval and datasets warn about things a user of bundled tasks cannot act on; nothing may look for a network."""
    import logging
    import os
    import warnings

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


def table(results: dict[str, Any]) -> str:
    """Scores for people."""
    lines = [f"step {results['step']:_}, {results['tokens']:_} tokens, {results['seconds']}s"]
    for task, row in results["scores"].items():
        for metric, value in row.items():
            if metric.endswith("_stderr"):
                continue
            error = row.get(f"{metric}_stderr")
            spread = f" ± {error:.4f}" if error is not None else ""
            lines.append(
                f"  {task:24} {metric:16} {value:.4f}{spread}  ({results['documents'].get(task, '?')} documents)"
            )
    if "unigram_bits_per_byte" in results:
        lines.append(f"  {'(unigram model)':24} {'bits_per_byte':16} {results['unigram_bits_per_byte']:.4f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
