"""Tasks made from held-out documents, so that every run can be evaluated without a download.

`heldout_bpb`: bits per byte of the documents, by rolling likelihood. `heldout_choice`: which of four continuations
belongs to a passage; the others are real passages of the same length from other documents; chance is 0.25.
Both are deterministic functions of the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import xxhash

from fsdp_pretrain.config.sections import BUNDLED, EvalSection
from fsdp_pretrain.data.text.inputs import read_texts
from fsdp_pretrain.errors import DataError

from . import sample_files
from .results import RefusedError
from .separators import NAME

_CHOICES, _QUESTIONS_PER_DOCUMENT = 4, 6
_CONTEXT, _CONTINUATION = 600, 120
"""Characters of a passage and of its continuation."""
_FEWSHOT_SEED = 1234
"""Seed for the choice of few-shot examples, lm-eval's default."""


def read_heldout(path: Path) -> list[str]:
    """Texts of a held-out file (JSONL with `text`, parquet, or plain text). Raises RefusedError."""
    if not path.is_file():
        raise RefusedError(f"there is no held-out file {path}", remedy="eval.heldout must name a file of documents")
    try:
        texts = [text for text in read_texts(path) if text.strip()]
    except DataError as error:
        raise RefusedError(error.cause, error.effect, error.remedy) from error
    if not texts:
        raise RefusedError(f"{path} holds no documents")
    return texts


def load_tasks(section: EvalSection) -> dict[str, Any]:
    """lm-eval's task objects for the configured tasks except the probe, groups nested, as its `evaluate` takes them.

    Few-shot examples and options of generating answers are set as by lm-eval's own command line.

    Raises:
        RefusedError: a task or a directory does not exist, a task lacks its documents, or the held-out file cannot be
            used.
    """
    names, include = [name for name in section.tasks if name != NAME], section.include
    if not names:
        return {}
    from lm_eval.tasks import TaskManager

    missing = [str(path) for path in include if not path.is_dir()]
    if missing:
        raise RefusedError(f"there is no directory {', '.join(missing)} to take tasks from (eval.include, --include)")
    others = [name for name in names if name not in BUNDLED]
    files = [name for name in others if "/" in name or name.endswith(".yaml")]
    if files:
        raise RefusedError(
            f"{', '.join(map(repr, files))}: a task is given by its name, not by a file",
            remedy="name the task that the file defines, and its directory: --include DIRECTORY, or eval.include",
        )
    paths = [str(path) for path in include]
    manager = TaskManager(include_path=paths or None, include_defaults=False)
    if any(name not in manager.all_tasks for name in others):
        manager = TaskManager(include_path=paths or None)  # indexes lm-eval's own tasks: takes 10 to 20 seconds
    matching = {name: manager.match_tasks([name]) for name in others}
    unknown = [name for name, matches in matching.items() if not matches]
    if unknown:
        raise RefusedError(
            f"lm-eval has no task {', '.join(map(repr, unknown))}",
            remedy="`lm-eval ls tasks` lists them; eval.include, or --include, adds directories with tasks of your own",
        )
    texts = read_heldout(section.heldout) if section.heldout is not None and len(others) < len(names) else []
    if not texts and len(others) < len(names):
        raise RefusedError(
            "the bundled tasks need held-out documents", remedy="set eval.heldout or pass --heldout FILE"
        )
    makers = {"heldout_bpb": _bits_per_byte, "heldout_choice": _choice}
    chosen = dict.fromkeys(task for name in names for task in matching.get(name, [name]))
    tasks = _build([makers[name](texts) if name in makers else name for name in chosen], manager)
    shots = section.num_fewshot
    for task in _single(tasks):
        if task.OUTPUT_TYPE == "generate_until" and section.gen_kwargs:
            task.set_config("generation_kwargs", dict(section.gen_kwargs), update=True)
        if task.get_config("num_fewshot") is None or (shots is not None and task.get_config("num_fewshot") != 0):
            task.set_config("num_fewshot", shots or 0)  # a task that sets 0 itself is never given any
        task.set_fewshot_seed(_FEWSHOT_SEED)
    return tasks


