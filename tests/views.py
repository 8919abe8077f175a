"""What trackers' own readers find in the views of a run, and a run that was recorded without training."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import records
import tomli_w

from fsdp_pretrain.run import lineage, run_id, state_files
from fsdp_pretrain.run.files import AppendFile, RunDir, stamp
from fsdp_pretrain.run.metrics import METRICS
from fsdp_pretrain.run.step_record import LossSum

BEGIN = 1_700_000_000.0
Curves = dict[str, dict[int, float]]
"""By the path of a curve (`loss/training`), the value at each step."""


class Recorded:
    """A run's record, written as the trainer does, at ten seconds a step; `expected` are the curves of the kept line."""

    def __init__(self, path: Path, **record: Any) -> None:
        self.run, self.expected, self._details = RunDir(path), Curves(), record.get("details", False)
        run_id.assign(path)
        sections = {"run": {"name": "demo", "dir": str(path)}, "model": {"family": "llama"}, "record": record}
        self.run.config.write_text(tomli_w.dumps(sections))
        self._number = 0

    def start(self, *, parent: int | None = None, step: int = 0, kind: str = "start") -> None:
        """A start that continues after a step, from which on the former one's steps are lost."""
        segment = self.run.new_segment()
        self._number = int(segment.name)
        lineage.record(segment, parent=parent, step=step, kind=kind)
        for curve in self.expected.values():
            for later in [at for at in curve if at > step]:
                del curve[later]
        self.tell("start", BEGIN + 10 * step)
        self.state("running", step)

    def steps(self, first: int, last: int) -> None:
        """Steps with two sources, whose held-out loss is measured at every fifth."""
        file = AppendFile(self.run.segment(self._number) / METRICS)
        for step in range(first, last + 1):
            losses = {name: LossSum(sum=1000.0 / (step + self._number) + at, count=128) for at, name in enumerate("ab")}
            total = LossSum(sum=sum(loss.sum or 0.0 for loss in losses.values()), count=256)
            heldout = {"h": LossSum(sum=3.0 + step / 7, count=3)} if step % 5 == 0 else None
            when = stamp(BEGIN + 10 * step)
            made = {"sources": losses, "heldout": heldout, "segment": self._number, "time": when, "lr": 1 / (step + 3)}
            record = records.step_record(step, loss=total, grad_norm=math.sqrt(step), **made)
            file.write(record.to_line())
            found = {
                "loss/training": total.mean,
                "optimizer/grad_norm": math.sqrt(step),
                "optimizer/lr": 1 / (step + 3),
            }
            found |= {f"loss/training/{name}": loss.mean for name, loss in losses.items()}
            found |= {"loss/heldout/h": heldout["h"].mean} if heldout else {}
            found |= {f"perplexity{name[4:]}": math.exp(x) for name, x in found.items() if name.startswith("loss/")}
            found |= {"training/batch": 8, "training/consumed": record.consumed, "training/tokens": record.tokens}
            found |= {"speed/tokens_per_second": 1e4, "speed/memory_bytes": 2**30}
            found |= {f"speed/seconds/{part}": seconds for part, seconds in record.seconds if self._details}
            for name, value in found.items():
                self.expected.setdefault(name, {})[step] = value
        file.close()

    def tell(self, kind: str, at: float, text: str = "", **facts: Any) -> None:
        """An entry of the journal."""
        entry = {"time": stamp(at), "kind": kind, "text": text or kind, "segment": self._number, **facts}
        file = AppendFile(self.run.journal)
        file.write(json.dumps(entry))
        file.close()

    def evaluated(self, step: int, value: float) -> None:
        """An evaluation, whose entry comes 25 seconds later."""
        self.tell("eval", BEGIN + 10 * step + 25, step=step, scores={"qa": {"acc": value, "acc_stderr": 0.125}})
        self.expected.setdefault("score/acc/qa", {})[step] = value
        if self._details:
            self.expected.setdefault("stderr/acc/qa", {})[step] = 0.125

    def state(self, name: str, step: int) -> None:
        state_files.write(self.run.status, {"state": name, "step": step, "heartbeat": stamp(BEGIN + 10 * step)})


