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

from .points import PointValues
from .run_facts import RunFacts
from .sink import Sink


class TensorboardSink(Sink):
    """The directory `kept`: the kept line. Points in event files cannot be replaced, so it is always written anew."""

    def __init__(self, place: Path, facts: RunFacts) -> None:
        writer: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self.opened, folder = place, place / "kept"
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        self.watched = folder / f"events.out.tfevents.{time.time_ns()}.{os.uname().nodename}"
        self._file = self.watched.open("xb")
        self._records = writer.RecordWriter(self._file)
        self._write(time.time(), file_version="brain.Event:2")

    def write(self, points: Sequence[PointValues]) -> None:
        for point in points:
            summary = self._summaries.Summary()
            for name, value in point.values.items():
                summary.value.add(tag=name, simple_value=value)
            self._write(point.time, step=point.step, summary=summary)
        self._records.flush()

    def _write(self, at: float, **content: Any) -> None:
        self._records.write(self._events.Event(wall_time=at, **content).SerializeToString())

    def close(self, facts: RunFacts) -> None:
        self._records.flush()
        os.fsync(self._file.fileno())
        self._records.close()


SINK = TensorboardSink
