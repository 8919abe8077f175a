"""Mutated files for every reader of external files: each must end with an exit code, in bounded time and memory.

    python tests/fuzz.py                                   4,000 files with seed 1; the slow tests run 600
    python tests/fuzz.py --seed 7 --cases 2000 --only zst parquet
    python tests/fuzz.py --seed 7 --only zst --case 412    repeat one case: prints its output and keeps its files

A case copies a small valid input, damages one of its files and runs one command in a forked process. It fails if the
process dies of a signal, prints a traceback, returns a code it may not, takes over 30 s of processor time, grows by more
than 200 MB and twice the size of its files, or if documents disappear without being counted. Exit 0 if no case fails.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from fuzz_kinds import Kind, isolated, make_kinds  # noqa: E402
from processes import IMPORTS  # noqa: E402

GROWTH = 200 << 20
ENVIRONMENT = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # does not reserve addresses it may never use
    "MALLOC_ARENA_MAX": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}


@dataclass(frozen=True)
class Case:
    """Result of one damaged file; `problem` is empty if all is well."""

    name: str
    number: int
    command: str
    file: str
    problem: str
    code: int
    output: str


# ------------------------------------------------------------------- damage


def damaged(rng: random.Random, name: str, content: bytes) -> bytes:
    """Content with one to three damages."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        content = _damage(rng, name, content)
    return content