def _python(code: str, *arguments: object) -> Any:
    """The JSON that code prints behind the word RESULT, in a process of its own."""
    line = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, cwd="/")
    found = next((line for line in done.stdout.splitlines() if line.startswith("RESULT")), None)
    assert found is not None, done.stderr
    return json.loads(found.removeprefix("RESULT"))


_AIM = """
import json, sys
from aim.sdk.repo import Repo
out = {}
for run in Repo(sys.argv[1]).iter_runs():
    found = {key: getattr(run, key) for key in "name experiment tags archived active creation_time end_time".split()}
    found["config"], found["curves"], found["times"] = run["config"], {}, {}
    for metric in run.metrics():
        path = metric.name
        steps, (values, _, times) = metric.data.items_list()
        found["curves"][path], found["times"][path] = list(zip(steps, values)), list(zip(steps, times))
    out[run.hash] = found
print("RESULT" + json.dumps(out, default=float))
"""


def aim_runs(repo: Path) -> dict[str, dict[str, Any]]:
    """What Aim's own API returns for each run, by hash: properties, `config`, `curves`, `times`."""
    found: dict[str, dict[str, Any]] = _python(_AIM, repo)
    for run in found.values():
        for key in ("curves", "times"):
            run[key] = {name: {int(step): value for step, value in points} for name, points in run[key].items()}
    return found


_EVENTS = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator, SCALARS
found = EventAccumulator(sys.argv[1], size_guidance={SCALARS: 0})
found.Reload()
curves = {tag: [(each.step, each.value) for each in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
assert not {"torch", "tensorflow"} & set(sys.modules)
print("RESULT" + json.dumps(curves))
"""


def tensorboard_view(folder: Path) -> Curves:
    """What TensorBoard's own reader finds: curves, of which no step may be there twice."""
    curves = _python(_EVENTS, folder)
    for name, points in curves.items():
        assert len({step for step, _ in points}) == len(points), name
    return {name: {int(at): value for at, value in row} for name, row in curves.items()}


_RECORDS = """
import json, sys
from wandb.proto.wandb_internal_pb2 import Record
rows, runs = [], []
for line in sys.stdin:
    record = Record.FromString(bytes.fromhex(line))
    kind = record.WhichOneof("record_type")
    if kind == "history":
        rows.append({"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item})
    elif kind == "run":
        runs.append({"name": record.run.display_name, "group": record.run.run_group, "tags": list(record.run.tags)})
    elif kind == "exit":
        runs.append({"exit": record.exit.exit_code})
print("RESULT" + json.dumps([rows, runs]))
"""


def _log_records(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format behind W&B's header of seven bytes."""
    block, header = 32_768, struct.Struct("<IHB")
    at, whole = 7, b""
    while at + header.size <= len(data):
        if (left := block - at % block) < header.size:
            at += left
            continue
        _, length, kind = header.unpack_from(data, at)
        whole += data[at + header.size : at + header.size + length]
        at += header.size + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


def wandb_view(place: Path) -> tuple[Curves, list[dict[str, Any]]]:
    """What the only offline run holds, read with W&B's messages: curves, and facts about the run."""
    (folder,) = place.glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    lines = "\n".join(record.hex() for record in _log_records(file.read_bytes()))
    line = [sys.executable, "-W", "ignore", "-c", _RECORDS]
    done = subprocess.run(line, input=lines, capture_output=True, text=True, cwd="/")
    assert "RESULT" in done.stdout, done.stderr
    rows, runs = json.loads(done.stdout.partition("RESULT")[2])
    curves = Curves()
    for row in rows:
        for name, value in row.items():
            if "/" in name and isinstance(value, int | float):
                assert row["step"] not in curves.get(name, {}), name
                curves.setdefault(name, {})[row["step"]] = value
    return curves, runs


def shown(name: str, place: Path) -> Curves:
    """The curves in the one view of a tracker that is not set aside."""
    if name == "tensorboard":
        return tensorboard_view(place / "kept")
    if name == "wandb":
        return wandb_view(place)[0]
    (run,) = [run for run in aim_runs(place).values() if not run["archived"]]
    curves: Curves = run["curves"]
    return curves
