"""Command-line mistakes and operating system errors: one message and the same exit codes everywhere."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import Run

from fsdp_pretrain.console import run_guarded

CLIS = ("fsdp_pretrain.data.cli", "fsdp_pretrain.cli", "fsdp_pretrain.eval.cli")


@pytest.mark.shows("D6")
@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        *((module, arguments) for module in CLIS for arguments in ([], ["nope"])),
        ("fsdp_pretrain.data.cli", ["validate"]),
        ("fsdp_pretrain.data.cli", ["validate", "DIR", "--format", "nope"]),
        ("fsdp_pretrain.data.cli", ["prepare", "IN", "--tokenizer", "T", "--out", "OUT", "--part", "3/2"]),
        ("fsdp_pretrain.cli", ["status", "/nowhere"]),
        ("fsdp_pretrain.cli", ["checkpoints", "/nowhere", "nope"]),
        ("fsdp_pretrain.eval.cli", ["report", "RUN", "--nope"]),
    ],
)
def test_a_mistake_in_the_arguments_is_no_finding(run_command: Run, module: str, arguments: list[str]) -> None:
    """Exit 78, not the 2 that means errors or an alert."""
    done = run_command(module, *arguments)
    assert done.returncode == 78 and done.stderr.startswith("usage:") and "error:" in done.stderr


def test_a_misspelt_verb_is_answered_with_the_nearest(run_command: Run) -> None:
    done = run_command("fsdp_pretrain.cli", "stauts", "run")
    assert done.returncode == 78 and "there is no verb 'stauts'; did you mean status?" in done.stderr
    assert "did you mean control RUN stop?" in run_command("fsdp_pretrain.cli", "stop", "run").stderr
    listed = run_command("fsdp_pretrain.cli", "--help").stdout
    groups = [line for line in listed.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert groups[-4:] == ["start:", "look:", "keep and share:", "steer:"] and "config-reference" not in listed


@pytest.mark.parametrize(
    "verb",
    [
        *(
            "status",
            "alarms",
            "alarms {} ack hang",
            "ack {} hang",
            "alarms {} test",
            "rollback {} --to 2",
            "fork {} --at 2 NEW",
        ),
        *("control {} save", "watch", "where {} --step 2", "journal", "goodput", "note {} text", "doctor --run {}"),
        *("track {} --to wandb", "aim", "tensorboard", "wandb"),
        *(f"checkpoints {{}} {action}" for action in ("list", "verify", "export 2 OUT")),
        *(f"eval {rest}" for rest in ("run", "watch {} --once", "samples {} --step 2", "report")),
    ],
)
def test_a_path_that_is_no_run_is_refused_by_every_verb(run_command: Run, tmp_path: Path, verb: str) -> None:
    """Exit 78 with the path, not an empty answer and 0, and not the 2 of an alert."""
    module = "fsdp_pretrain.eval.cli" if verb.startswith("eval ") else "fsdp_pretrain.cli"
    words = verb.removeprefix("eval ").split()
    words = [tmp_path if word == "{}" else word for word in (words if "{}" in words else [*words, "{}"])]
    done = run_command(module, *words)
    assert done.returncode == 78 and f"{tmp_path} is not a run directory" in done.stderr, done
    assert done.stdout == "" and "Traceback" not in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "path", "code", "expected"),
    [
        (errno.ENOSPC, "/data/out", 93, "cannot use /data/out: No space left on device\n  remedy: free space"),
        (errno.ENOSPC, None, 93, "cannot use a file or standard output: No space left on device\n  remedy: free space"),
        (errno.EIO, b"/data/in", 93, "cannot use /data/in: Input/output error\n  remedy: free space"),
        (errno.EACCES, "/data/in", 78, "cannot use /data/in: Permission denied\n  remedy: look for a mistake"),
        (errno.EROFS, "/data/out", 78, "made writable"),
    ],
)
def test_what_the_operating_system_refuses_is_one_message(
    number: int, path: Any, code: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def act() -> int:
        raise OSError(number, "anything", path)

    assert run_guarded(act) == code
    output = capsys.readouterr().err
    assert output.startswith("error: ") and expected in output and "Traceback" not in output


@pytest.mark.parametrize(
    "error", [OSError("no number"), OSError(errno.EPERM, "no path"), OSError(errno.ECONNREFUSED, "a socket")]
)
def test_other_errors_keep_their_traceback(error: OSError) -> None:
    def act() -> int:
        raise error

    with pytest.raises(OSError) as raised:
        run_guarded(act)
    assert raised.value is error


def command(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, arguments)], cwd="/", text=True, **options)


def test_output_that_cannot_be_written(helpers: Any, shared_corpus: Path) -> None:
    """Detected before Python would fail on it at exit."""
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = command(
            *("-m", "fsdp_pretrain.data.cli", "inspect", shared_corpus / "corpus"),
            stdout=full, stderr=subprocess.PIPE, env=helpers.environment(PYTHONUNBUFFERED=""),
        )  # fmt: skip
    assert done.returncode == 93
    assert done.stderr.startswith("error: cannot use standard output: No space left on device\n  remedy: ")
    assert len(done.stderr.splitlines()) == 2


def test_output_that_cannot_be_shown(helpers: Any, shared_corpus: Path) -> None:
    """Text with characters that the encoding of standard output lacks."""
    lines = (shared_corpus / "train.jsonl").read_text().splitlines()
    number = next(n for n, line in enumerate(lines) if not json.loads(line)["text"].isascii())
    done = command(
        *("-m", "fsdp_pretrain.data.cli", "inspect", shared_corpus / "corpus", "--doc", number),
        capture_output=True, env=helpers.environment(PYTHONIOENCODING="ascii"),
    )  # fmt: skip
    assert done.returncode == 0 and ("\\xe9" in done.stdout or "\\u6587" in done.stdout), done.stderr


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("fsdp_pretrain.eval.cli", "samples RUN --step 2"),
        ("fsdp_pretrain.cli.main", "plan CONFIGS/runs/quickstart.toml"),
    ],
)
def test_what_needs_torch_names_the_extra_to_install(helpers: Any, tmp_path: Path, module: str, words: str) -> None:
    (tmp_path / "segments").mkdir()
    configs = Path(__file__).parent.parent / "configs"
    arguments = words.replace("RUN", str(tmp_path)).replace("CONFIGS", str(configs)).split()
    code = f"import sys; sys.modules['torch'] = None; from {module} import main; sys.exit(main())"
    done = command("-c", code, *arguments, capture_output=True, env=helpers.environment())
    assert done.returncode == 78 and "with torch, which is not installed" in done.stderr, done.stderr
    assert (
        f"remedy: pip install -e '{Path(__file__).resolve().parents[1]}[train]'" in done.stderr
        and "Traceback" not in done.stderr
    )
