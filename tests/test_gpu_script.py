"""`scripts/test_gpu.sh`: parts are isolated, limits hold, and the summary is written, on a machine without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT
from sight import lives, until

SCRIPT = ROOT / "scripts/test_gpu.sh"
PRETENDS = """#!{python}
import os, signal, subprocess, sys, time
text = " ".join(sys.argv)
if sys.argv[1] == "-c":
    print("{lacks}" if "find_spec" in text else "cpu torch 2.13.0")
elif "pytest" in sys.argv:
    print("====== 21 passed in 93.1s ======")
elif "--peers" in text:
    print("the last word", file=sys.stderr)
    sys.exit(3)
elif "attention=document" in text:
    os.kill(os.getpid(), signal.SIGSEGV)
elif "--saves" in text:
    try:
        print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
        time.sleep(600)
    except KeyboardInterrupt:
        print("what it has")
"""
"""A Python whose benchmarks crash, fail and hang."""


def run(helpers: Any, *arguments: object, python: object = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = helpers.environment(PYTHON=str(python), CUDA_VISIBLE_DEVICES="")
    command = [str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", timeout=1100)


@pytest.mark.slow
@pytest.mark.quick
@pytest.mark.timeout(120)
def test_no_part_ends_another_and_what_does_not_fit_is_not_started(tmp_path: Path, helpers: Any) -> None:
    pretends = tmp_path / "python"
    pretends.write_text(PRETENDS.format(python=sys.executable, lacks=""))
    pretends.chmod(0o755)
    begun = time.monotonic()
    done = run(helpers, "--dry", "--minutes", "0.2", tmp_path / "out", python=pretends)
    assert time.monotonic() - begun < 60 and done.returncode == 1, done.stderr
    assert done.stdout == (tmp_path / "out/summary.md").read_text()
    said = [line.split(": ") for line in done.stderr.splitlines() if line.endswith(" s")]
    results = {name: text.split(",")[0] for name, text in said}
    assert list(results.items())[:7] == [
        ("suite", "passed"),
        ("peers-7b", "failed (exit 3)"),
        ("7b-rank", "passed"),
        ("7b-rank-float8", "passed"),
        ("7b-trace", "passed"),
        ("7b-document", "failed (exit 139)"),
        ("saves", "timed out"),
    ]
    assert set(list(results.values())[7:]) == {"not started"}
    assert "21 passed" in done.stdout and "    the last word" in done.stdout and "    what it has" in done.stdout
    child = int((tmp_path / "out/saves.txt").read_text().split()[0])
    until(lambda: not lives(child), what="the end of what the part had started")


@pytest.mark.quick
def test_missing_packages_are_named_at_once(tmp_path: Path, helpers: Any) -> None:
    pretends = tmp_path / "python"
    pretends.write_text(PRETENDS.format(python=sys.executable, lacks="pydantic zstandard"))
    pretends.chmod(0o755)
    done = run(helpers, tmp_path / "out", python=pretends)
    assert done.returncode == 78 and "lacks pydantic zstandard" in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--only", "suite,suit"], "suite peers-7b"),
        (["--minutes", "soon"], "soon is not a number"),
        (["--only", "1b"], "no GPU here"),
    ],
)
def test_mistakes_are_refused(helpers: Any, tmp_path: Path, arguments: list[str], text: str) -> None:
    done = run(helpers, *arguments, tmp_path / "out")
    assert done.returncode == 78 and text in done.stderr and not (tmp_path / "out/summary.md").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_dry_run(tmp_path: Path, helpers: Any) -> None:
    """One part of every kind."""
    chosen = ["suite", "peers-7b", "7b-document", "saves"]
    done = run(helpers, "--dry", "--minutes", "15", "--only", ",".join(chosen), tmp_path)
    assert done.returncode == 0 and not (tmp_path / "scratch").exists(), done.stdout
    parts = [line.removeprefix("## ").partition(":")[0] for line in done.stdout.splitlines() if ": passed, " in line]
    assert sorted(parts) == sorted(chosen) and "collected" in (tmp_path / "suite.txt").read_text()
    assert all((tmp_path / f"{name}.json").stat().st_size for name in parts if name != "suite")
    document = json.loads((tmp_path / "7b-document.json").read_text())
    assert document["run"] == "bench-llama-7b-layers" and document["speed"]["tokens_per_second"]
    assert json.loads((tmp_path / "saves.json").read_text())[0]["plain"] > 0
