"""One evaluation: the configured tasks on one checkpoint, to `Results`."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_pretrain.checkpoint.store import Checkpoint
from fsdp_pretrain.checkpoint.tokenizer import find_tokenizer
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import UserError
from fsdp_pretrain.parallel.mesh import World
from fsdp_pretrain.record.files import now

from .attempt import RefusedError, Results
from .checkpoints import read_checkpoint
from .jobs import task_set
from .ranks import follow, lead
from .tasks import BUNDLED, load_tasks, scores, unigram_bits_per_byte

if TYPE_CHECKING:
    from .harness import CheckpointLM


def evaluate(
    checkpoint: Checkpoint, config: Config, tokenizer_path: Path | None = None, world: World | None = None
) -> Results:
    """Run the configured tasks on a checkpoint.

    Args:
        world: the ranks that do it together: this is rank 0, the others `assist`; None: this process alone.

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
    tasks = lead(
        world, lambda: load_tasks(section.tasks, section.heldout, section.include, length=_longest_input(config))
    )
    adapter, trained = _adapter(checkpoint, config, tokenizer_path, world)
    try:
        found = evaluator.evaluate(adapter, tasks, limit=section.limit, bootstrap_iters=200, log_samples=False)
    except UserError:  # after any other, the other ranks may wait in the middle of a pass; torchrun ends them
        adapter.scorer.close()
        raise
    adapter.scorer.close()
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
        unigrams = unigram_bits_per_byte(sources, adapter.tokenizer, section.heldout)
        results = results.model_copy(update={"unigram_bits_per_byte": unigrams})
    return results


def assist(checkpoint: Checkpoint, config: Config, tokenizer_path: Path | None, world: World) -> None:
    """On ranks other than 0: take part in `evaluate`. Raises UserError, as there."""
    _silence_libraries()
    follow(world)
    _adapter(checkpoint, config, tokenizer_path, world)[0].scorer.serve()


def _adapter(
    checkpoint: Checkpoint, config: Config, tokenizer_path: Path | None, world: World | None
) -> tuple[CheckpointLM, Config]:
    """The checkpoint for lm-eval, and the configuration that it was trained with."""
    from .harness import CheckpointLM  # imports lm-eval

    def build() -> tuple[CheckpointLM, Config]:
        model, trained = read_checkpoint(checkpoint, config.eval.device, world)
        adapter = CheckpointLM(
            model,
            find_tokenizer(checkpoint, trained, tokenizer_path),
            length=trained.data.sequence_length,
            batch=config.eval.batch,
            objective=trained.data.objective,
            bidirectional=config.eval.glm_context == "bidirectional",
            world=world,
        )
        return adapter, trained

    return build() if world is None else world.together(build)


def _longest_input(config: Config) -> int:
    """Tokens of a context and its continuation together, at most."""
    return config.data.sequence_length - (2 if config.data.objective.kind == "glm" else 0)


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
