"""The results of an evaluation, `results.json`, and the errors of an evaluation without results."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.run.state_files import StateFile

MERGE = "merge"
"""Name, like a probe's, of the verdict whether `eval.merge` had checkpoints that it could merge."""


class Verdict(BaseModel):
    """The conclusion of a probe from its scores."""

    model_config = ConfigDict(strict=True, frozen=True)

    probe: str  # name of the probe
    ok: bool | None  # False raises an alarm; None: it cannot be decided yet, or not for this model
    text: str  # one sentence with its numbers


Score = Annotated[
    float,
    BeforeValidator(lambda value: math.nan if value is None else value),
    PlainSerializer(lambda value: value if math.isfinite(value) else None),
]
"""A number; NaN if the model gave none, which JSON writes as null."""


class Results(StateFile):
    """`results.json` of an evaluation.

    Attributes:
        step, tokens, checkpoint: step and trained tokens of the checkpoint, and its path.
        committed: when the checkpoint was committed; None outside a run.
        scores, documents: by task: metrics, and number of documents used.
        tasks, limit: the task set, and maximum documents per task (below 1: the share of them).
        num_fewshot: by task: few-shot examples.
        gen_kwargs: by task that generates: options of generating answers.
        samples: by task: name of the file beside this one with a line per document, see `sample_files`.
        higher_is_better: by task and metric, where known.
        texts: continuations of `eval.prompts`, by prompt.
        verdicts: verdicts of the probes among the tasks.
        versions, lm_eval: versions of the tasks, and of lm-eval.
        seconds, time: duration, and time of completion.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    step: int
    tokens: int
    checkpoint: str = ""
    committed: str | None = None
    tasks: str = ""
    scores: dict[str, dict[str, Score]]
    documents: dict[str, int] = Field(default_factory=dict)
    higher_is_better: dict[str, dict[str, bool]] = Field(default_factory=dict)
    texts: dict[str, str] = Field(default_factory=dict)
    verdicts: list[Verdict] = Field(default_factory=list)
    num_fewshot: dict[str, int] = Field(default_factory=dict)
    gen_kwargs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    samples: dict[str, str] = Field(default_factory=dict)
    versions: dict[str, Any] = Field(default_factory=dict)
    lm_eval: str = ""
    limit: int | float | None = None
    seconds: float
    time: str

    def beside(self, merge: Results) -> Results:
        """These results with those of a merge of checkpoints, whose tasks are named `TASK@merge`."""
        verdict = Verdict(probe=MERGE, ok=True, text="the mean of the last checkpoints was evaluated")
        update: dict[str, Any] = {
            "seconds": self.seconds + merge.seconds,
            "verdicts": [*self.verdicts, verdict],
        }
        for name in ("scores", "documents", "higher_is_better", "num_fewshot"):
            theirs = {f"{task}@merge": value for task, value in getattr(merge, name).items()}
            update[name] = {**getattr(self, name), **theirs}
        return self.model_copy(update=update)

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps(self.model_dump(exclude_unset=True), indent=1, default=str)

    def metrics(self) -> Iterator[tuple[str, str, float, float | None]]:
        """(task, metric, score, standard error) of all scores; None where unknown."""
        for task, row in self.scores.items():
            for metric, value in row.items():
                if not metric.endswith("_stderr"):
                    yield task, metric, value, row.get(f"{metric}_stderr")

    def alarms(self) -> Iterator[tuple[str, str]]:
        """(probe or task, sentence) for each bad verdict and each score that is not a finite number."""
        yield from ((verdict.probe, verdict.text) for verdict in self.verdicts if verdict.ok is False)
        for task, metric, value, *_ in self.metrics():
            if not math.isfinite(value):
                yield task, f"{metric} is no finite number"

    def tell_alarms(self) -> None:
        """Print the alarms on standard error, since the watchdog that would raise them may have ended with training."""
        for subject, text in self.alarms():
            print(f"ALARM: {subject} of step {self.step}: {text}", file=sys.stderr, flush=True)


class EvaluationError(Exception):
    """The evaluation gave no results; the message says why."""


class RefusedError(ConfigError):
    """The tasks cannot be evaluated as configured, or not here, whatever the checkpoint."""
