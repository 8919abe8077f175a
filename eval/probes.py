"""The probes by name, and running those that are among the tasks of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from data.text.tokenizer import Tokenizer
from fsdp_pretrain.checkpoint.store import Checkpoint
from fsdp_pretrain.config.config import Config

from .attempt import Results
from .curves import arithmetic_probe, copy_probe
from .memory import memory_probe
from .probe import Probed, Scorer, Subject
from .separators import separator_probe
from .tasks import read_heldout

PROBES: dict[str, Callable[[Subject], Probed]] = {
    each.__name__: each for each in (separator_probe, copy_probe, arithmetic_probe, memory_probe)
}


def run_probes(
    names: Sequence[str],
    model: Scorer,
    tokenizer: Tokenizer,
    checkpoint: Checkpoint,
    trained: Config,
    *,
    heldout: Path | None,
    limit: int | None,
) -> dict[str, Probed]:
    """What the named probes find.

    Args:
        trained: the configuration that the checkpoint was trained with.

    Raises:
        RefusedError: a probe needs held-out documents, and there are none.
        DataError: the held-out file cannot be used.
    """
    texts = read_heldout(heldout)[:limit] if heldout is not None else []
    documents = [ids for ids in tokenizer.encode(texts) if ids]
    subject = Subject(model, tokenizer, checkpoint, trained, checkpoint.train_state().tokens, documents, limit)
    return {name: PROBES[name](subject) for name in names}


def with_probes(results: Results, found: dict[str, Probed]) -> Results:
    """Results with those of the probes."""
    scored = {name: probed for name, probed in found.items() if probed.scores}
    directions = {name: probed.higher_is_better for name, probed in scored.items() if probed.higher_is_better}
    return results.model_copy(
        update={
            "scores": results.scores | {name: probed.scores for name, probed in scored.items()},
            "documents": results.documents | {name: probed.documents for name, probed in scored.items()},
            "higher_is_better": results.higher_is_better | directions,
            "verdicts": [*results.verdicts, *(probed.verdict for probed in found.values() if probed.verdict)],
        }
    )
