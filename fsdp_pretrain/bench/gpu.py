"""The GPU suite and the benchmarks in nine minutes, the most valuable part first: `scripts/test_gpu.sh [OUTDIR]`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fsdp_pretrain.console import Parser, run_guarded
from fsdp_pretrain.errors import ConfigError

from .parts import SCRATCH, TABLE, Part, Report, run_parts

_7B, _1B, _SAVES = (f"configs/bench/{name}-gpu.toml" for name in ("llama-7b-layers", "llama-1b", "saves"))
_DOCUMENTS, _EAGER = "data.attention=document", "parallel.compile=false"
_DEVICE_SECONDS = 120.0
"""The first import of torch on a new machine reads gigabytes."""
_TOY = (
    *("model.layers=1", "model.hidden=32", "model.heads=2", "model.ffn=64", "model.vocab=128"),
    *("model.kv_heads=1", "data.sequence_length=16", "train.micro_batch=2", "train.global_batch=4 samples"),
    *("train.precision=fp32", _EAGER),
)
"""Overrides that make every configuration tiny."""


def _length(tokens: int, micro: int, batch: int) -> tuple[str, ...]:
    """Another sequence length, and a batch with as many tokens as the configuration's."""
    return f"data.sequence_length={tokens}", f"train.micro_batch={micro}", f"train.global_batch={batch} samples"


class PartList:
    """The parts in order.

    Args:
        out: directory of the results.
        dry: toys and few steps, for any machine.
    """

    def __init__(self, out: Path, *, dry: bool) -> None:
        self._out, self._dry = out, dry
        self.parts: list[Part] = []
        self._add_suite()
        self._bench("peers-7b", _7B, flags=("--peers", "--side-limit", "90"), limit=190, steps=6, rounds=2)
        self._bench("7b-document", _7B, _DOCUMENTS, limit=60)
        self._bench("7b-kernels", _7B, flags=("--kernels",), limit=60, steps=10, rounds=3)
        self._bench("saves", _SAVES, flags=("--saves", self._scratch), limit=70, steps=5, warmup=3, rounds=1)
        self._bench("7b-eager", _7B, _EAGER, limit=45)
        self._bench("7b-8k", _7B, *_length(8192, 1, 4), limit=45)
        self._bench("1b", _1B, limit=60)
        flags = ("--watchdog", self._scratch, "--seconds", "1" if dry else "5")
        self._bench("watchdog", _1B, "train.global_batch=4 samples", flags=flags, limit=75, steps=15, warmup=3)
        self._bench("7b-2k", _7B, *_length(2048, 4, 16), limit=45)
        self._bench("7b-document-8k", _7B, _DOCUMENTS, *_length(8192, 1, 4), limit=45)
        self._bench("features", _SAVES, flags=("--features", self._scratch), limit=80, steps=20, rounds=2)
        self._bench("1b-document", _1B, _DOCUMENTS, limit=45)
        self._bench("1b-eager", _1B, _EAGER, limit=45)
        self._bench("1b-8k", _1B, *_length(8192, 2, 4), limit=45)
        self._bench("1b-2k", _1B, *_length(2048, 8, 16), limit=45)
        self._bench("peers-1b", _1B, flags=("--peers", "--side-limit", "70"), limit=150, steps=8, rounds=2)

    @property
    def _scratch(self) -> str:
        return str(self._out / SCRATCH)

    def _add_suite(self) -> None:
        # Its tests mostly wait for processes they have started. More of them at once might not fit on the device.
        workers = ("--numprocesses=3", "--dist=worksteal") if importlib.util.find_spec("xdist") else ()
        how = ("--collect-only", "--quiet") if self._dry else ("-v", "--tb=short", "-o", "timeout=150", *workers)
        self.parts.append(Part("suite", ("-m", "pytest", "-m", "gpu", "tests/gpu", *how), 200))

    def _bench(
        self,
        name: str,
        config: str,
        *overrides: str,
        limit: float,
        flags: tuple[str, ...] = (),
        steps: int = 8,
        warmup: int = 4,
        rounds: int | None = None,
    ) -> None:
        times = {"--steps": steps, "--warmup": warmup, **({} if rounds is None else {"--rounds": rounds})}
        counts = [text for flag, count in times.items() for text in (flag, str(1 if self._dry else count))]
        toy = _TOY if self._dry else ()
        command = ("-m", "fsdp_pretrain.bench", config, *overrides, *toy, *flags, *counts, "--json")
        self.parts.append(Part(name, command, limit))


def _device() -> tuple[str, str]:
    """Name of the GPU, or `cpu`, and the version of torch, from another process: here no GPU's memory is taken.

    Raises:
        ConfigError: torch or a base dependency cannot be imported, or the driver does not answer.
    """
    code = "import torch, fsdp_pretrain.bench.steps; gpu = torch.cuda.is_available()\n"
    code += "print(torch.cuda.get_device_name() if gpu else 'cpu', torch.__version__, sep='\\n')"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_DEVICE_SECONDS)
        name, version = done.stdout.split("\n")[:2]
    except (subprocess.TimeoutExpired, ValueError) as error:
        last = str(error) if isinstance(error, subprocess.TimeoutExpired) else done.stderr.strip().split("\n")[-1]
        raise ConfigError(
            f"{sys.executable} cannot say which GPU it has: {last}",
            remedy="give it torch with CUDA and the base dependencies, for example by PYTHONPATH, or name another "
            "Python in PYTHON",
        ) from None
    return name, version


def main() -> int:
    """Command line."""
    parser = Parser(prog="scripts/test_gpu.sh", description=__doc__)
    parser.add_argument("out", nargs="?", type=Path, metavar="OUTDIR", help="for results (default: a temporary one)")
    parser.add_argument("--only", metavar="A,B", help="these parts, separated by commas (default: all)")
    parser.add_argument("--minutes", type=float, default=8.5, help="for all parts; the rest are not started")
    parser.add_argument("--dry", action="store_true", help="all parts with toys: needs no GPU")
    parser.add_argument("--list", action="store_true", help="show the parts and their limits")
    args = parser.parse_args()
    out = (args.out or Path(tempfile.gettempdir()) / f"test-gpu-{os.getpid()}").absolute()
    parts = PartList(out, dry=args.dry).parts
    chosen = [part for part in parts if args.only is None or part.name in args.only.split(",")]
    if args.only is not None and len(chosen) < len(set(args.only.split(","))):
        parser.error(f"--only {args.only}: the parts are {', '.join(part.name for part in parts)}")
    if args.list:
        print("\n".join(f"{part.name:<16} {part.limit:.0f}s" for part in chosen))
        return 0
    began, (device, version) = time.monotonic(), _device()
    if device == "cpu" and not args.dry and any(part.name != "suite" for part in chosen):
        raise ConfigError("there is no GPU here for the benchmarks", remedy="--dry runs all parts with toys")
    out.mkdir(parents=True, exist_ok=True)
    print(f"results: {out}", file=sys.stderr, flush=True)
    report = Report("Dry run: toys, no figures to quote" if args.dry else "GPU suite and benchmarks", device, version)
    left = 60 * args.minutes - (time.monotonic() - began)
    outcomes = run_parts(chosen, out, report=report, seconds=left)
    print((out / TABLE).read_text(encoding="utf-8"), end="")
    return 1 if any(outcome.result in ("failed", "timed out") for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(run_guarded(main))
