"""Makes the recorded run of `released.py`: the run, its corpus and its configuration.

    python tests/releases/make.py tests/releases/0.1.0.tar.xz

The run was rolled back, evaluated, and finally killed; `rollback.json` is a second rollback of it that was
decided and not carried out.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from laboratory import make_text, write_jsonl
from processes import as_rank, free_port
from sight import agents, alarms, until

ROOT = Path(os.environ.get("FSDP_PRETRAIN_ROOT", Path(__file__).resolve().parent.parent.parent))
HOME = Path("/tmp/fsdp-pretrain-release")
"""Where it is made: paths in the record are the same on every machine, and replaced when it is unpacked."""
CONFIG = """
run = { name = "release", dir = "/tmp/fsdp-pretrain-release/run" }
model = { family = "llama", layers = 1, hidden = 4, heads = 1, ffn = 4, vocab = 272, tied_head = true }
train = { duration = "12 steps", global_batch = "4 samples", micro_batch = 4 }
optimizer = { lr = 1e-2, curve = "constant", warmup = "4 steps" }
checkpoint = { every = "4 steps", keep_last = 2, keep_every = "8 steps" }
eval = { tasks = ["heldout_bpb"], every = "8 steps", launch = false, heldout = "/tmp/fsdp-pretrain-release/heldout.jsonl" }
record = { console_every = 4 }
[data]
sequence_length = 16
lanes = 4
sources = [{ name = "text", path = "/tmp/fsdp-pretrain-release/corpus" }]
"""


def environment(**more: str) -> dict[str, str]:
    """A plain shell's environment, without names of this machine."""
    plain = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
    user = {"USER": "operator", "LOGNAME": "operator", "HOME": str(HOME), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {**plain, **user, "PYTHONPATH": str(ROOT), **more}


def command(module: str, *arguments: object, expect: int = 0) -> str:
    """Run a command of the release; its output."""
    line = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(line, cwd=HOME, env=environment(), capture_output=True, text=True)
    assert done.returncode == expect, f"{line}: exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def train(*overrides: str) -> subprocess.Popen[bytes]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    rank = as_rank(0, 1, 1, free_port())
    line = [sys.executable, "-m", "fsdp_pretrain.train", "run.toml", *overrides]
    return subprocess.Popen(line, cwd=HOME, env=environment(**{name: rank[name] for name in names}))


def make_run(run: Path) -> None:
    """Train, roll back, continue, evaluate, kill."""
    assert train("watchdog.enabled=false").wait() == 0
    command("fsdp_pretrain.cli", "note", run, "a person's line", "--step", 8)
    command(
        "fsdp_pretrain.cli",
        *("rollback", run, "--to", 8, "--skip-steps", "10:11", "--set", "optimizer.lr=5e-3", "--reason", "a spike"),
    )
    assert train("watchdog.enabled=false", "train.duration=16 steps").wait() == 0
    command("fsdp_pretrain.eval.cli", "watch", run, "--once")
    job = train("train.duration=100000 steps", "checkpoint.every=24 steps")
    newest = run / "segments/0004/metrics.jsonl"
    until(lambda: newest.exists() and len(newest.read_bytes().splitlines()) > 12)
    job.kill()
    job.wait()
    until(lambda: alarms(run, "rank-died"))
    until(lambda: not agents(run))


def decide_rollback(run: Path) -> str:
    """A `rollback.json` of the run as it is: a copy's rollback is decided and cannot be carried out."""
    copy = HOME / "copy"
    shutil.copytree(run, copy)
    (copy / "status.json").unlink()
    (copy / "status.json").mkdir()
    command("fsdp_pretrain.cli", "rollback", copy, "--to", 8, "--reason", "decided, not done", expect=93)
    decided = (copy / "rollback.json").read_text()
    shutil.rmtree(copy)
    return decided


def entry(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """An archive member without its owner; None for tensors that no command reads."""
    unread = info.name.endswith(".distcp") and ("abandoned/" in info.name or ".writing-" in info.name)
    return None if unread else info.replace(uid=0, gid=0, uname="", gname="", deep=False)


def main() -> None:
    """Make the archive named on the command line."""
    out = Path(sys.argv[1]).resolve()
    if ctypes.CDLL(None).unshare(0x04000000):  # CLONE_NEWUTS
        raise PermissionError("a host name of its own needs root")
    socket.sethostname("node-0")
    shutil.rmtree(HOME, ignore_errors=True)
    HOME.mkdir()
    (HOME / "run.toml").write_text(CONFIG)
    write_jsonl(HOME / "train.jsonl", [make_text(n, 3 + n % 27) for n in range(200)])
    write_jsonl(HOME / "heldout.jsonl", [make_text(1000 + n, 15) for n in range(4)])
    tokenizer = ("--kind", "bpe", "--vocab-size", 272, "--out", "tokenizer")
    command("fsdp_pretrain.data.cli", "train-tokenizer", "train.jsonl", *tokenizer)
    command(
        "fsdp_pretrain.data.cli", "prepare", "train.jsonl", "--tokenizer", "tokenizer", "--out", "corpus", "--quiet"
    )
    make_run(HOME / "run")
    (HOME / "rollback.json").write_text(decide_rollback(HOME / "run"))
    with tarfile.open(out, "w:xz", preset=9) as archive:
        for name in ("run.toml", "rollback.json", "heldout.jsonl", "corpus", "run"):
            archive.add(HOME / name, name, filter=entry)
    shutil.rmtree(HOME)
    print(f"{out}: {out.stat().st_size:_} bytes")


if __name__ == "__main__":
    main()
