"""`fsdp-pretrain checkpoints RUN ...`: look at a run's checkpoints, prove them, keep them, convert them."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import tomli_w
from tqdm import tqdm

from .arguments import check_begun
from .changes import load_compatible
from .checkpoint.hf_layout import ACCEPTABLE, read_model
from .checkpoint.metadata import wrong_metadata
from .checkpoint.store import CONFIG, MANIFEST, Checkpoint, verify_files
from .checkpoint.stores import Stores, stores
from .config import load
from .console import Command, add_verb, byte_count
from .errors import CheckpointError, ConfigError
from .record import state_files
from .record.files import RunDir
from .status import ALERT
from .units import human_bytes, human_count


def add(command: Command) -> None:
    """Add the verb `checkpoints` with its actions."""
    parser = command.verb(
        "checkpoints",
        _list,
        "The checkpoints of a run: list, verify, pin, export to Hugging Face, import from it. Each has its --help.",
        "fsdp-pretrain checkpoints runs/quickstart/run list",
    )
    parser.add_argument("run", type=lambda text: RunDir(Path(text)), metavar="RUN", help="run directory")
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    example = "fsdp-pretrain checkpoints runs/quickstart/run"
    parser = add_verb(actions, "list", _list, "List them by what names and sizes tell.", f"{example} list")
    parser.add_argument("--json", action="store_true")

    parser = add_verb(actions, "verify", _verify, "Read them back and compare every checksum.", f"{example} verify 300")
    parser.add_argument("step", type=int, nargs="?", help="verify only this one (default: all)")
    parser.add_argument("--json", action="store_true")

    for verb, act, text in (
        ("pin", _pin, "Keep a checkpoint whatever the retention policy says."),
        ("unpin", _unpin, "Leave a pinned checkpoint to the retention policy again."),
    ):
        parser = add_verb(actions, verb, act, text, f"{example} {verb} 300")
        parser.add_argument("step", type=int, help="step of the checkpoint")
        parser.add_argument("--json", action="store_true")

    parser = add_verb(
        actions,
        "export",
        _export,
        "Write a checkpoint of any mesh as a folder that transformers loads: safetensors, config.json, tokenizer.",
        f"{example} export 300 runs/quickstart/hf --dtype bf16",
    )
    parser.add_argument("step", type=int, help="step of the checkpoint")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make; must not exist")
    parser.add_argument("--dtype", choices=("bf16", "fp32", "fp16"), default="bf16", help="default: bf16")
    parser.add_argument(
        "--shard-size", type=byte_count, default=byte_count("5GB"), help="largest file of weights (default: 5GB)"
    )
    parser.add_argument("--tokenizer", type=Path, help="tokenizer, if the run directory has lost its copy")
    parser.add_argument("--json", action="store_true")

    parser = add_verb(
        actions,
        "import",
        _import,
        "Make the first checkpoint (step 0) of a new run from the weights of a Hugging Face folder, or of a checkpoint "
        "of another run, to train them on. RUN is created; optimiser, counters and data start from the beginning.",
        "fsdp-pretrain checkpoints runs/quickstart/warm import runs/quickstart/hf \\\n"
        "    --config configs/runs/quickstart.toml run.name=warm run.dir=runs/quickstart/warm",
    )
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="folder with config.json and safetensors, or checkpoints/step-..."
    )
    parser.add_argument(
        "--config",
        nargs="+",
        metavar=("CONFIG", "key=value"),
        help="configuration of the run, whose run.dir is RUN, and values to replace in it",
    )
    parser.add_argument(
        "--accept",
        action="append",
        default=[],
        choices=ACCEPTABLE,
        help="go on although: " + "; ".join(f"{name}: {text}" for name, text in ACCEPTABLE.items()),
    )
    parser.add_argument("--show-model", action="store_true", help="only print the [model] section that fits")
    parser.add_argument("--json", action="store_true")


def _list(args: argparse.Namespace) -> int:
    found = _stores(args.run)
    return _print_checkpoints([_describe(found, item) for item in found.scan()], as_json=args.json)


def _verify(args: argparse.Namespace) -> int:
    found = _stores(args.run)
    chosen = [item for item in found.scan() if args.step in (None, item.step)]
    if args.step is not None and not chosen:
        found.find(args.step)
    bar = tqdm(chosen, desc="reading back", delay=2, disable=None)
    return _print_checkpoints([_read_back(found, item) for item in bar], as_json=args.json)


def _pin(args: argparse.Namespace, pinned: bool = True) -> int:
    found = _stores(args.run)
    found.find(args.step).pin(pinned)
    return _print_checkpoints([_describe(found, found.find(args.step))], as_json=args.json)


def _unpin(args: argparse.Namespace) -> int:
    return _pin(args, pinned=False)


def _stores(run: RunDir) -> Stores:
    check_begun(run)
    return stores(run)


def _print_checkpoints(rows: list[dict[str, Any]], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(rows, indent=1))
    elif not rows:
        print("no checkpoints")
    else:
        for row in rows:
            size = human_bytes(row["bytes"]) if row["bytes"] is not None else "-"
            line = f"{row['step']:>12_}  {size:>9}  {row['state']:<10} {row['committed'] or '-':<25} "
            line += "pinned " * row["pinned"]
            line += f"suspect: {row['suspect']} " if row["suspect"] else ""
            line += row["problem"] or ("" if row["optimizer"] else "weights alone ")
            line += "its manifest has no checksum (release 0.1) " * (not row.get("sealed", True))
            line += f" in the fallback {Path(row['path']).parent}" * row["fallback"]
            print(line.rstrip())
    return ALERT if any(row["problem"] for row in rows) else 0


def _describe(found: Stores, checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = None
    with contextlib.suppress(CheckpointError):
        manifest = checkpoint.manifest()
    state = "damaged" if checkpoint.problem else "verified" if checkpoint.verified else "committed"
    return {
        "step": checkpoint.step,
        "path": str(checkpoint.path),
        "fallback": found.elsewhere(checkpoint),
        "state": state,
        "bytes": sum(entry.bytes for entry in manifest.files) if manifest is not None else None,
        "committed": manifest.committed if manifest is not None else None,
        "world": manifest.world.model_dump() if manifest is not None else None,
        "pinned": checkpoint.pinned,
        "suspect": manifest.suspect if manifest is not None else None,
        "optimizer": manifest.optimizer if manifest is not None else True,
        "problem": checkpoint.problem,
    }


def _read_back(found: Stores, checkpoint: Checkpoint) -> dict[str, Any]:
    row = _describe(found, checkpoint)
    if checkpoint.problem is None:
        wrong = verify_files(checkpoint.path, checkpoint.files()) or wrong_metadata(checkpoint.path)
        row |= {"state": "damaged", "problem": wrong[0]} if wrong else {"state": "verified"}
        row["sealed"] = state_files.is_sealed(checkpoint.path / MANIFEST)
    return row


def _export(args: argparse.Namespace) -> int:
    _stores(args.run)
    done = _with_torch("hf").export_checkpoint(
        args.run, args.step, args.out, dtype=args.dtype, shard_bytes=args.shard_size, tokenizer_path=args.tokenizer
    )
    if args.json:
        print(json.dumps({**vars(done), "folder": str(done.folder)}, indent=1))
    else:
        count, size = human_count(done.parameters), human_bytes(done.bytes)
        print(f"{done.folder}: {count} parameters, {size} of {args.dtype} in {done.files} files")
        print(f"tokenizer: {done.tokenizer}")
    return 0


def _import(args: argparse.Namespace) -> int:
    native = (args.source / CONFIG).exists()
    if args.show_model:
        model = load_compatible(args.source / CONFIG).model if native else read_model(args.source)
        print(tomli_w.dumps({"model": model.model_dump(mode="json", exclude_none=True)}), end="")
        return 0
    if args.config is None:
        raise ConfigError("--config is missing: an import is the first checkpoint of a configured run")
    config = load(args.config[0], args.config[1:])
    if native and args.accept:
        raise ConfigError(f"--accept {args.accept[0]} is for Hugging Face folders; {args.source} is a checkpoint")
    if native:
        done = _with_torch("importing").import_checkpoint(args.run, args.source, config)
    else:
        done = _with_torch("hf").import_folder(args.run, args.source, config, args.accept)
    checkpoint = done.saved.checkpoint
    if args.json:
        facts = {"path": str(checkpoint.path), "bytes": done.saved.bytes, "seconds": done.saved.seconds}
        print(json.dumps({**facts, "padded_rows": done.padded, "tokenizer": done.tokenizer}, indent=1))
    else:
        print(f"{checkpoint.path}: {human_bytes(done.saved.bytes)}, weights alone; training starts from it")
        if done.padded:
            print(f"rows of the embedding table: {done.padded} are not in the source and got the mean of the others")
        print(f"tokenizer: {done.tokenizer}")
    return 0


def _with_torch(name: str) -> ModuleType:
    """A module of `checkpoint` that converts weights, which needs torch. Raises ConfigError."""
    try:
        return importlib.import_module(f".checkpoint.{name}", __package__)
    except ImportError as error:
        raise ConfigError(
            f"weights are converted with torch, which is not installed ({error.name})",
            remedy="in the checkout: pip install -e '.[train]'",
        ) from None
