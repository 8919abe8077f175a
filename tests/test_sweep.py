"""`bench --sweep`: every way that changes no sample is measured, and one that fails ends no other."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from processes import TORCHRUN, Run, python

from fsdp_pretrain.bench import measured, sweep
from fsdp_pretrain.bench.measured import MeasuredSteps
from fsdp_pretrain.config.config import Config, load
from fsdp_pretrain.models.flops import Speed

Key = tuple[str, ...]


def times(config: Config, seconds: float, accumulation: int) -> MeasuredSteps:
    batch = accumulation * config.train.micro_batch
    rate = batch * config.data.sequence_length / seconds
    speed = Speed(batch, seconds, 1, "cpu", rate, rate, 0.0, 0.0, None, None, 1.0)
    return MeasuredSteps("run", "ours", "2.13", "float32", False, 1, 1, 1, 8, speed, 2**30, 6.0, None)


class Device:
    """Steps take a time and memory that depend on the way; keeps what was tried."""

    def __init__(self, path: Path, fits: int) -> None:
        self.path, self.fits = path, fits
        self.tried: list[Key] = []

    def measure(self, command: list[str], *, limit: float, ranks: int) -> MeasuredSteps | str:
        keys = [text for text in command if "=" in text]
        config = load(self.path, keys)
        accumulation = int(command[command.index("--accumulation") + 1])
        recompute, size = config.parallel.recompute, config.train.micro_batch
        self.tried.append((*keys[-3 if ranks > 1 else -2 :], str(accumulation)))
        need = size * {0: 4, "feed-forward": 2, 1: 1}[recompute]
        if need > self.fits:
            return "torch.OutOfMemoryError: CUDA out of memory"
        per_sample = {0: 3.0, "feed-forward": 3.5, 1: 4.0}[recompute] + 1 / size
        return times(config, per_sample * size * accumulation, accumulation)


@pytest.mark.quick
@pytest.mark.shows("A1")
@pytest.mark.parametrize("fits", [1, 8, 1000])
def test_the_first_is_the_fastest_of_all_that_fit(lab: Any, monkeypatch: pytest.MonkeyPatch, fits: int) -> None:
    """Against every way; none larger than one that did not fit is tried, and small batches accumulate up to four."""
    path = lab.config(train={"global_batch": "24 samples", "micro_batch": 3})
    device = Device(path, fits)
    monkeypatch.setattr(measured, "measure", device.measure)
    found = sweep.sweep(load(path), [str(path)], [], ranks=1, limit=60)
    rates = {}
    for size in (1, 2, 4, 8):
        for recompute, need, seconds in (("0", 4, 3.0), ("feed-forward", 2, 3.5), ("1", 1, 4.0)):
            if size * need <= fits:
                key = (f"train.micro_batch={size}", f"parallel.recompute={recompute}")
                rates[key] = 1 / (seconds + 1 / size)
    fitting = [way for way in found if way.times]
    assert {tuple(way.overrides) for way in fitting} == set(rates)
    assert tuple(fitting[0].overrides) == max(rates, key=lambda key: rates[key])
    assert all("OutOfMemoryError" in way.problem for way in found[len(fitting) :])
    assert len(device.tried) == len(set(device.tried)) == len(found) <= len(rates) + 3
    for size, _, accumulation in device.tried:
        assert int(accumulation) == min(4, 24 // int(size.partition("=")[2]))
    assert list(sweep.render(found))[-1] == f"fastest: {' '.join(fitting[0].overrides)}"
    assert "nothing fits" in next(sweep.render(found[len(fitting) :]))


@pytest.mark.quick
def test_keys_that_are_set_stay(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """And resharding is tried only where parameters are sharded."""
    path = lab.config(train={"global_batch": "8 samples", "micro_batch": 1}, parallel={"shard": 2})
    device = Device(path, 1000)
    monkeypatch.setattr(measured, "measure", device.measure)
    ramp = ["train.batch_ramp={first='4 samples', by='4 samples', duration='64 samples'}", "parallel.recompute=1"]
    sweep.sweep(load(path, ramp), [str(path), *ramp], ramp, ranks=2, limit=60)
    assert {size for size, *_ in device.tried} == {"train.micro_batch=1", "train.micro_batch=2"}  # as the ramp allows
    device.tried.clear()
    fixed = ["train.micro_batch=2", "parallel.recompute=1"]
    sweep.sweep(load(path, fixed), [str(path), *fixed], fixed, ranks=2, limit=60)
    reshard = "parallel.reshard_after_forward"
    assert device.tried == [(*fixed, f"{reshard}={value}", "2") for value in ("true", "false")]


@pytest.mark.slow
def test_ways_are_measured_and_failures_named(lab: Any, run_command: Run, tmp_path: Path) -> None:
    """Two ranks of this machine; flex attention needs a GPU."""
    path = lab.config(train={"global_batch": "8 samples", "micro_batch": 1}, parallel={"shard": 2})
    options = ["parallel.recompute=0", "--sweep", "--ranks", 2, "--steps", 2, "--warmup", 1, "--json"]
    result, fixed = tmp_path / "result.json", "train.micro_batch=2"
    done = run_command("fsdp_pretrain.bench", path, fixed, *options, "--result", result, timeout=280, expect=0)
    ways = json.loads(result.read_text())
    assert ways == json.loads(done.stdout) and len(ways) == 2
    assert all(way["times"]["speed"]["devices"] == 2 and not way["problem"] for way in ways)
    assert not (lab.path / "run").exists()
    flex = ["parallel.attention=flex", "data.attention=document", fixed, "parallel.reshard_after_forward=true"]
    done = run_command("fsdp_pretrain.bench", path, *flex, *options[:-1], timeout=280)
    assert done.returncode == 1 and "flex cannot be used" in done.stdout and "nothing fits" in done.stdout


def test_one_rank_of_many_is_timed(lab: Any, run_command: Run, tmp_path: Path) -> None:
    """It holds its own shards alone, and computes its own samples."""
    path, result = lab.config(train={"micro_batch": 1}), tmp_path / "result.json"
    options, trace = ["--fake-ranks", 16, "--accumulation", 2, "--steps", 2, "--warmup", 1], tmp_path / "trace.json.gz"
    done = run_command("fsdp_pretrain.bench", path, *options, "--result", result, "--trace", trace)
    assert done.returncode == 0 and "2 x 8 (one real rank, no wire)" in done.stdout, done.stderr
    longest, traced = set(re.findall(r"aten::\w+", done.stdout)), gzip.decompress(trace.read_bytes()).decode()
    assert longest and all(f'"{name}"' in traced for name in {*longest, "aten::mm"}), longest
    times = json.loads(result.read_text())
    assert times["fake"] and (times["replicas"], times["shards"], times["speed"]["batch"]) == (2, 8, 32)
    assert 0 < times["loss"] < 20
    for mode in (["--saves", tmp_path], ["--sweep"], ["--peers"]):
        done = run_command("fsdp_pretrain.bench", path, *options, *mode)
        assert done.returncode == 78 and "--fake-ranks times steps on one device" in done.stderr


def test_of_two_ranks_one_writes_the_trace(lab: Any, tmp_path: Path) -> None:
    path, trace = lab.config(parallel={"shard": 2}), tmp_path / "trace.json.gz"
    options = ["--steps", 1, "--warmup", 1, "--trace", trace]
    shown = python(*TORCHRUN[1:], "--standalone", "--nproc-per-node", 2, "-m", "fsdp_pretrain.bench", path, *options)
    assert shown.stdout.count("Self CPU time total") == 1
    traced = json.loads(gzip.decompress(trace.read_bytes()))  # what two write does not end here
    assert any(event.get("name") == "aten::mm" for event in traced["traceEvents"])


def test_a_way_that_takes_too_long_is_named(lab: Any, run_command: Run) -> None:
    """It is ended and counts as one that does not fit."""
    done = run_command("fsdp_pretrain.bench", lab.config(), "--sweep", "--limit", 0.5)
    assert done.returncode == 1 and "not finished after 0.5 seconds" in done.stdout, done.stderr
    assert "nothing fits" in done.stdout and "Traceback" not in done.stderr


@pytest.mark.quick
def test_what_cannot_be_swept_is_refused(lab: Any, run_command: Run) -> None:
    done = run_command("fsdp_pretrain.bench", lab.config(), "--sweep", "--ranks", 3)
    assert done.returncode == 78 and "does not split over 3 ranks" in done.stderr
    done = run_command("fsdp_pretrain.bench", lab.config(), "--sweep", WORLD_SIZE="2")
    assert done.returncode == 78 and "without torchrun" in done.stderr


@pytest.mark.quick
@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        (
            "x\ntorch.OutOfMemoryError: CUDA out of memory\ntorch.distributed.elastic.Error: a\n====",
            "torch.OutOfMemoryError:",
        ),
        ("[rank3]: RuntimeError: NCCL error\nChildFailed\n=====", "[rank3]: RuntimeError: NCCL error"),
        ("error: parallel.attention = flex cannot be used\n====", "error: parallel.attention = flex"),
        ("  traceback : Signal 9 (SIGKILL) received by PID 7\n====", "traceback : Signal 9"),
        ("====", "it ended without a message"),
    ],
)
def test_the_reason_of_a_failure(errors: str, expected: str) -> None:
    assert measured.reason(errors).startswith(expected)
