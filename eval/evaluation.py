"""One evaluation: the configured tasks on one checkpoint, to `Results`."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from fsdp_pretrain.checkpoint.store import Checkpoint
from fsdp_pretrain.checkpoint.tokenizer import find_tokenizer
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.sections import EvalSection
from fsdp_pretrain.record.files import now

from .attempt import RefusedError, Results
from .checkpoints import read_checkpoint
from .exported import Subject
from .jobs import task_set
from .tasks import BUNDLED, load_tasks, scores, unigram_bits_per_byte


def evaluate(checkpoint: Checkpoint, config: Config, tokenizer_path: Path | None = None) -> Results:
    """Run the configured tasks on a checkpoint.

    Raises:
        UserError: a task, the held-out file, the tokenizer or the checkpoint cannot be used.
    """
    return judge(lambda: _read(checkpoint, config.eval.device, tokenizer_path), config.eval)


def _read(checkpoint: Checkpoint, device: str, tokenizer_path: Path | None) -> Subject:
    model, trained = read_checkpoint(checkpoint, device)
    return Subject(
        model=model,
        tokenizer=find_tokenizer(checkpoint, trained, tokenizer_path),
        length=trained.data.sequence_length,
        objective=trained.data.objective,
        step=checkpoint.step,
        tokens=checkpoint.train_state().tokens,
        path=checkpoint.path,
        sources=[source.path for source in trained.data.sources],
    )


def judge(read: Callable[[], Subject], section: EvalSection) -> Results:
    """Run the tasks of a section on what `read` gives; it is called when the tasks are known to be usable.

    Raises:
        UserError: a task, the held-out file or the subject cannot be used.
    """
    _silence_libraries()
    try:
        import lm_eval
        from lm_eval import evaluator
    except ImportError:
        raise RefusedError("lm-eval is not installed", remedy="in the checkout: pip install -e '.[eval]'") from None
    from .harness import CheckpointLM  # imports lm-eval

    start = time.perf_counter()
    tasks = load_tasks(section.tasks, section.heldout, section.include)
    subject = read()
    tokenizer = subject.tokenizer
    adapter = CheckpointLM(
        subject.model, tokenizer, length=subject.length, batch=section.batch, objective=subject.objective
    )
    found = evaluator.evaluate(adapter, tasks, limit=section.limit, bootstrap_iters=200, log_samples=False)
    results = Results(
        step=subject.step,
        tokens=subject.tokens,
        checkpoint=str(subject.path),
        tasks=task_set(section.tasks),
        scores=scores(found["results"]),
        documents={name: counts["effective"] for name, counts in found["n-samples"].items()},
        higher_is_better=_directions(found["higher_is_better"]),
        versions=found["versions"],
        lm_eval=lm_eval.__version__,
        limit=section.limit,
        seconds=round(time.perf_counter() - start, 1),
        time=now(),
    )
    sources = subject.sources
    known = bool(sources) and all((path / "manifest.json").exists() for path in sources)
    if BUNDLED[0] in section.tasks and section.heldout and known:
        unigrams = unigram_bits_per_byte(list(sources), tokenizer, section.heldout)
        results = results.model_copy(update={"unigram_bits_per_byte": unigrams})
    return results


def _directions(found: dict[str, dict[str, bool | None]]) -> dict[str, dict[str, bool]]:
    known = {task: {name: up for name, up in row.items() if up is not None} for task, row in found.items()}
    return {task: row for task, row in known.items() if row}


def _silence_libraries() -> None:
    """lm-eval and datasets warn about things a user of bundled tasks cannot act on; nothing may access the network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
