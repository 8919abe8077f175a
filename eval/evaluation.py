"""One evaluation: the configured tasks on one checkpoint, to `Results`."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from fsdp_pretrain.checkpoint.store import Checkpoint
from fsdp_pretrain.checkpoint.tokenizer import find_tokenizer
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.record.files import now

from .attempt import RefusedError, Results
from .checkpoints import read_checkpoint
from .jobs import task_set
from .probes import run_probes, with_probes
from .tasks import BUNDLED, PROBES, load_tasks, scores, unigram_bits_per_byte


def evaluate(checkpoint: Checkpoint, config: Config, tokenizer_path: Path | None = None) -> Results:
    """Run the configured tasks on a checkpoint.

    Raises:
        UserError: a task, the held-out file, the tokenizer or the checkpoint cannot be used.
    """
    _silence_libraries()
    try:
        import lm_eval
        from lm_eval import evaluator
    except ImportError:
        raise RefusedError("lm-eval is not installed", remedy="in the checkout: pip install -e '.[eval]'") from None
    from .harness import CheckpointLM  # imports lm-eval

    start = time.perf_counter()
    section = config.eval
    probes = [name for name in section.tasks if name in PROBES]
    asked = [name for name in section.tasks if name not in PROBES]
    tasks = load_tasks(asked, section.heldout, section.include) if asked else {}
    model, trained = read_checkpoint(checkpoint, section.device)
    tokenizer = find_tokenizer(checkpoint, trained, tokenizer_path)
    data = trained.data
    adapter = CheckpointLM(model, tokenizer, length=data.sequence_length, batch=section.batch, objective=data.objective)
    found: dict[str, Any] = {"results": {}, "n-samples": {}, "higher_is_better": {}, "versions": {}}
    if tasks:
        found = evaluator.evaluate(adapter, tasks, limit=section.limit, bootstrap_iters=200, log_samples=False)
    probed = run_probes(probes, adapter, tokenizer, checkpoint, trained, heldout=section.heldout, limit=section.limit)
    results = Results(
        step=checkpoint.step,
        tokens=checkpoint.train_state().tokens,
        checkpoint=str(checkpoint.path),
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
    sources = [source.path for source in trained.data.sources]
    if BUNDLED[0] in section.tasks and section.heldout and all((path / "manifest.json").exists() for path in sources):
        unigrams = unigram_bits_per_byte(sources, tokenizer, section.heldout)
        results = results.model_copy(update={"unigram_bits_per_byte": unigrams})
    return with_probes(results, probed)


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
