"""`scripts/test_gpu.sh`: parts are isolated, limits hold, and the table is written, on a machine without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts/test_gpu.sh"
RUN_PARTS = """
import json, sys
from pathlib import Path
from fsdp_pretrain.bench.parts import Part, Report, run_parts
parts = [Part(name, tuple(command), limit) for name, command, limit in json.load(sys.stdin)]
report = Report("Parts of a test", "NVIDIA H100", "2.11.0")
run_parts(parts, Path(sys.argv[1]), report=report, seconds=float(sys.argv[2]))
assert "torch" not in sys.modules
"""
STEPS = {
    "seconds": {"iteration": 0.8}, "iteration_seconds_min_max": [0.7, 0.9], "tokens_per_second": 40_000.0, "mfu": 0.512, "memory_bytes": 2**35,
}  # fmt: skip
MEASURES = f"import json; print(json.dumps({STEPS!r}))"
COMPARES = """
import json, sys
side = {"seconds": [0.8, 0.8, 0.8], "tokens_per_second": [4e4] * 3, "mfu": None, "memory_bytes": 2**30,
        "seconds_ratio": [1.02, 1.0, 1.1]}
print(json.dumps({"sides": {"ours": side, "minimal": side}, "skipped": {"torchtitan": "cannot be imported"},
                  "failed": {"transformers": "a | line\\nOutOfMemoryError: 8 GiB"}}))
print("the last word", file=sys.stderr)
sys.exit(3)
"""
LOST = """
import subprocess, sys, time
child = "import os, subprocess, sys; os.setsid(); print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
subprocess.run([sys.executable, "-c", child])  # it ends, and leaves a process in another session
print("begun", flush=True)
time.sleep(600)
"""


def run_parts(out: Path, parts: list[tuple[str, list[str], float]], seconds: float, helpers: Any) -> dict[str, Any]:
    """Run parts in a process of their own, which ends all processes below itself; the summary by name."""
    done = subprocess.run(
        [sys.executable, "-c", RUN_PARTS, str(out), str(seconds)],
        input=json.dumps(parts), text=True, capture_output=True, cwd="/", env=helpers.environment(), timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {part["name"]: part for part in json.loads((out / "summary.json").read_text())["parts"]}


def code(text: str, *flags: str) -> list[str]:
    return ["-c", text, *flags]


@pytest.mark.quick
def test_no_part_ends_another(tmp_path: Path, helpers: Any) -> None:
    found = run_parts(
        tmp_path,
        [
            ("measures", code(MEASURES, "--json"), 60),
            ("compares", code(COMPARES, "--json"), 60),
            ("crashes", code("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"), 60),
            ("hangs", code(LOST), 3),
            ("is-no-module", ["-m", "no_such_module"], 60),
            ("prints-nonsense", code("print('[1, 2')", "--json"), 60),
            ("prints-another-thing", code("print('{\"sides\": 3}')", "--json"), 60),
            ("counts", code("print('====== 21 passed in 93.1s ======')"), 60),
        ],
        100,
        helpers,
    )
    results = {name: (part["result"], part["code"]) for name, part in found.items()}
    assert results == {
        "measures": ("passed", 0),
        "compares": ("failed", 3),
        "crashes": ("failed", -11),
        "hangs": ("timed out", None),
        "is-no-module": ("failed", 1),
        "prints-nonsense": ("passed", 0),
        "prints-another-thing": ("passed", 0),
        "counts": ("passed", 0),
    }
    assert 3 <= found["hangs"]["seconds"] < 20
    lost, begun = (tmp_path / "hangs.txt").read_text().split()
    assert begun == "begun" and not psutil.pid_exists(int(lost))
    assert found["compares"]["last"] == ["the last word"] and "no_such_module" in found["is-no-module"]["last"][-1]


@pytest.mark.quick
def test_the_table_shows_what_was_measured_and_why_a_part_failed(tmp_path: Path, helpers: Any) -> None:
    parts = [("a", code(MEASURES, "--json"), 60.0), ("b", code(COMPARES, "--json"), 60.0)]
    run_parts(tmp_path, parts, 100, helpers)
    text = (tmp_path / "summary.md").read_text()
    assert "NVIDIA H100, torch 2.11.0, Python 3." in text
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert {len(row) for row in rows} == {8}
    assert rows[0] == ["part", "result", "s", "step", "tokens/s", "MFU", "memory", "further"]
    assert rows[2][:2] == ["a", "passed"]
    assert rows[2][3:] == ["0.8 [0.7 to 0.9]s", "40K", "51.2%", "32 GiB", ""]
    assert [row[0] for row in rows[3:]] == ["b: ours", "b: minimal", "b: torchtitan", "b: transformers"]
    assert (
        rows[3][-1] == ""
        and rows[4][-1] == "1.02 [1 to 1.1] of ours"
        and rows[6][-1] == "failed: OutOfMemoryError: 8 GiB"
    )
    assert text.index("## b: failed (exit 3)") < text.index("    the last word")


@pytest.mark.quick
def test_what_does_not_fit_is_ended_or_not_started(tmp_path: Path, helpers: Any) -> None:
    sleeps = code("import time; time.sleep(600)")
    begun = time.monotonic()
    found = run_parts(tmp_path, [("long", sleeps, 600), ("later", sleeps, 600)], 7, helpers)
    assert time.monotonic() - begun < 60
    assert [part["result"] for part in found.values()] == ["timed out", "not started"]
    assert "| later | not started | 0 |" in (tmp_path / "summary.md").read_text()


@pytest.mark.quick
def test_only_known_parts(helpers: Any, tmp_path: Path) -> None:
    environment = helpers.environment(PYTHON=sys.executable)
    done = subprocess.run(
        [SCRIPT, "--only", "suite,suit", tmp_path / "out"], capture_output=True, text=True, env=environment, cwd="/"
    )
    assert done.returncode == 78 and "suite, peers-7b" in done.stderr and not (tmp_path / "out").exists()


def dry_run(out: Path, helpers: Any, *flags: str) -> list[dict[str, Any]]:
    """`scripts/test_gpu.sh --dry` with these flags; the parts of its summary."""
    environment = helpers.environment(PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(
        [SCRIPT, "--dry", *flags, out.name], capture_output=True, text=True, env=environment, cwd=out.parent
    )
    summary = json.loads((out / "summary.json").read_text())
    assert done.stdout == (out / "summary.md").read_text() and summary["device"] == "cpu"
    failed = [part["name"] for part in summary["parts"] if part["result"] != "passed"]
    assert done.returncode == 0 and not failed, done.stdout
    assert not (out / "scratch").exists()
    parts: list[dict[str, Any]] = summary["parts"]
    return parts


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_dry_run_of_some_parts(tmp_path: Path, helpers: Any) -> None:
    parts = dry_run(tmp_path / "out", helpers, "--only", "suite,7b-kernels,features")
    assert [part["name"] for part in parts] == ["suite", "7b-kernels", "features"]
    assert "collected" in parts[0]["figures"][0]["further"] and parts[2]["figures"][0]["further"]
    kernels = json.loads((tmp_path / "out/7b-kernels.json").read_text())["kernel_seconds"]
    assert {"attention default", "loss eager"} <= kernels.keys()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_dry_run_of_all_parts(tmp_path: Path, helpers: Any) -> None:
    parts = dry_run(tmp_path / "out", helpers, "--minutes", "15")
    assert len(parts) > 10 and all(part["figures"] for part in parts)
    document = json.loads((tmp_path / "out/7b-document.json").read_text())
    assert document["run"] == "bench-llama-7b-layers" and document["tokens_per_second"]
