"""NCCL's flight recorder: who makes it record, how its dumps are read, and what a hang's verdict takes from them."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sight import until

from fsdp_pretrain.config.operations import WatchdogSection
from fsdp_pretrain.config.sections import ParallelSection
from fsdp_pretrain.parallel import mesh
from fsdp_pretrain.processes import run_module
from fsdp_pretrain.run.files import now
from fsdp_pretrain.watchdog.hang import monitor as hang_monitor
from fsdp_pretrain.watchdog.hang.diagnosis import HangDiagnosis, diagnose
from fsdp_pretrain.watchdog.hang.flight_recorder import parse
from fsdp_pretrain.watchdog.hang.monitor import HangMonitor
from fsdp_pretrain.watchdog.hang.peers import NodeReport, PeerNodes
from fsdp_pretrain.watchdog.hang.rank_monitor import RankMonitor, RankSnapshot

GATHER, REDUCE, SUM = "_all_gather_base", "_reduce_scatter_base", "all_reduce"


def label(ranks: list[int]) -> str:
    return "mesh_dp_shard" if ranks[1] - ranks[0] == 1 else "mesh_dp_replicate"


def dump(*calls: tuple[list[int], str], ended: int, begun: int = -1, kept: int = 2000, idle: Any = ()) -> bytes:
    """A dump as torch documents it (version 2.10) of a rank whose first `ended` calls are over: group and operation of
    each. The numbers of a group count its own calls, and NCCL numbers groups by their first ones. `idle`: groups without
    calls."""
    groups = {desc: {"name": desc[-5:], "desc": desc, "ranks": str(ranks)} for ranks in idle if (desc := label(ranks))}
    status: dict[str, dict[str, int]] = {}
    entries: list[dict[str, Any]] = []
    for record, (ranks, operation) in enumerate(calls):
        desc = label(ranks)
        groups.setdefault(desc, {"name": desc[-5:], "desc": desc, "ranks": str(ranks)})
        number = [*groups].index(desc)
        at = status.setdefault(str(number), {"last_enqueued_collective": 0, "last_completed_collective": 0})
        at["last_enqueued_collective"] += 1
        at["last_completed_collective"] += record < ended
        at["last_started_collective"] = -1 if begun < 0 else at["last_completed_collective"] + (ended < begun)
        entries.append(
            {
                "frames": [{"name": "forward", "filename": "trainer.py", "line": 9}],
                "record_id": record,
                "pg_id": number,
                "process_group": (desc[-5:], desc),
                "collective_seq_id": at["last_enqueued_collective"],
                "p2p_seq_id": 0,
                "op_id": record,
                "profiling_name": f"nccl:{operation}",
                "time_created_ns": 1724779239936775119 + record,
                "duration_ms": 0.25,
                "input_sizes": [[4096, 16], [8]],
                "input_dtypes": ["BFloat16", "BFloat16"],
                "output_sizes": [[4096]],
                "output_dtypes": ["BFloat16"],
                "state": "completed" if record < ended else "scheduled",
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": 1724779239975811724 if record < ended else None,
                "retired": record < ended,
                "timeout_ms": 600000,
                "is_p2p": False,
            }
        )
    found = {"version": "2.10", "pg_config": {group["name"]: group for group in groups.values()}, "pg_status": status}
    return pickle.dumps({**found, "nccl_comm_state": {}, "entries": entries[-kept:]}, protocol=2)


def verdict(dumps: dict[int, bytes], stuck: tuple[int, ...] = (), answered: int | None = None) -> HangDiagnosis:
    """The diagnosis of ranks that wait for their GPUs, on hosts of eight, but for those that are `stuck` in Python;
    only the first `answered` have a dump."""
    snapshots = []
    for rank, data in dumps.items():
        stack = ("a collective on the device", "streams.py:231 synchronize", ("a collective on the device", "read"))
        collective, place, group = (None, "packer.py:40 _fill", ("", "fill")) if rank in stuck else stack
        known = parse(data) if answered is None or rank < answered else ()
        at = (rank, f"n{rank // 8}", 100 + rank, 30, "reduce", 999, 5.0, "S", False)
        snapshots.append(RankSnapshot(*at, collective, place, group, collectives=known))
    return diagnose(snapshots, {}, [])


def shard(rank: int, ranks: int) -> list[int]:
    size = min(8, ranks)
    return [*range(rank // size * size, rank // size * size + size)]


@pytest.mark.quick
@pytest.mark.parametrize("stack", [True, False], ids=["in Python", "waits elsewhere"])
@pytest.mark.parametrize("ranks", [2, 16])
def test_a_rank_that_has_not_called_a_collective_is_named(ranks: int, stack: bool) -> None:
    """All others of its group have, each with calls after it: hosts run ahead. The stacks of two more lie: their hosts
    have a full queue."""
    absent, dumps = ranks - 1, {}
    for rank in range(ranks):
        group = shard(rank, ranks)
        calls = [(group, GATHER), (group, REDUCE)]
        if absent in group:
            calls += [(group, GATHER)] * (0 if rank == absent else 1 + rank)
        dumps[rank] = dump(*calls, ended=2)
    found = verdict(dumps, stuck=(absent, 0, 3) if stack else ())
    others = min(8, ranks) - 1
    assert found.suspects == (absent,) and found.kind == ("stuck" if stack else "desync")
    assert found.text == (
        f"rank {absent} (n{absent // 8}, pid {100 + absent}) has not called collective 3 of mesh_dp_shard, "
        f"{GATHER} BFloat16 [4096, 16] ..., in which {others} ranks wait: it is in "
        + ("packer.py:40 _fill" if stack else "streams.py:231 synchronize")
    )


@pytest.mark.quick
@pytest.mark.parametrize("ranks", [2, 16])
def test_a_collective_that_all_have_called_is_the_networks(ranks: int) -> None:
    dumps = {rank: dump(*[(shard(rank, ranks), GATHER)] * (9 + rank), ended=4) for rank in range(ranks)}
    found = verdict(dumps, stuck=(0,))
    assert (found.kind, found.suspects) == ("network", ())
    expected = f"all {min(8, ranks)} ranks wait in collective 5 of mesh_dp_shard, {GATHER} BFloat16 [4096, 16] ...: the"
    assert found.text.startswith(expected) and found.text.count("mesh_dp_shard") == max(1, ranks // 8)
    unanswered = verdict(dumps, answered=ranks - 1).text  # the last rank may not have called it
    assert unanswered.count("mesh_dp_shard") == ranks // 16
    assert ranks > 2 or unanswered.startswith("all ranks wait in a collective on the device")


@pytest.mark.quick
@pytest.mark.parametrize("absent", [True, False])
def test_a_wait_in_one_group_is_the_effect_of_another(absent: bool) -> None:
    """2 x 8 ranks. Ranks 5 and 13 do not finish a sum, so the GPUs of no other rank finish what they gather: rank 13 has
    not called it, or both have. The host of rank 5 waits with a full queue, so that it has not called all either."""
    dumps = {}
    for rank in range(16):
        inner, outer = shard(rank, 16), [rank % 8, rank % 8 + 8]
        calls, ended = [(inner, GATHER), (outer, SUM), (inner, GATHER)], 1 if rank in (5, 13) else 2
        called = (1 if rank == 13 else 2 if rank == 5 else 3) if absent else 3
        dumps[rank] = dump(*calls[:called], ended=ended, idle=[inner, outer])
    found = verdict(dumps)
    if absent:
        assert (found.kind, found.suspects) == ("desync", (13,))
        assert found.text.startswith("rank 13 (n1, pid 113) has not called collective 2 of mesh_dp_shard") and (
            "in which 7 ranks wait" in found.text
        )
    else:
        assert (found.kind, found.suspects) == ("network", ())
        assert found.text.startswith("all 2 ranks wait in collective 1 of mesh_dp_replicate, all_reduce")
        assert "mesh_dp_shard" not in found.text


@pytest.mark.quick
def test_ranks_that_wait_for_each_other_in_a_circle_are_out_of_step() -> None:
    shards, replicas = ([0, 1], [2, 3]), ([0, 2], [1, 3])
    before = {rank: ((shards[rank // 2], GATHER), (replicas[rank % 2], SUM)) for rank in range(4)}
    last = {0: shards[0], 1: replicas[1], 2: replicas[0], 3: shards[1]}
    found = verdict({rank: dump(*before[rank], (last[rank], SUM), ended=2) for rank in range(4)})
    assert found.kind == "desync" and set(found.suspects) == {0, 1, 2, 3}
    assert "rank 1 (n0, pid 101) has not called collective 2 of mesh_dp_shard" in found.text


@pytest.mark.quick
def test_other_reasons_in_a_collective_are_told_apart() -> None:
    """Another operation under the same number; a GPU that has not come to it."""
    group, ahead = shard(0, 8), {rank: dump(*[(shard(0, 8), GATHER)] * 5, ended=4, begun=5) for rank in range(8)}
    other = verdict({**ahead, 6: dump(*[(group, GATHER)] * 4, (group, SUM), ended=4)})
    assert (other.kind, other.suspects) == ("desync", (6,)) and f"the ranks call {GATHER} and {SUM} there" in other.text
    halves = verdict({0: dump(([0, 1], GATHER), ended=0), 1: dump(([0, 1], SUM), ended=0)})
    assert (halves.kind, halves.suspects) == ("desync", ())
    untimed = {rank: dump(*[(group, GATHER)] * 5, ended=4) for rank in range(8)}
    for others, late in ((ahead, {"ended": 4, "begun": 4}), (untimed, {"ended": 3})):
        found = verdict({**others, 2: dump(*[(group, GATHER)] * 5, **late)})
        assert (found.kind, found.suspects) == ("device", (2,))
        assert "the GPU of rank 2 (n0, pid 102) has not come to collective 5 of mesh_dp_shard" in found.text


@pytest.mark.quick
def test_a_group_whose_calls_were_forgotten_still_counts() -> None:
    """The recorder keeps the last calls of all groups together; where a group is, it keeps too."""
    inner, outer = shard(0, 16), [0, 8]
    progress = parse(dump((outer, SUM), *[(inner, GATHER)] * 9, ended=10, kept=3))
    assert {each.label: (each.called, each.ended, each.size) for each in progress} == {
        "mesh_dp_shard": (9, 9, 8),
        "mesh_dp_replicate": (1, 1, 2),
    }
    for first, second in ((outer, inner), (inner, outer)):  # the oldest call is the first
        progress = parse(dump((first, SUM), (second, SUM), ended=0, idle=[outer, inner]))
        assert [each.label for each in progress] == [label(first), label(second)]
    (waits, _) = parse(dump((outer, SUM), *[(inner, GATHER)] * 9, ended=4, kept=3))
    assert (waits.label, waits.called, waits.ended, waits.operation) == ("mesh_dp_shard", 9, 3, "")
    assert (
        "collective 4 of mesh_dp_shard: "
        in verdict({r: dump(*[([0, 1], SUM)] * 9, ended=3, kept=1) for r in (0, 1)}).text
    )


RANK = """
import faulthandler, os, pathlib, select, signal, sys, threading
from fsdp_pretrain.heartbeat import Phase
from fsdp_pretrain.watchdog.hang.flight_recorder import enable
from fsdp_pretrain.watchdog.hang.page import Page
pages, rank, answer = pathlib.Path(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
enable(pages, None)
stacks = open(pages / f"rank-{rank}.stacks", "w")
print(f"main 0x{threading.main_thread().ident:016x} /", file=stacks, flush=True)
faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True, chain=False)
pipe = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] + f"{rank}.pipe"
os.mkfifo(pipe)
asked = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
page = Page(pages / f"rank-{rank}.page", rank=rank, segment=1)
waiting = '''
def synchronize():
    page.step(7)
    page.beat(Phase.REDUCE)
    while True:
        select.select([asked], [], [])
        if os.read(asked, 128):
            while not answer.exists():
                select.select([], [], [], 0.01)
            with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + str(rank), "wb") as file:
                file.write(answer.read_bytes())
        select.select([], [], [], 0.01)
'''
exec(compile(waiting, "/lib/torch/cuda/streams.py", "exec"))
synchronize()
"""
"""Two ranks as NCCL leaves them: the host waits for the GPU, and torch's thread reads the pipe."""


