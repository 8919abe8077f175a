"""TensorBoard: a directory of event files, written by TensorBoard's own record writer; neither torch nor TensorFlow."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .points import Point, PointValues, StepText
from .run_facts import RunFacts
from .sink import Sink

_KEPT = "kept"


class TensorboardSink(Sink):
    """The directory `kept` holds the kept line. Points in event files cannot be replaced: unless they only follow, it
    is written again."""

    name, title = "tensorboard", "TensorBoard"

    def __init__(self, place: Path, facts: RunFacts, known: str | None, *, fresh: bool) -> None:
        writer: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._tensors: Any = importlib.import_module("tensorboard.compat.proto.tensor_pb2")
        self.id = _KEPT
        self.opened, folder = place, place / _KEPT
        if fresh:
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.watched = folder / f"events.out.tfevents.{time.time_ns()}.{os.uname().nodename}"
        self._file = self.watched.open("xb")
        self._records = writer.RecordWriter(self._file)
        self._write(time.time(), file_version="brain.Event:2")
        if fresh:
            self._texts(facts.started, 0, "config", [_as_code(facts)])

    @classmethod
    def can_continue(cls, place: Path, known: str, *, in_order: bool) -> bool:
        return in_order and (place / known).is_dir()

    @classmethod
    def set_aside(cls, place: Path, known: str, why: str) -> None:
        """Rename it to `left-1` and so on."""
        if (place / known).is_dir():
            number = 1 + len(list(place.glob("left-*")))
            (place / known).rename(place / f"left-{number}")

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            if isinstance(point, PointValues):
                summary = self._summaries.Summary()
                for each in point.scalars:
                    summary.value.add(tag=each.path, simple_value=each.value)
                self._write(point.time, step=point.step, summary=summary)
            elif isinstance(point, StepText):
                self._texts(point.time, point.step, point.name, point.lines)
        self._records.flush()

    def _texts(self, at: float, step: int, tag: str, lines: list[str]) -> None:
        metadata = self._summaries.SummaryMetadata(
            plugin_data=self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        )
        text = self._tensors.TensorProto(dtype="DT_STRING", string_val=["\n\n".join(lines).encode()])
        summary = self._summaries.Summary()
        summary.value.add(tag=tag, tensor=text, metadata=metadata)
        self._write(at, step=step, summary=summary)

    def _write(self, at: float, **content: Any) -> None:
        self._records.write(self._events.Event(wall_time=at, **content).SerializeToString())

    def close(self, facts: RunFacts) -> None:
        self._records.flush()
        os.fsync(self._file.fileno())
        self._records.close()


def _as_code(facts: RunFacts) -> str:
    import json

    text = json.dumps(facts.config, indent=1, default=str)
    return f"{facts.name}: {', '.join(facts.tags)}\n\n" + "\n".join(f"    {line}" for line in text.splitlines())


SINK = TensorboardSink
