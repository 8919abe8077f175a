"""Ranks can open a socket to every other rank, or nothing starts."""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

import pytest

from fsdp_pretrain.open_files import files_needed

pytestmark = pytest.mark.quick
RAISE = "from fsdp_pretrain.open_files import raise_limit; import resource, sys; raise_limit(int(sys.argv[1]));"
SHOW = "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"


def limited(soft: int, hard: int, *line: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command with these limits on open files."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return subprocess.run(
        [str(part) for part in line], preexec_fn=limit, capture_output=True, text=True, check=False, **options
    )


@pytest.mark.parametrize(
    ("soft", "hard", "needed", "expected"), [(128, 4096, 300, "4096"), (512, 4096, 300, "512"), (128, 128, 100, "128")]
)
def test_a_limit_is_raised_as_far_as_the_host_allows(
    helpers: Any, soft: int, hard: int, needed: int, expected: str
) -> None:
    done = limited(soft, hard, sys.executable, "-c", RAISE + SHOW, needed, env=helpers.environment())
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected


def test_a_job_that_is_too_large_for_the_host_is_refused(lab: Any) -> None:
    """By a rank before it connects to others."""
    limit = lab.path / "limit.py"
    limit.write_text("import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))\n")
    world = {"WORLD_SIZE": "1024", "LOCAL_WORLD_SIZE": "8", "EXECUTE_FIRST": str(limit)}
    output = lab.train(lab.config(), expect=78, variables=world)
    said = f"allows 1024 open files in a process, and a rank of this world needs {files_needed(1024, 8)}"
    assert said in output
    assert not list(lab.path.glob("run/segments/*"))
