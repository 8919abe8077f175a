"""Solved examples before the questions of lm-eval's tasks. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .attempt import RefusedError


def set_examples(tasks: Sequence[Any], number: int | None, seed: int) -> None:
    """Set how many examples the tasks show, as lm-eval's command line does, and the seed of their choice.

    A task that sets 0 itself is never given any; one that sets nothing has 0 unless a number is asked for.

    Raises:
        RefusedError: lm-eval would show a task's questions, with their answers, as examples for themselves.
    """
    leaking = []
    for task in tasks:
        own = task.get_config("num_fewshot")
        if own != 0 and number is not None:
            task.set_config("num_fewshot", number)
            leaking += [task.get_config("task")] if number and _draws_on_its_questions(task) else []
        elif own is None:
            task.set_config("num_fewshot", 0)
        task.set_fewshot_seed(seed)
    if leaking:
        raise RefusedError(
            f"no examples can be shown to {', '.join(leaking)}: lm-eval would take them from the questions themselves",
            effect="some prompts would hold the answer",
            remedy="set the task's fewshot_split to other documents, or make the evaluated ones its test_split and its "
            "fewshot_split: then lm-eval leaves the question itself out",
        )


def _draws_on_its_questions(task: Any) -> bool:
    """Whether a question may be its own example; lm-eval leaves it out only if `fewshot_split` is `test_split`."""
    config = task.get_config("fewshot_config")
    test, validation = task.get_config("test_split"), task.get_config("validation_split")
    split = getattr(config, "split", None) or task.get_config("fewshot_split")
    if split is not None:
        return bool(split != test and split == (test or validation))
    if getattr(config, "samples", None) is not None:
        return False
    return bool((task.get_config("training_split") or validation or test) == (test or validation))