def _build(specs: Sequence[Any], manager: Any) -> dict[str, Any]:
    """lm-eval's task objects, with their data. Raises RefusedError with the first line of whatever they raise."""
    from lm_eval.tasks import get_task_dict

    try:
        tasks: dict[str, Any] = get_task_dict(specs, manager)
    except Exception as error:  # tasks are programs, and what fetches their data raises anything
        text = (str(error).strip() or "no reason given").splitlines()[0][:300]
        named = ", ".join(spec for spec in specs if isinstance(spec, str))
        raise RefusedError(
            f"lm-eval cannot load {named}: {type(error).__name__}: {text}",
            remedy="if its data is missing, load the task once where there is a network, with the same cache (HF_HOME)",
        ) from None
    return tasks


def _single(tasks: dict[Any, Any]) -> Iterator[Any]:
    """The tasks of all groups."""
    for task in tasks.values():
        if isinstance(task, dict):
            yield from _single(task)
        else:
            yield task


def task_texts(section: EvalSection) -> Iterator[tuple[str, str]]:
    """(task, text) of every document of the configured tasks that are not made from `eval.heldout`.

    A text is all strings of a document, such as its question and its answers, whatever the task makes of them. Raises
    RefusedError as `load_tasks` does.
    """
    names = [name for name in section.tasks if name not in section.bundled_tasks]
    for task in _single(load_tasks(section.model_copy(update={"tasks": names}))):
        for document in task.eval_docs:
            yield task.config.task, "\n".join(_strings(document))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def _task(name: str, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The configuration of a task for lm-eval, which calls `custom_dataset` for the documents."""
    from datasets import Dataset

    return {
        "task": name,
        "custom_dataset": lambda **_: {"validation": Dataset.from_list(rows)},
        "validation_split": "validation",
        "num_fewshot": 0,
        "metadata": {"version": 1.0},
        **more,
    }


def _bits_per_byte(texts: list[str]) -> dict[str, Any]:
    return _task(
        "heldout_bpb",
        [{"text": text} for text in texts],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}],
    )


def _choice(texts: list[str]) -> dict[str, Any]:
    questions = choice_questions(texts)
    if not questions:
        raise RefusedError("the held-out documents are too few or too short for heldout_choice")
    # Some passages are likely after any context: acc_mutual_info subtracts that.
    metrics = ("acc_mutual_info", "acc")
    return _task(
        "heldout_choice",
        questions,
        output_type="multiple_choice",
        doc_to_text="{{context}}",
        doc_to_choice="choices",
        doc_to_target="answer",
        target_delimiter="",
        metric_list=[{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in metrics],
    )


def choice_questions(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Rows {context, choices, answer}: several per document, cut at line ends, evenly spread over it."""
    passages = [_passages(text) for text in texts]
    questions = []
    for document, own in enumerate(passages):
        others = [i for i, passage in enumerate(passages) if passage and i != document]
        if len(others) < _CHOICES - 1:
            continue
        for number, (context, truth) in enumerate(own):
            draw = xxhash.xxh3_64_intdigest(f"{document}/{number}/{truth}".encode())
            choices = []
            for i in range(_CHOICES - 1):
                other = passages[others[(draw + i * (len(others) // (_CHOICES - 1))) % len(others)]]
                choices.append(other[(draw >> 20) % len(other)][1][: len(truth)])
            answer = (draw >> 40) % _CHOICES
            choices.insert(answer, truth)
            if len(set(choices)) == _CHOICES:
                questions.append({"context": context, "choices": choices, "answer": answer})
    return questions


def _passages(text: str) -> list[tuple[str, str]]:
    """(context, continuation) pairs of one document; the continuation starts a line and has the full length."""
    pairs = []
    for k in range(_QUESTIONS_PER_DOCUMENT):
        start = text.find("\n", _CONTEXT + (len(text) - _CONTEXT) * k // _QUESTIONS_PER_DOCUMENT) + 1
        continuation = text[start : start + _CONTINUATION]
        if start and len(continuation) == _CONTINUATION and len(continuation.split()) > 5:
            pairs.append((text[start - _CONTEXT : start], continuation))
    return pairs


def scores(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """`{task: {metric: value, metric_stderr: value}}` of lm-eval's results, numbers only; errors only if finite."""
    table: dict[str, dict[str, float]] = {}
    for task, metrics in results.items():
        for key, value in metrics.items():
            name, _, filter_name = key.partition(",")
            metric = name.removesuffix("_stderr")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and filter_name and (math.isfinite(value) or metric == name):
                full = sample_files.label(metric, filter_name) + name[len(metric) :]
                table.setdefault(task, {})[full] = float(value)
    return table
