"""Export to Hugging Face folders, file by file: no model has to fit into memory as a whole."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from fsdp_pretrain import __version__, models
from fsdp_pretrain.checkpoint.disk_space import Room, SpaceNeeded
from fsdp_pretrain.checkpoint.loading import Weights
from fsdp_pretrain.checkpoint.store import CONFIG, Checkpoint, Store, verify_files
from fsdp_pretrain.checkpoint.tokenizer import QWEN2_WARNING, export_tokenizer, find_tokenizer
from fsdp_pretrain.checkpoint.witness import check_model_code
from fsdp_pretrain.config.resume_rules import load_recorded
from fsdp_pretrain.errors import CheckpointError, ConfigError, StorageError
from fsdp_pretrain.files import sync
from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.files import RunDir

from .classes import HFTensor
from .folder import INDEX
from .layout import FACTS, ExportFacts, to_hf, weights

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_OTHER_FILES = 10
"""Configuration, index, tokenizer, facts: fewer files than this lie beside the weights."""


@dataclass(frozen=True)
class Exported:
    """The result of `export_checkpoint`; `bytes` and `files` count the weights, `tokenizer` is a text for people."""

    folder: Path
    parameters: int
    bytes: int
    files: int
    tokenizer: str


def export_checkpoint(run: RunDir, step: int, out: Path, *, dtype: str, shard_bytes: int) -> Exported:
    """Write the weights, configuration and tokenizer of a checkpoint as a folder that transformers loads.

    Reads checkpoints of any mesh in one process, also of live runs, and verifies every checksum first. The folder is
    written under a temporary name and renamed when complete.

    Args:
        dtype: key of `DTYPES`.
        shard_bytes: largest size of a weights file (a larger tensor gets its own file); one is in memory at a time.

    Raises:
        ConfigError: `out` exists, or transformers has no such model.
        CheckpointError: the checkpoint is missing or damaged.
        StorageError: it does not fit, or cannot be written.
    """
    if out.exists():
        raise ConfigError(f"{out} exists", remedy="name a folder that does not; nothing is overwritten")
    checkpoint = Store(run.checkpoints).find(step)
    config = load_recorded(checkpoint.path / CONFIG, own=False)
    check_model_code(checkpoint.train_state().identity, config, checkpoint.path)
    tokenizer = find_tokenizer(checkpoint, config)
    type_name = str(DTYPES[dtype]).removeprefix("torch.")
    length = config.data.sequence_length
    content = to_hf(config.model, sequence_length=length, eod=tokenizer.eod, dtype=type_name)
    _verify(checkpoint)
    stored = Weights(checkpoint, models.build(config.model))
    sizes = {weight: _size(weight, stored, DTYPES[dtype]) for weight in weights(config.model, stored.shapes)}
    files, total = _split_into_files(sizes, shard_bytes), sum(sizes.values())
    metadata = {"format": "pt", "run": config.run.name, "step": str(step), "fsdp_pretrain": __version__}
    with _atomic_folder(out, SpaceNeeded(total, len(files) + _OTHER_FILES)) as folder:
        for name, group in tqdm(files.items(), desc="exporting", unit="files", delay=2, disable=None):
            save_file(
                {weight.theirs: _to_hf(weight, stored, DTYPES[dtype], config.model.heads) for weight in group},
                folder / name,
                metadata,
            )
        if len(files) > 1:
            file_of = {weight.theirs: name for name, group in files.items() for weight in group}
            _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": file_of})
        _write_json(folder / "config.json", content)
        token_ids = {key: content[key] for key in ("bos_token_id", "eos_token_id")}
        _write_json(folder / "generation_config.json", {"_from_model_config": True, **token_ids})
        description = export_tokenizer(tokenizer, folder, sequence_length=length)
        if config.model.family == "qwen2":
            description += QWEN2_WARNING
        tokens = checkpoint.train_state().tokens
        facts = ExportFacts(step=step, tokens=tokens, sequence_length=length, eod=tokenizer.eod)
        state_files.write(folder / FACTS, facts.model_dump(mode="json"))
    return Exported(out, total // DTYPES[dtype].itemsize, total, len(files), description)


def _verify(checkpoint: Checkpoint) -> None:
    bar = tqdm(checkpoint.files(), desc="verifying", unit="files", delay=2, disable=None)
    if wrong := verify_files(checkpoint.path, bar):
        raise CheckpointError(
            f"{checkpoint.path} is damaged: {wrong[0]}",
            effect="nothing was exported",
            remedy="export another step; `fsdp-pretrain checkpoints RUN verify` says which are whole",
        )


def _size(weight: HFTensor, stored: Weights, dtype: torch.dtype) -> int:
    count = sum(math.prod(stored.shapes[name]) for name in weight.ours)
    return int(count * dtype.itemsize)


def _split_into_files(sizes: dict[HFTensor, int], shard_bytes: int) -> dict[str, list[HFTensor]]:
    """Split the tensors, in order, into files of at most `shard_bytes`; returns the tensors of each file by name."""
    groups: list[list[HFTensor]] = []
    used = 0
    for weight, size in sizes.items():
        if not groups or used + size > shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(weight)
        used += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups, 1)}


@contextmanager
def _atomic_folder(out: Path, need: SpaceNeeded) -> Iterator[Path]:
    """Yield a temporary folder beside `out`, which is made durable and renamed on success, else removed.

    Raises StorageError.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.writing-", dir=out.parent))
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror}", effect="nothing was exported") from None
    try:
        partial.chmod(0o755)
        if not need.fits(room := Room.of(out.parent)):
            raise StorageError(f"the export {need.compare(room)}", effect="nothing was exported")
        yield partial
        for path in partial.iterdir():
            sync(path)
        sync(partial)
        partial.rename(out)
        sync(out.parent)
    except (OSError, SafetensorError) as error:
        cause = getattr(error, "strerror", None) or error
        raise StorageError(f"cannot write {out}: {cause}", effect="nothing was exported") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _to_hf(weight: HFTensor, stored: Weights, dtype: torch.dtype, heads: int) -> Tensor:
    """A tensor in the layout of a Hugging Face folder."""
    parts = [stored[name].to(dtype) for name in weight.ours]
    if weight.by_head:
        return torch.stack([part.unflatten(0, (heads, -1)) for part in parts], 1).flatten(0, 2)
    tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (tensor.T if weight.transposed else tensor).contiguous()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
