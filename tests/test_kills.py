"""kill -9 while checkpoints are made: at every point of the protocol, and anywhere.

Whatever was killed, the next start continues from the newest committed checkpoint, and the curve is bitwise that of an
undisturbed run.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sight import seeded, until

from fsdp_pretrain.checkpoint.store import Store, verify_files

pytestmark = pytest.mark.timeout(1200)  # for busy machines: a chain of 20 starts

TRAPS = Path(__file__).with_name("traps.py")
STEPS = 80
EVERY = 2
WRITING, STEP = r"step-\d{8}\.writing-\w+", r"step-\d{8}"

# What happens next when the process is killed: name -> (rank, verb, path). In the order of a save.
POINTS: dict[str, tuple[int, str, str]] = {
    "begin": (0, "mkdir", f"{WRITING}$"),
    "shard-0": (0, "open", "__0_0.distcp"),
    "shard-1": (1, "open", "__1_0.distcp"),
    "shard-0-durable": (0, "fsync", "__0_0.distcp"),
    "shard-1-durable": (1, "fsync", "__1_0.distcp"),
    "tensors": (0, "open", r"/\.tensors"),
    "metadata": (0, "open", r"/\.\.metadata"),
    "metadata-named": (0, "rename", r"/\.metadata$"),
    "train-state": (0, "open", r"\.train_state"),
    "manifest": (0, "open", r"\.manifest"),
    "manifest-named": (0, "rename", r"/manifest\.json$"),
    "commit": (0, "rename", f"/{STEP}$"),
    "commit-durable": (0, "fsync", "/checkpoints$"),
    "verified": (0, "open", r"\.verified"),
    "verified-named": (0, "rename", r"/verified\.json$"),
    "retention": (0, "rename", r"\.deleting-"),
    "deletion": (0, "remove", r"\.deleting-.*/"),
    "deletion-end": (0, "rmdir", r"\.deleting-"),
}
COMMITTED = list(POINTS).index("commit")


def committed(run: Path) -> int:
    """The newest step with a checkpoint; all of them must be complete to the last byte."""
    found = [path for path in (run / "checkpoints").glob("step-*") if re.fullmatch(STEP, path.name)]
    for checkpoint in Store(run / "checkpoints").scan():
        assert checkpoint.problem is None and verify_files(checkpoint.path, checkpoint.files()) == [], checkpoint
    return max((int(path.name[5:]) for path in found), default=0)


class Chain:
    """A run that is killed repeatedly, and one that is not."""

    def __init__(self, lab: Any, helpers: Any, config: Path, whole: Path, ranks: int, name: str) -> None:
        self._lab, self._helpers, self._config, self.ranks = lab, helpers, config, ranks
        self.run = lab.path / name
        self._reference = helpers.losses(whole)
        self._expected = 0

    def start(self, *overrides: str) -> Any:
        return self._lab.start(
            self._config, f"run.dir={self.run}", *overrides, ranks=self.ranks, flags=("--allow", "train.duration")
        )

    def check(self, job: Any) -> None:
        """After a start was killed or ended: it continued from the right step, with the same numbers."""
        resumed = [e for e in self._helpers.journal(self.run, "resume") if e["segment"] == self.segment()]
        assert [entry["step"] for entry in resumed] == ([self._expected] if self._expected else []), job.output()
        assert all(entry["passed_over"] == [] for entry in resumed)
        losses = self._helpers.losses(self.run)
        assert losses == self._reference[: len(losses)], job.output()
        self._expected = committed(self.run)

    def segment(self) -> int:
        return max(int(path.name) for path in (self.run / "segments").iterdir())

    def end(self) -> None:
        """Undisturbed at last, it completes as if nothing had happened."""
        last = min(STEPS, committed(self.run) + 2 * EVERY)
        job = self.start(f"train.duration={last} steps")
        assert job.wait() == [0] * self.ranks, job.output()
        self.check(job)
        assert len(self._helpers.losses(self.run)) == last and committed(self.run) == last
        left = [path.name for path in (self.run / "checkpoints").iterdir()]
        assert not [name for name in left if "writing" in name or "deleting" in name], left


@pytest.fixture(scope="module")
def chain(module_lab: Any, helpers: Any) -> Callable[[int, str], Chain]:
    """`chain(ranks, name)`: a run to be killed, on `ranks` ranks."""
    whole: dict[int, Path] = {}
    configs: dict[int, Path] = {}

    def make(ranks: int, name: str) -> Chain:
        if ranks not in whole:
            configs[ranks] = module_lab.config(
                f"kills-{ranks}",
                train={"duration": f"{STEPS} steps", "global_batch": "12 samples", "micro_batch": 12 // ranks},
                optimizer={"decay": f"{STEPS} steps"},
                checkpoint={"every": f"{EVERY} steps", "keep_last": 2},
                parallel={"shard": 2 if ranks == 4 else ranks},
            )
            whole[ranks] = module_lab.path / f"whole-{ranks}"
            module_lab.train(configs[ranks], f"run.dir={whole[ranks]}", f"checkpoint.every={STEPS} steps", ranks=ranks)
        return Chain(module_lab, helpers, configs[ranks], whole[ranks], ranks, name)

    return make


FEW = ["shard-1", "manifest-named", "commit-durable"]


@pytest.mark.shows("F3")
@pytest.mark.parametrize(
    ("points", "background", "everybody"),
    [
        (FEW, True, False),
        pytest.param(list(POINTS), True, False, marks=pytest.mark.slow),
        pytest.param(list(POINTS)[::2], False, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.promise("verified")
def test_killed_at_every_point_of_a_save(
    chain: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, points: list[str], background: bool, everybody: bool
) -> None:
    """One start after the other, each killed at the next point of its first save, the writer alone or all ranks."""
    killed = chain(2, f"points-{len(points)}-{background}-{everybody}")
    mode = f"checkpoint.background={str(background).lower()}"
    job = killed.start(f"train.duration={3 * EVERY} steps", mode)
    assert job.wait() == [0, 0], job.output()  # so that there is something to delete
    killed.check(job)
    monkeypatch.setenv("EXECUTE_FIRST", str(TRAPS))
    for point in points:
        rank, verb, path = POINTS[point]
        before = committed(killed.run)
        after = WRITING if rank == 0 and point != "begin" else ""  # not what the resume does
        trap: dict[str, Any] = {"rank": rank, "verb": verb, "path": path, "after": after}
        if everybody:
            pids = tmp_path / point
            pids.mkdir()
            trap["pids"] = str(pids)
        monkeypatch.setenv("TRAP", json.dumps(trap))
        job = killed.start(mode)
        codes = job.wait()
        assert codes[rank] == -9 and codes[1 - rank] == (-9 if everybody else 1), (point, codes, job.output())
        killed.check(job)
        gone = committed(killed.run) - before
        assert gone == (EVERY if list(POINTS).index(point) > COMMITTED else 0), point
    monkeypatch.delenv("TRAP")
    monkeypatch.delenv("EXECUTE_FIRST")
    killed.end()


def check_durable(changes: list[tuple[str, str, int]]) -> dict[str, int]:
    """All that a checkpoint consists of is on the disk before it has its name, and the name before it counts as
    verified: a machine that loses power at any instant has it whole, or not at all. Sizes of files when synced."""
    unsynced: set[str] = set()
    known: set[str] = set()
    sizes: dict[str, int] = {}
    for verb, path, size in changes:
        if verb == "fsync":
            unsynced.discard(path)
            sizes[path] = size
        elif verb in ("open", "rename") or (verb == "mkdir" and path not in known):
            known.add(path)
            if verb == "rename" and re.search(f"/{STEP}$", path):
                assert not [each for each in unsynced if each.startswith(f"{path}.writing-")], (path, unsynced)
            if re.search(r"\.verified", path):
                assert str(Path(path).parents[1]) not in unsynced, (path, unsynced)
            unsynced |= {str(Path(path).parent), *([path] if verb == "open" else [])}
    return sizes


@pytest.mark.shows("F3")
@pytest.mark.promise("verified")
def test_all_is_durable_before_it_has_its_name(lab: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EXECUTE_FIRST", str(TRAPS))
    monkeypatch.setenv("TRAP", json.dumps({"log": str(tmp_path / "changes")}))
    config = lab.config(train={"duration": "4 steps"}, checkpoint={"every": "2 steps"})
    lab.train(config, ranks=2)
    sizes = check_durable([json.loads(line) for line in (tmp_path / "changes").read_text().splitlines()])
    checkpoints = Store(lab.path / "run/checkpoints").scan()
    assert [checkpoint.step for checkpoint in checkpoints] == [2, 4]
    for checkpoint in checkpoints:
        names = [entry.name for entry in checkpoint.files()]
        assert {"__0_0.distcp", "__1_0.distcp", "tensors.json", ".metadata", "train_state.json", "config.toml"} == {
            *names
        }
        for entry in checkpoint.files():  # written as such, or under a temporary name that begins with its own
            place = rf"{re.escape(str(checkpoint.path))}\.writing-\w+/(\.)?{re.escape(entry.name)}(?(1)\..*\.partial)"
            assert [size for path, size in sizes.items() if re.fullmatch(place, path)] == [entry.bytes], entry


@pytest.mark.shows("F2")
@pytest.mark.parametrize(
    ("rank", "verb", "path", "text"),
    [
        (1, "open", "__1_0.distcp", "failed: rank 1: .*Input/output error"),
        (0, "rename", r"/manifest\.json$", "cannot commit .*Input/output error"),
    ],
)
@pytest.mark.promise("failed-saves")
def test_a_save_that_fails_on_one_rank_leaves_nothing(
    lab: Any,
    helpers: Any,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    verb: str,
    path: str,
    text: str,
) -> None:
    """Every rank drops it, the attempt is gone, and the checkpoint before it is whole."""
    trap = {"rank": rank, "verb": verb, "path": path, "act": "fail", "skip": 1, "times": 99}
    monkeypatch.setenv("EXECUTE_FIRST", str(TRAPS))
    monkeypatch.setenv("TRAP", json.dumps(trap))
    config = lab.config(checkpoint={"every": "5 steps", "max_failures": 1})
    output = lab.train(config, ranks=2, expect=93)
    (failed,) = helpers.journal(lab.path / "run", "checkpoint-failed")
    assert failed["step"] == 10 and re.search(text, failed["text"]) and len(re.findall("^error:", output, re.M)) == 1
    assert [found.name for found in (lab.path / "run/checkpoints").glob("step-*")] == ["step-00000005"]
    assert committed(lab.path / "run") == 5


@pytest.mark.shows("F3")
@pytest.mark.parametrize(("rank", "background"), [(0, True), pytest.param(1, False, marks=pytest.mark.slow)])
def test_killed_in_the_middle_of_a_write(
    chain: Any, monkeypatch: pytest.MonkeyPatch, rank: int, background: bool
) -> None:
    """The kernel kills a rank in the write that takes its shard beyond a size."""
    killed = chain(2, f"write-{rank}-{background}")
    mode = f"checkpoint.background={str(background).lower()}"
    job = killed.start(f"train.duration={EVERY} steps", mode)
    assert job.wait() == [0, 0], job.output()
    killed.check(job)
    monkeypatch.setenv("EXECUTE_FIRST", str(TRAPS))
    monkeypatch.setenv("TRAP", json.dumps({"rank": rank, "size": 100_000}))
    job = killed.start(mode)
    codes = job.wait()
    assert codes[rank] == -25 and codes[1 - rank] == 1, (codes, job.output())  # SIGXFSZ
    for attempt in (killed.run / "checkpoints").glob("*.writing-*"):  # rank 0, if it lives, may have removed it
        assert (
            0 < (attempt / f"__{rank}_0.distcp").stat().st_size <= 100_000 and not (attempt / "tensors.json").exists()
        )
    killed.check(job)
    monkeypatch.delenv("TRAP")
    monkeypatch.delenv("EXECUTE_FIRST")
    killed.end()


@pytest.mark.shows("F3")
@pytest.mark.parametrize(
    ("seed", "kills"), [(0, 2), *(pytest.param(seed, 10, marks=pytest.mark.slow) for seed in (1, 2))]
)
def test_killed_at_any_instant_of_a_save(chain: Any, helpers: Any, seed: int, kills: int) -> None:
    """kill -9 from outside, of one rank or of all, on 2 to 4 ranks, in the background or while training waits."""
    rng = seeded(seed)
    killed = chain((2, 4, 3)[seed % 3], f"random-{seed}")
    seconds = 0.3
    for _ in range(kills):  # each long before its start has made all steps
        job = killed.start(f"checkpoint.background={rng.choice(['true', 'false'])}")
        wait_for_save(killed.run, job, rng.randrange(1, 3))
        time.sleep(rng.uniform(0, 1.5 * seconds))
        job.kill(rng.choice([None, rng.randrange(killed.ranks)]))
        codes = job.wait()
        assert -9 in codes and 0 not in codes, (codes, job.output())
        killed.check(job)
        seconds = min(1.0, (helpers.journal(killed.run, "checkpoint") or [{"seconds": seconds}])[-1]["seconds"])
    killed.end()


def wait_for_save(run: Path, job: Any, number: int) -> None:
    """Wait until `number` saves of a start have started."""
    old: set[str] = {path.name for path in (run / "checkpoints").glob("*.writing-*")}
    new: set[str] = set()

    def begun() -> bool:
        new.update(path.name for path in (run / "checkpoints").glob("*.writing-*"))
        assert job.codes() == [None] * len(job.ranks), job.output()
        return len(new - old) >= number

    until(begun, what=f"save {number} of a start", every=0.001)
