"""One evaluation: the configured tasks on one checkpoint, to `Results`."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_pretrain.checkpoint.store import Checkpoint
from fsdp_pretrain.checkpoint.tokenizer import find_tokenizer
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.sections import EvalSection
from fsdp_pretrain.errors import UserError
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.record.files import now

from . import sample_files
from .attempt import ConfidenceInterval, RefusedError, Results
from .checkpoints import read_checkpoint
from .intervals import estimate
from .jobs import task_set
from .ranks import follow, lead
from .tasks import BUNDLED, load_tasks, scores, unigram_bits_per_byte

if TYPE_CHECKING:
    from .harness import CheckpointLM


def evaluate(
    checkpoint: Checkpoint,
    config: Config,
    tokenizer_path: Path | None = None,
    *,
    world: World | None = None,
    keep: Path | None = None,
) -> Results:
    """Run the configured tasks on a checkpoint.

    Args:
        world: the ranks that do it together: this is rank 0, the others `assist`; None: this process alone.
        keep: directory for sample files.

    Raises:
        UserError: a task, the held-out file, the tokenizer or the checkpoint cannot be used.
    """
    _silence_libraries()
    try:
        import lm_eval
        from lm_eval import evaluator
    except ImportError:
        raise RefusedError("lm-eval is not installed", remedy="in the checkout: pip install -e '.[eval]'") from None
    start = time.perf_counter()
    section = config.eval
    tasks = lead(world, lambda: _load_tasks(config))
    adapter, trained = open_adapter(checkpoint, section, tokenizer_path, world)
    try:
        with redirect_stdout(sys.stderr):  # lm-eval reports a bootstrap there
            found = evaluator.evaluate(adapter, tasks, limit=section.limit, bootstrap_iters=200, log_samples=True)
    except UserError:  # after any other, the other ranks may wait in the middle of a pass; torchrun ends them
        adapter.scorer.close()
        raise
    adapter.scorer.close()
    errors, intervals = _uncertainty(table := scores(found["results"]), found["samples"])
    results = Results(
        step=checkpoint.step,
        tokens=checkpoint.train_state().tokens,
        checkpoint=str(checkpoint.path),
        tasks=task_set(section.tasks),
        scores={task: row | errors.get(task, {}) for task, row in table.items()},
        intervals=intervals,
        documents={name: counts["effective"] for name, counts in found["n-samples"].items()},
        higher_is_better=_directions(found["higher_is_better"]),
        num_fewshot=found["n-shot"],
        gen_kwargs={
            task: settings["generation_kwargs"]
            for task, settings in found["configs"].items()
            if settings.get("output_type") == "generate_until"
        },
        samples=sample_files.write(keep, found["samples"], full=section.log_samples) if keep is not None else {},
        versions=found["versions"],
        lm_eval=lm_eval.__version__,
        limit=section.limit,
        seconds=round(time.perf_counter() - start, 1),
        time=now(),
    )
    sources = [source.path for source in trained.data.sources]
    if BUNDLED[0] in section.tasks and section.heldout and all((path / "manifest.json").exists() for path in sources):
        unigrams = unigram_bits_per_byte(sources, adapter.tokenizer, section.heldout)
        results = results.model_copy(update={"unigram_bits_per_byte": unigrams})
    return results


def assist(checkpoint: Checkpoint, config: Config, tokenizer_path: Path | None, world: World) -> None:
    """On ranks other than 0: take part in `evaluate`. Raises UserError, as there."""
    _silence_libraries()
    follow(world)
    open_adapter(checkpoint, config.eval, tokenizer_path, world)[0].scorer.serve()


def open_adapter(
    checkpoint: Checkpoint, section: EvalSection, tokenizer_path: Path | None = None, world: World | None = None
) -> tuple[CheckpointLM, Config]:
    """A checkpoint's model behind lm-eval's interface, and the configuration that it was trained with.

    Raises:
        UserError: the checkpoint, the device or the tokenizer cannot be used; on all ranks.
    """
    from .harness import CheckpointLM  # imports lm-eval

    def build() -> tuple[CheckpointLM, Config]:
        model, trained = read_checkpoint(checkpoint, section.device, world)
        adapter = CheckpointLM(
            model,
            find_tokenizer(checkpoint, trained, tokenizer_path),
            length=trained.data.sequence_length,
            batch=section.batch,
            objective=trained.data.objective,
            bidirectional=section.glm_context == "bidirectional",
            world=world,
        )
        return adapter, trained

    return build() if world is None else world.together(build)


def _load_tasks(config: Config) -> dict[str, Any]:
    section, data = config.eval, config.data
    return load_tasks(
        section.tasks,
        section.heldout,
        section.include,
        length=data.sequence_length - (2 if data.objective.kind == "glm" else 0),
        num_fewshot=section.num_fewshot,
        gen_kwargs=section.gen_kwargs,
        seed=section.seed,
    )


def _uncertainty(
    table: dict[str, dict[str, float]], samples: dict[str, list[dict[str, Any]]]
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, ConfidenceInterval]]]:
    """Standard errors that lm-eval has no formula for, and intervals, of every score that its samples make up."""
    errors: dict[str, dict[str, float]] = {}
    intervals: dict[str, dict[str, ConfidenceInterval]] = {}
    for task, rows in samples.items():
        for metric, values in sample_files.values(rows).items():
            score = table.get(task, {}).get(metric)
            found = estimate(list(values.values()), score) if score is not None else None
            if found is None:
                continue
            intervals.setdefault(task, {})[metric] = found[1]
            if f"{metric}_stderr" not in table[task]:
                errors.setdefault(task, {})[f"{metric}_stderr"] = found[0]
    return errors, intervals


def _directions(found: dict[str, dict[str, bool | None]]) -> dict[str, dict[str, bool]]:
    known = {task: {name: up for name, up in row.items() if up is not None} for task, row in found.items()}
    return {task: row for task, row in known.items() if row}


def _silence_libraries() -> None:
    """lm-eval and datasets warn about things a user of bundled tasks cannot act on; nothing may access the network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # a bootstrap of 200 draws is one process's work
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