def _damage(rng: random.Random, name: str, content: bytes) -> bytes:
    if name.endswith((".json", ".jsonl")) and rng.random() < 0.6:
        return _damage_json(rng, content)
    if not content:
        return rng.randbytes(rng.randint(1, 64))
    at = rng.randrange(len(content))
    if rng.random() < 0.3:  # formats keep what counts at their ends
        at = rng.choice((at % 64, max(0, len(content) - 1 - at % 64)))
    span = rng.choice((1, 2, 4, 8, 64, len(content) // 3 + 1))
    number = rng.choice((0, 1, -1, -2, 127, 255, 65535, 2**31 - 1, -(2**31), 2**32, 2**40, 2**63 - 1, -(2**63)))
    width = rng.choice((1, 2, 4, 8))
    return rng.choice(
        (
            lambda: content[:at] + bytes([content[at] ^ (1 << rng.randrange(8))]) + content[at + 1 :],
            lambda: content[:at] + rng.randbytes(1) + content[at + 1 :],
            lambda: content[:at],
            lambda: content[:at] + content[at + span :],
            lambda: content[:at] + content[at : at + span] * 2 + content[at + span :],
            lambda: content[:at] + bytes(span) + content[at + span :],
            lambda: content[:at] + rng.randbytes(span) + content[at:],
            lambda: content[:at] + (number % 256**width).to_bytes(width, "little") + content[at + width :],
            lambda: content[at:] + content[:at],
            lambda: content + content,
        )
    )()


def _damage_json(rng: random.Random, content: bytes) -> bytes:
    """Replace a value of a JSON file, or of one line of a JSONL file."""
    lines = content.split(b"\n")
    whole = content.lstrip().startswith(b"{\n") or content.lstrip().startswith(b"[")
    at = rng.randrange(len(lines))
    try:
        value = json.loads(content if whole else lines[at])
    except (ValueError, RecursionError):
        return content[: rng.randrange(len(content) + 1)]
    holders = [holder for holder in _holders([value]) if holder]
    holder = rng.choice(holders)
    key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    odd = (None, True, -1, 0, 10**30, 1.5, float("nan"), "", "x", "\ud800", "../x", [], {}, [[]], {"a": 1}, "9" * 5000)
    if rng.random() < 0.25 and holder is not holders[0]:
        del holder[key]
    elif rng.random() < 0.1 and isinstance(holder, dict):
        holder[rng.choice(("x", key + "x", ""))] = holder.pop(key)
    else:
        holder[key] = rng.choice(odd)
    text = json.dumps(holders[0][0])
    if rng.random() < 0.02:
        text = "[" * 100_000 + "]" * 100_000
    lines[at : at + 1] = [text.encode()]
    return text.encode() if whole else b"\n".join(lines)


def _holders(value: Any) -> Iterator[Any]:
    """Every list and object inside a JSON value, outermost first."""
    if isinstance(value, list | dict):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _holders(inner)


# ------------------------------------------------------------------- one case


def run_command(folder: Path, command: str) -> int:
    """Run `python -m MODULE ARGUMENTS` in a folder."""
    module, *arguments = shlex.split(command.format(folder=folder))
    os.chdir(folder)
    sys.argv = [module, *arguments]
    program = importlib.import_module("fsdp_pretrain.job.main" if module == "fsdp_pretrain.train" else module)
    if hasattr(program, "__path__"):  # a package
        program = importlib.import_module(f"{module}.main")
    return int(program.main())


def run_case(kinds: dict[str, Kind], name: str, number: int, seed: int, inputs: Path, scratch: Path) -> Case:
    """Damage one file and read it; `scratch` holds it afterwards."""
    kind, rng = kinds[name], random.Random(f"{seed}/{name}/{number}")
    folder, log = scratch / "case", scratch / "log"
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(inputs / name, folder, symlinks=True)
    victim = rng.choice(sorted(path for pattern in kind.victims for path in folder.glob(pattern) if path.is_file()))
    victim.write_bytes(damaged(rng, victim.name, victim.read_bytes()))
    command = rng.choice(kind.commands)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    code, grown = isolated(lambda: run_command(folder, command), log, size)
    output = log.read_text(errors="replace")
    if code < 0:
        problem = f"died of {signal.Signals(-code).name}"
    elif "Traceback (most recent call last)" in output or "panicked at" in output:
        problem = "traceback"
    elif code not in kind.codes:
        problem = f"exit code {code}"
    elif grown > GROWTH + 2 * size:
        problem = f"grew by {grown >> 20} MB"
    else:
        problem = kind.lost(folder) if code == 0 else "" if output.strip() else "no word"
    return Case(name, number, command, str(victim.relative_to(folder)), problem, code, output)


# ------------------------------------------------------------------- all cases


def main() -> int:
    """Run the cases; 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=4000, help="how many files, over all kinds (default: 4000)")
    parser.add_argument("--only", nargs="+", default=[], metavar="KIND", help="only these kinds of files")
    parser.add_argument("--case", type=int, help="only this case of the kind named by --only; its files are kept")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    args = parser.parse_args()
    if any(os.environ.get(key) != value for key, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    kinds = make_kinds(folder / "shared")
    for name, kind in kinds.items():
        (folder / "inputs" / name).mkdir(parents=True)
        kind.make(folder / "inputs" / name)
    imports = (*IMPORTS["data"], *IMPORTS["rest"])
    for module in (
        *imports,
        "fsdp_pretrain.eval.cli",
        "fsdp_pretrain.eval.jobs",
        "fsdp_pretrain.eval.tasks",
        "pyarrow.parquet",
    ):
        importlib.import_module(module)
    if args.case is not None:
        case = run_case(kinds, args.only[0], args.case, args.seed, folder / "inputs", folder / "kept")
        print(f"{case.command}\n{case.file}: exit {case.code}, {case.problem or 'as it should be'}\n{case.output}")
        print(f"its files: {folder / 'kept/case'}")
        return int(bool(case.problem))
    chosen = {name: kind for name, kind in kinds.items() if not args.only or name in args.only}
    total = sum(kind.share for kind in chosen.values())
    cases = [(name, n) for name, kind in chosen.items() for n in range(-(-args.cases * kind.share // total))]

    def work(worker: int) -> list[Case]:
        scratch = folder / str(worker)
        mine = tqdm(cases[worker :: args.workers], unit=" files", disable=worker > 0 or not sys.stderr.isatty())
        return [run_case(kinds, *case, args.seed, folder / "inputs", scratch) for case in mine]

    found = [case for done in forked(work, args.workers) for case in done]
    shutil.rmtree(folder)
    return int(tell(found))


def forked(work: Callable[[int], list[Case]], workers: int) -> list[list[Case]]:
    """What `work` makes of each worker's number, each in a process of its own."""
    begun = []
    for number in range(workers):
        ours, theirs = os.pipe()
        if os.fork() == 0:
            with os.fdopen(theirs, "wb") as out:
                pickle.dump(work(number), out)
            os._exit(0)
        os.close(theirs)
        begun.append(os.fdopen(ours, "rb"))
    return [pickle.load(reader) for reader in begun]


def tell(found: list[Case]) -> bool:
    """Print one failure of each sort, and the exit codes by kind; whether any failed."""
    alike: dict[tuple[str, str, str], list[Case]] = {}
    for case in (case for case in found if case.problem):
        last = (case.output.strip().splitlines() or [""])[-1][:300]
        alike.setdefault((case.name, case.problem, re.sub(r"\d+", "N", last)), []).append(case)
    for (name, problem, last), (case, *others) in alike.items():
        print(f"{1 + len(others)} x {name}, case {case.number} ({case.file}): {problem}; {case.command}\n    {last}")
    for name, count in Counter(case.name for case in found).items():
        codes = dict(sorted(Counter(case.code for case in found if case.name == name).items()))
        print(f"{name:15} {count:6} files, by exit code {codes}")
    print(f"{len(found)} files, {sum(map(len, alike.values()))} failed")
    return bool(alike) or not found


if __name__ == "__main__":
    sys.exit(main())
