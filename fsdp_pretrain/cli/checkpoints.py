"""`fsdp-pretrain checkpoints RUN ...`: list, verify, merge, export and import checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fsdp_pretrain.console import CODE, JSON, argument, as_json, byte_count, progress, verb
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.run.arguments import check_begun, import_extra
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.units import counted, human_bytes, human_count

if TYPE_CHECKING:
    from fsdp_pretrain.checkpoint.listing import Row
    from fsdp_pretrain.checkpoint.store import Store

_CONVERTED = "weights are converted"
_STEP = argument("step", type=int, help="step of the checkpoint")


@verb("list", "", JSON)
def _list(args: argparse.Namespace) -> int:
    """List them by names and sizes, without reading them."""
    from fsdp_pretrain.checkpoint.listing import listed

    return _print([listed(item) for item in _store(args.run).scan()], json=args.json)


@verb(
    "verify",
    "300",
    argument("step", type=int, nargs="?", help="verify only this one (default: all)"),
    JSON,
)
def _verify(args: argparse.Namespace) -> int:
    """Read them back and compare every checksum."""
    from tqdm import tqdm

    from fsdp_pretrain.checkpoint.listing import read_back

    store = _store(args.run)
    chosen = [item for item in store.scan() if args.step in (None, item.step)]
    if args.step is not None and not chosen:
        store.find(args.step)
    bar = tqdm(chosen, desc="reading back", delay=2, disable=None)
    return _print([read_back(item) for item in bar], json=args.json)


def _store(run: RunDir) -> Store:
    from fsdp_pretrain.checkpoint.store import Store

    check_begun(run)
    return Store(run.checkpoints)


def _print(rows: list[Row], *, json: bool) -> int:
    """Print the rows. Returns the exit code: 2 if a checkpoint is damaged."""
    if json:
        print(as_json([row.model_dump() for row in rows]))
    else:
        print("\n".join(map(str, rows)) or "no checkpoints")
    return 2 if any(row.problem for row in rows) else 0


@verb(
    "export",
    "300 runs/quickstart/hf --dtype bf16",
    _STEP,
    argument("out", type=Path, metavar="OUT", help="folder to make; must not exist"),
    argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="default: bf16"),
    argument("--shard-size", type=byte_count, default=byte_count("5GB"), help="largest file of weights (default: 5GB)"),
    CODE,
    JSON,
)
def _export(args: argparse.Namespace) -> int:
    """Write a checkpoint of any mesh as a folder that transformers loads: safetensors, config.json, tokenizer."""
    check_begun(args.run)
    hf = import_extra("fsdp_pretrain.hf.export", _CONVERTED)
    done = hf.export_checkpoint(args.run, args.step, args.out, dtype=args.dtype, shard_bytes=args.shard_size)
    if args.json:
        print(as_json({**vars(done), "folder": str(done.folder)}))
    else:
        count, size = human_count(done.parameters), human_bytes(done.bytes)
        print(f"{done.folder}: {count} parameters, {size} of {args.dtype} in {counted(done.files, 'file')}")
        print(f"tokenizer: {done.tokenizer}")
    return 0


@verb(
    "merge",
    "--last '150 steps' --out tail",
    argument("--last", type=progress, help='only those less than this before the newest, such as "20B tokens"'),
    argument("--every", type=progress, help='of these only those that complete this interval, such as "1B tokens"'),
    argument(
        "--weights",
        choices=("uniform", "decay"),
        default="uniform",
        help="uniform: the mean, as if the learning rate had fallen linearly to zero; decay: older ones count more, as "
        "if it had fallen as 1 - sqrt(x) (default: uniform)",
    ),
    argument("--out", required=True, metavar="NAME", help="name of the merge, which must be new: RUN/merged/NAME"),
    CODE,
    JSON,
)
def _merge(args: argparse.Namespace) -> int:
    """Write the mean of the weights of several checkpoints as a checkpoint without optimiser state.

    RUN/merged/NAME can be listed, verified, exported and evaluated like a run.
    """
    check_begun(args.run)
    merging = import_extra("fsdp_pretrain.checkpoint.merging", _CONVERTED)
    done = merging.merge(args.run, args.out, last=args.last, every=args.every, kind=args.weights)
    checkpoint, parents = done.saved.checkpoint, done.parents
    if args.json:
        facts = {"path": str(checkpoint.path), "bytes": done.saved.bytes}
        print(as_json({**facts, "parents": [parent.model_dump() for parent in parents]}))
    else:
        steps = ", ".join(f"{parent.step:_} ({parent.weight:.3f})" for parent in parents)
        print(f"{checkpoint.path}: {human_bytes(done.saved.bytes)}, the mean of {len(parents)} checkpoints")
        print(f"steps and weights: {steps}")
    return 0


@verb(
    "import",
    "runs/quickstart/hf \\\n    --config configs/runs/quickstart.toml run.name=warm run.dir=runs/quickstart/warm",
    argument("source", type=Path, metavar="HF_DIR", help="folder with config.json and safetensors"),
    argument(
        "--config",
        nargs="+",
        metavar=("CONFIG", "key=value"),
        help="configuration of the run, whose run.dir is RUN, and values to replace in it",
    ),
    argument(
        "--accept",
        action="append",
        default=[],
        choices=["tokenizer"],
        help="import although the folder has no tokenizer that can be compared with that of the corpora",
    ),
    argument("--show-model", action="store_true", help="only print the [model] section that fits"),
    JSON,
)
def _import(args: argparse.Namespace) -> int:
    """Make the first checkpoint (step 0) of a new run from the weights of a Hugging Face folder, to train them on.

    RUN is created; optimiser, counters and data start from the beginning.
    """
    import tomli_w

    from fsdp_pretrain.config.config import load
    from fsdp_pretrain.hf.layout import read_model

    if args.show_model:
        print(tomli_w.dumps({"model": read_model(args.source).model_dump(mode="json", exclude_none=True)}), end="")
        return 0
    if args.config is None:
        raise ConfigError("--config is missing: an import is the first checkpoint of a configured run")
    config = load(args.config[0], args.config[1:])
    importer = import_extra("fsdp_pretrain.hf.weights_import", _CONVERTED)
    done = importer.import_folder(args.run, args.source, config, args.accept)
    checkpoint = done.saved.checkpoint
    if args.json:
        facts = {"path": str(checkpoint.path), "bytes": done.saved.bytes, "seconds": done.saved.seconds}
        print(as_json({**facts, "padded_rows": done.padded, "tokenizer": done.tokenizer}))
    else:
        print(f"{checkpoint.path}: {human_bytes(done.saved.bytes)}, weights alone; training starts from it")
        if done.padded:
            print(f"rows of the embedding table: {done.padded} are not in the source and got the mean of the others")
        print(f"tokenizer: {done.tokenizer}")
    return 0


def _add_actions(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for action in (_list, _verify, _merge, _export):
        action.add_to(actions, "fsdp-pretrain checkpoints runs/quickstart/run")
    _import.add_to(actions, "fsdp-pretrain checkpoints runs/quickstart/warm")


@verb(
    "checkpoints",
    "runs/quickstart/run list",
    argument("run", type=lambda text: RunDir(Path(text)), metavar="RUN", help="run directory"),
    _add_actions,
)
def checkpoints(args: argparse.Namespace) -> int:
    """The checkpoints of a run: list, verify, merge, export to Hugging Face, import from it. Each has its --help."""
    raise AssertionError("an action is required")
