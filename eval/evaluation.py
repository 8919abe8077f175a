"""One evaluation: runs the configured tasks on one model and returns `Results`."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_pretrain.checkpoint.evaluations import task_set
from fsdp_pretrain.config.sections import BUNDLED, EvalSection
from fsdp_pretrain.errors import UserError, install
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.run.files import now

from . import sample_files
from .checkpoints import EvaluatedModel
from .ranks import follow, lead, together
from .results import RefusedError, Results
from .sampling import prompt_of
from .separators import NAME, Probed, Subject, separator_probe
from .tasks import load_tasks, read_heldout, scores, task_texts
from .uncertainty import as_array, influence, standard_error

if TYPE_CHECKING:
    from .harness import CheckpointLM  # imports lm-eval

_PARTS = ("results", "samples", "n-samples", "higher_is_better", "n-shot", "configs", "versions")
"""The parts of lm-eval's results that are used."""


def evaluate(
    evaluated: EvaluatedModel, section: EvalSection, *, world: World | None = None, out: Path | None = None
) -> Results:
    """Run the configured tasks on a model.

    Args:
        world: the ranks that evaluate together: rank 0 calls this, the others `assist`; None: this process alone.
        out: the file for the results; the sample files are written beside it.

    Raises:
        UserError: a task, the held-out file or the model cannot be used.
    """
    if not section.tasks:
        raise RefusedError("eval.tasks names no task")
    _prepare_libraries(section)
    import lm_eval
    from lm_eval import evaluator

    start = time.perf_counter()
    tasks = lead(world, lambda: load_tasks(section))
    with _open(evaluated, section, world) as adapter:
        output: dict[str, Any] = {part: {} for part in _PARTS}
        if tasks:
            with redirect_stdout(sys.stderr):  # lm-eval reports a bootstrap there
                output = evaluator.evaluate(adapter, tasks, limit=section.limit, bootstrap_iters=200, log_samples=True)
        written = adapter.scorer.answers([prompt_of(evaluated, text) for text in section.prompts], quiet=True)
        probed = {NAME: _probe(adapter, evaluated, section)} if NAME in section.tasks else {}
    table = scores(output["results"])
    errors = _standard_errors(table, output["samples"])
    return Results(
        step=evaluated.step,
        tokens=evaluated.tokens,
        checkpoint=str(evaluated.path),
        tasks=task_set(section.tasks),
        scores={task: row | errors.get(task, {}) for task, row in table.items()}
        | {name: probe.scores for name, probe in probed.items()},
        documents={name: counts["effective"] for name, counts in output["n-samples"].items()}
        | {name: probe.documents for name, probe in probed.items()},
        texts=dict(zip(section.prompts, written, strict=True)),
        verdicts=[probe.verdict for probe in probed.values()],
        higher_is_better=_directions(output["higher_is_better"]),
        num_fewshot=output["n-shot"],
        gen_kwargs={
            task: settings["generation_kwargs"]
            for task, settings in output["configs"].items()
            if settings.get("output_type") == "generate_until"
        },
        samples=sample_files.write(out, output["samples"], full=section.log_samples) if out is not None else {},
        versions=output["versions"],
        lm_eval=lm_eval.__version__,
        limit=section.limit,
        seconds=round(time.perf_counter() - start, 3),
        time=now(),
    )


def texts_of_tasks(section: EvalSection) -> list[tuple[str, str]]:
    """(task, text) of every document of the configured tasks, see `task_texts`. Raises RefusedError."""
    if not {*section.tasks} - {*section.bundled_tasks}:
        return []
    _prepare_libraries(section)
    with redirect_stdout(sys.stderr):
        return list(task_texts(section))


@contextmanager
def _open(evaluated: EvaluatedModel, section: EvalSection, world: World | None) -> Iterator[CheckpointLM]:
    """An open adapter for the block; afterwards the other ranks are released."""
    adapter = open_adapter(evaluated, section, world)
    try:
        yield adapter
    except UserError:  # after any other, the other ranks may wait in the middle of a pass; torchrun ends them
        adapter.scorer.close()
        raise
    adapter.scorer.close()


def _probe(adapter: CheckpointLM, evaluated: EvaluatedModel, section: EvalSection) -> Probed:
    """Run the separator probe. Raises RefusedError."""
    texts = read_heldout(section.heldout) if section.heldout is not None else []
    if section.limit is not None:
        texts = texts[: max(1, ceil(len(texts) * section.limit)) if section.limit < 1 else int(section.limit)]
    return separator_probe(Subject(adapter, evaluated, [ids for ids in evaluated.tokenizer.encode(texts) if ids]))


def assist(evaluated: EvaluatedModel, section: EvalSection, world: World) -> None:
    """On ranks other than 0: take part in `evaluate`. Raises UserError, as `evaluate` does."""
    _silence_libraries()
    follow(world)
    open_adapter(evaluated, section, world).scorer.serve()


def open_adapter(evaluated: EvaluatedModel, section: EvalSection, world: World | None = None) -> CheckpointLM:
    """Read a model and put it behind lm-eval's interface. Raises UserError, on all ranks, if it cannot be used."""
    from .harness import CheckpointLM

    def build() -> CheckpointLM:
        return CheckpointLM(
            evaluated.read(section.device, world),
            evaluated.tokenizer,
            length=evaluated.length,
            batch=section.batch,
            objective=evaluated.objective,
            world=world,
        )

    return together(world, build)


def _standard_errors(
    table: dict[str, dict[str, float]], samples: dict[str, list[dict[str, Any]]]
) -> dict[str, dict[str, float]]:
    """Standard errors that lm-eval has no formula for, where they can be computed from a task's samples."""
    errors: dict[str, dict[str, float]] = {}
    for task, rows in samples.items():
        values = sample_files.values(rows)
        for metric, score in table.get(task, {}).items():
            x = as_array([*values.get(metric, {}).values()], score)
            error = None if x is None else standard_error(influence(x))
            if error is not None and f"{metric}_stderr" not in table[task]:
                errors.setdefault(task, {})[f"{metric}_stderr"] = error
    return errors


def _directions(given: dict[str, dict[str, bool | None]]) -> dict[str, dict[str, bool]]:
    """By task and metric, whether a higher score is better, where known."""
    known = {task: {name: up for name, up in row.items() if up is not None} for task, row in given.items()}
    return {task: row for task, row in known.items() if row}


def _prepare_libraries(section: EvalSection) -> None:
    """Import lm-eval. Raises RefusedError if it is not installed."""
    _silence_libraries()
    if section.offline or not {*section.tasks} - {*BUNDLED, NAME}:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read when lm-eval is imported
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise RefusedError("lm-eval is not installed", remedy=install("eval")) from None


def _silence_libraries() -> None:
    """Silence lm-eval and datasets, which warn about things that a user of the bundled tasks cannot act on."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
