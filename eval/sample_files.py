"""Per-sample outputs: a JSONL file per task beside `results.json`, with a line per document.

A line holds `doc_id`, `doc_hash`, `filter` and the document's value of every metric: a number, or for ratios such as
bits per byte (log-likelihood, bytes). With `eval.log_samples` it is lm-eval's whole sample: document, prompts and
responses. A file counts only if `results.json` names it. Each attempt has its own folder for them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp_pretrain.errors import DataError, raising
from fsdp_pretrain.run.files import json_object, replace_file

_HASH = 16
"""Hexadecimal digits of a document's hash."""
_KEYS = ("doc_id", "doc_hash", "filter")
Value = float | tuple[float, float]
"""Value of a metric for one document: a number, or numerator and denominator of a ratio."""
Document = tuple[str, int]
"""A document of a task: its hash, and the number of documents with the same hash before it."""


def write(out: Path, samples: Mapping[str, Sequence[Mapping[str, Any]]], *, full: bool) -> dict[str, str]:
    """Write lm-eval's samples of every task beside the results file `out`. Returns the names of the files by task.
    Raises OSError."""
    names = {}
    for task, rows in samples.items():
        names[task] = f"samples_{out.stem}_{re.sub(r'[^A-Za-z0-9_.+-]+', '_', task)}.jsonl"
        lines = (json.dumps(row if full else _brief(row), default=_plain) for row in rows)
        replace_file(out.with_name(names[task]), "".join(f"{line}\n" for line in lines))
    return names


def _plain(value: Any) -> Any:
    return value.item() if getattr(value, "size", 0) == 1 else str(value)


def _brief(row: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: value for name in row["metrics"] if (value := _value(row.get(name))) is not None}
    return {"doc_id": row["doc_id"], "doc_hash": row["doc_hash"][:_HASH], "filter": row["filter"], **values}


def _value(raw: Any) -> Value | None:
    """A metric's value; None if it is neither a number nor a pair of numbers."""
    if isinstance(raw, tuple | list) and len(raw) == 2:
        first, second = (_value(part) for part in raw)
        return (first, second) if isinstance(first, float) and isinstance(second, float) else None
    try:
        return float(raw) if hasattr(raw, "__float__") else None
    except (TypeError, ValueError):
        return None


def values(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[Document, Value]]:
    """Values by metric (named as in `Results.scores`) and document, from lm-eval's samples or the lines of a file."""
    table: dict[str, dict[Document, Value]] = {}
    seen: Counter[tuple[str, str]] = Counter()
    for row in rows:
        digest, filtered = str(row["doc_hash"])[:_HASH], str(row["filter"])
        document = digest, seen[digest, filtered]
        seen[digest, filtered] += 1
        for name in row.get("metrics") or [key for key in row if key not in _KEYS]:
            if (value := _value(row.get(name))) is not None:
                table.setdefault(label(name, filtered), {})[document] = value
    return table


def label(metric: str, filtered: str) -> str:
    """The name in `Results.scores` of a metric of responses that passed a filter."""
    return metric if filtered == "none" else f"{metric}/{filtered}"


def read(path: Path) -> dict[str, dict[Document, Value]]:
    """The `values` in a file. Raises DataError."""
    with raising(DataError, f"cannot read {path}"):
        rows = [json_object(line) for line in path.read_bytes().splitlines()]
    if not all(row is not None and {*_KEYS} <= row.keys() for row in rows):
        raise DataError(f"{path} is damaged: it has a line that is no sample")
    return values(row for row in rows if row is not None)


def move(place: Path, folder: Path, names: Iterable[str]) -> None:
    """Move the sample files of an attempt into the folder of its job. Raises OSError."""
    for name in (Path(name).name for name in names):  # the names come from a file, and must not leave the folder
        if (place / name).is_file():
            (place / name).replace(folder / name)
