"""The probes by name, and running those that are among the tasks of an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from .attempt import Results
from .checkpoints import EvaluatedModel
from .curves import arithmetic_probe, copy_probe
from .memory import memory_probe
from .probe import Probed, Subject, TokenScorer, limited
from .separators import separator_probe
from .tasks import read_heldout

PROBES: dict[str, Callable[[Subject], Probed]] = {
    each.__name__: each for each in (separator_probe, copy_probe, arithmetic_probe, memory_probe)
}


def run_probes(
    names: Sequence[str],
    model: TokenScorer,
    judged: EvaluatedModel,
    *,
    heldout: Path | None,
    limit: float | None,
) -> dict[str, Probed]:
    """What the named probes find.

    Raises:
        RefusedError: a probe needs held-out documents, and there are none.
        DataError: the held-out file cannot be used.
    """
    texts = read_heldout(heldout) if heldout is not None and names else []
    documents = [ids for ids in judged.tokenizer.encode(texts[: limited(len(texts), limit)]) if ids]
    subject = Subject(model, judged, documents, limit)
    return {name: PROBES[name](subject) for name in names}


def with_probes(results: Results, found: dict[str, Probed]) -> Results:
    """Results with those of the probes."""
    scored = {name: probed for name, probed in found.items() if probed.scores}
    directions = {name: probed.higher_is_better for name, probed in scored.items() if probed.higher_is_better}
    return results.model_copy(
        update={
            "scores": results.scores | {name: probed.scores for name, probed in scored.items()},
            "documents": results.documents | {name: probed.documents for name, probed in scored.items()},
            "intervals": results.intervals
            | {name: probed.intervals for name, probed in scored.items() if probed.intervals},
            "higher_is_better": results.higher_is_better | directions,
            "verdicts": [*results.verdicts, *(probed.verdict for probed in found.values() if probed.verdict)],
        }
    )