class Payload:
    """Pickled, it is a function call."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.promise("hang-named", "no-code")
@pytest.mark.parametrize("case", ["whole", "cut off", "malicious"])
def test_the_agent_asks_the_recorders_and_keeps_what_they_say(
    tmp_path: Path, helpers: Any, watch: Any, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    """Rank 1 has not called the second collective; its stack is that of rank 0. What cannot be read is left out."""
    monkeypatch.setattr(hang_monitor, "_RECORDER_SECONDS", 20.0 if case == "whole" else 0.3)
    marker, pages, stacks, group = tmp_path / "executed", tmp_path / "pages", tmp_path / "stacks", [0, 1]
    pages.mkdir()
    answers = [dump((group, GATHER), (group, GATHER), ended=1), dump((group, GATHER), ended=1)]
    wrong = {"cut off": answers[1][:-9], "malicious": pickle.dumps({**pickle.loads(answers[1]), "x": Payload(marker)})}
    answers[1] = wrong.get(case, answers[1])
    processes = []
    for rank in range(2):
        line = [sys.executable, "-c", RANK, pages, str(rank), tmp_path / f"answer-{rank}"]
        processes.append(subprocess.Popen(line, env=helpers.environment()))
    ranks, nodes = RankMonitor(range(2), pages, os.getpid()), PeerNodes(tmp_path, 0, 1, "attempt")
    section = WatchdogSection.model_validate({"act": False, "hang": {"soft": "0.3 s", "hard": "60 s"}})
    monitor = HangMonitor(section, ranks, nodes, stacks, end=lambda *_: None)
    monitor.alarms = watch.alarms
    monitor.history.assume(0.01)

    def is_reported() -> bool:
        ranks.read_pages()
        monitor.check()
        return "hang" in watch.alarms.open_keys()

    def have_all_begun() -> bool:
        ranks.read_pages()
        return sum(beat.step == 7 for beat in ranks.beats) == 2

    def give_answers() -> None:
        for rank, answer in enumerate(answers):
            (tmp_path / "answer").write_bytes(answer)
            (tmp_path / "answer").rename(tmp_path / f"answer-{rank}")

    try:
        if case != "whole":
            give_answers()
        until(have_all_begun)
        if case == "whole":  # stacks come at once, recorders take a second
            until(lambda: is_reported() or all(rank.stack is not None for rank in ranks.all))
            assert not is_reported()
            give_answers()
        until(is_reported)
        facts, summary = next(iter(watch.alarms)).facts, next(iter(watch.alarms)).summary
        kept = sorted(path.name for path in stacks.glob("*-nccl-*"))
        if case == "whole":
            assert (facts["verdict"], facts["suspects"]) == ("desync", [1])
            assert "has not called collective 2 of mesh_dp_shard, _all_gather_base" in summary
            assert kept == ["0001-nccl-00000", "0001-nccl-00001"]
            assert (stacks / kept[1]).read_bytes() == answers[1]
        else:
            assert (facts["verdict"], facts["suspects"]) == ("network", [])
            assert "all ranks wait in a collective on the device" in summary
            assert kept == ["0001-nccl-00000"] and not marker.exists()
            pickle.loads(wrong["malicious"])
            assert marker.exists()  # for whoever opens it
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.quick
def test_a_rank_on_another_node_is_named(tmp_path: Path) -> None:
    """Its agent reports what its recorder says to the one that leads."""
    dumps = {0: dump(([0, 1], SUM), ([0, 1], SUM), ended=1), 1: dump(([0, 1], SUM), ended=1)}
    positions = [
        RankSnapshot(rank, f"n{rank}", 9, 3, "reduce", 9, 5.0, "S", False, "x", "y", ("x",), collectives=parse(data))
        for rank, data in dumps.items()
    ]
    there, here = (PeerNodes(tmp_path, node, 2, "attempt") for node in (1, 0))
    known: dict[str, Any] = {"attempt": "attempt", "host": "n1", "pid": 9, "segment": 1, "stalled": positions[1:]}
    there.write(NodeReport(time=now(), findings={}, windows={}, ended=False, **known))
    here.read(all_=True)
    assert here.snapshots() == positions[1:]
    assert diagnose([*positions[:1], *here.snapshots()], {}, []).suspects == (1,)


def test_processes_beside_a_rank_have_recorders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation on GPUs would else replace the pipe of rank 0."""
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"):
        monkeypatch.setenv(name, "of the rank")
    done = run_module("timeit", "-n1", "-r1", "import os; print(sorted(os.environ))", limit=60.0)
    assert b"PATH" in done.stdout and not any(name in done.stdout for name in (b"TORCH_FR_", b"TORCH_NCCL_")), done


@pytest.mark.skipif(not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"), reason="this torch has no such dump")
def test_what_torch_writes_is_read() -> None:
    """The recorder of gloo writes as that of NCCL does, but leaves out the ranks of its groups. No public function."""
    with mesh.connect(ParallelSection()):
        before = len(pickle.loads(torch._C._distributed_c10d._dump_fr_trace())["entries"])
        for _ in range(3):
            dist.all_reduce(torch.ones(4, 2))
        written = torch._C._distributed_c10d._dump_fr_trace()
    assert parse(written) is not None
    found = pickle.loads(written)
    name, desc = found["entries"][-1]["process_group"]
    found["pg_config"] = {name: {"name": name, "desc": desc, "ranks": "[0]"}}
    found["entries"] = found["entries"][before:]
    (progress,) = parse(pickle.dumps(found, protocol=2))
    assert (progress.size, progress.called) == (1, found["entries"][-1]["collective_seq_id"])


def test_every_start_lets_nccl_record(lab: Any, helpers: Any) -> None:
    """Beside the page, as the record of the start shows. What the user has set stays, and the places, which are new
    with every start, count as no change."""
    constant = {"curve": "constant", "warmup": None, "min_lr": None}
    config = lab.config(watchdog={"enabled": True}, train={"duration": "4 steps"}, optimizer=constant)
    run = lab.path / "run"
    lab.train(config, "train.duration='2 steps'")
    mine = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}
    lab.train(config, flags=("--allow", "train.duration"), variables=mine)
    first, second = (
        json.loads((run / f"segments/000{number}/environment.json").read_text())["variables"] for number in (1, 2)
    )
    place = first["TORCH_FR_DUMP_TEMP_FILE"]
    assert place.endswith("/nccl-rank-") and place == first["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] and "/run" not in place
    assert (first["TORCH_FR_BUFFER_SIZE"], first["TORCH_NCCL_DUMP_ON_TIMEOUT"]) == ("2000", "1")
    assert int(first["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"]) > 3600
    assert "TORCH_FR_BUFFER_SIZE" not in second and second["TORCH_FR_DUMP_TEMP_FILE"] != place
    changed = next(event for event in helpers.journal(run) if event["kind"] == "changed" and event["segment"] == 2)
    assert "TORCH_NCCL_TRACE_BUFFER_SIZE" in str(changed) and "_FILE" not in str(changed), changed
