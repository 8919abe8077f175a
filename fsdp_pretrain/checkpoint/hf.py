"""Export to Hugging Face folders, file by file, and import from them, tensor by tensor: no model has to fit into
memory as a whole."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from data.packing.opening import open_packer
from fsdp_pretrain import __version__, models
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.model import LlamaModel
from fsdp_pretrain.config.resume_rules import load_recorded
from fsdp_pretrain.errors import CheckpointError, ConfigError, StorageError
from fsdp_pretrain.record import state_files
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.lease import Lease, drop_if_dead
from fsdp_pretrain.units import human_bytes

from .hf_folder import INDEX, Folder
from .hf_layout import FACTS, ExportFacts, HFTensor, read_model, to_hf, weights
from .loading import Weights
from .store import CONFIG, Checkpoint, Store, sync_file, verify_files
from .tokenizer import QWEN2_WARNING, compare_with_folder, export_tokenizer, find_tokenizer
from .weights_import import Imported, begin, refuse_another_model, refuse_begun

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_LEASE, _SILENT_SECONDS = "lease.json", 90.0


# ------------------------------------------------------------------------ export


@dataclass(frozen=True)
class Exported:
    """What `export_checkpoint` wrote; `bytes` and `files` are of the weights, `tokenizer` is a text for people."""

    folder: Path
    parameters: int
    bytes: int
    files: int
    tokenizer: str


def export_checkpoint(
    run: RunDir, step: int, out: Path, *, dtype: str, shard_bytes: int, tokenizer_path: Path | None = None
) -> Exported:
    """Write the weights, configuration and tokenizer of a checkpoint as a folder that transformers loads.

    Reads checkpoints of any mesh in one process, also of live runs, and verifies every checksum first. The folder is
    written under a temporary name and renamed when complete.

    Args:
        dtype: key of `DTYPES`.
        shard_bytes: largest size of a weights file (a larger tensor gets its own file); one is in memory at a time.
        tokenizer_path: of the tokenizer, if not the run's copy.

    Raises:
        ConfigError: `out` exists, or transformers has no such model.
        CheckpointError: the checkpoint is missing or damaged.
        StorageError: it does not fit, or cannot be written.
    """
    if out.exists():
        raise ConfigError(f"{out} exists", remedy="name a folder that does not; nothing is overwritten")
    checkpoint = Store(run.checkpoints).find(step)
    config = load_recorded(checkpoint.path / CONFIG)
    tokenizer = find_tokenizer(checkpoint, config, tokenizer_path)
    type_name = str(DTYPES[dtype]).removeprefix("torch.")
    length = config.data.sequence_length
    content = to_hf(config.model, sequence_length=length, eod=tokenizer.eod, dtype=type_name)
    _verify(checkpoint)
    stored = Weights(checkpoint, models.build(config.model))
    sizes = {weight: _size(weight, stored, DTYPES[dtype]) for weight in weights(config.model, stored.shapes)}
    files, total = _split_into_files(sizes, shard_bytes), sum(sizes.values())
    facts = {"format": "pt", "run": config.run.name, "step": str(step), "fsdp_pretrain": __version__}
    with _atomic_folder(out, total) as folder:
        for name, group in tqdm(files.items(), desc="exporting", unit="files", delay=2, disable=None):
            save_file({weight.theirs: _to_hf(weight, stored, DTYPES[dtype]) for weight in group}, folder / name, facts)
        if len(files) > 1:
            where = {weight.theirs: name for name, group in files.items() for weight in group}
            _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
        _write_json(folder / "config.json", content)
        ends = {key: content[key] for key in ("bos_token_id", "eos_token_id")}
        _write_json(folder / "generation_config.json", {"_from_model_config": True, **ends})
        said = export_tokenizer(tokenizer, folder, sequence_length=length)
        if config.model.family == "qwen2":
            said += QWEN2_WARNING
        tokens = checkpoint.train_state().tokens
        known = ExportFacts(step=step, tokens=tokens, sequence_length=length, eod=tokenizer.eod)
        state_files.write(folder / FACTS, known.model_dump(mode="json"))
    return Exported(out, total // DTYPES[dtype].itemsize, total, len(files), said)


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
    """Split the tensors, in order, into files of at most `shard_bytes`; the tensors of each, by its name."""
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
def _atomic_folder(out: Path, needed: int) -> Iterator[Path]:
    """A temporary folder beside `out`: made durable and renamed to `out` on success, else removed. Raises StorageError.

    It holds a lease, so that the next export to `out` can remove what a killed one left behind.
    """
    partial = out.with_name(f".{out.name}.writing")
    if drop_if_dead(partial / _LEASE, _SILENT_SECONDS):
        shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except FileExistsError:
        raise ConfigError(
            f"another process is exporting to {out}", remedy=f"wait for it, or remove {partial}"
        ) from None
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror}", effect="nothing was exported") from None
    mine = None
    try:
        mine = Lease.take(partial / _LEASE, purpose="an export")
        free = shutil.disk_usage(partial).free
        if free < needed:
            raise StorageError(f"the export needs {human_bytes(needed)}, {out.parent} has {human_bytes(free)} free")
        yield partial
        if mine is not None:
            mine.release()
        for path in partial.iterdir():
            sync_file(path)
        sync_file(partial)
        partial.rename(out)
        sync_file(out.parent)
    except (OSError, SafetensorError) as error:
        cause = getattr(error, "strerror", None) or error
        raise StorageError(f"cannot write {out}: {cause}", effect="nothing was exported") from None
    finally:
        if mine is not None:
            mine.release()
        shutil.rmtree(partial, ignore_errors=True)


def _to_hf(weight: HFTensor, stored: Weights, dtype: torch.dtype) -> Tensor:
    """One tensor in the folder's layout."""
    parts = [stored[name].to(dtype) for name in weight.ours]
    tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    return (tensor.T if weight.transposed else tensor).contiguous()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------ import


def import_folder(run: RunDir, folder: Path, config: Config, accept: Collection[str] = ()) -> Imported:
    """Write a new run's step-0 checkpoint from a Hugging Face folder: fp32 weights, no optimiser state.

    Args:
        run: a new or empty directory.
        folder: has `config.json` and safetensors.
        accept: problems that the user accepts: `tokenizer`; `import --help` says what it is.

    Raises:
        ConfigError: the configuration is for another model or another run, or the run was already started.
        DataError: the folder is incomplete, inconsistent or has non-finite values, or its tokenizer is not that of the
            corpora.
        StorageError: the checkpoint cannot be written.
    """
    refuse_begun(run, config)
    theirs = read_model(folder)
    refuse_another_model(folder, theirs, config.model)
    source = Folder(folder, theirs, config.model)
    packer = open_packer(config)
    tokenizer = next(iter(packer.corpora.values())).tokenizer()
    said = compare_with_folder(tokenizer, folder, accept="tokenizer" in accept)
    window = config.model.sliding_window if isinstance(config.model, LlamaModel) else None
    if window:
        length = config.data.sequence_length
        said += f"; its sliding_window of {window} tokens is not in force, since samples have {length}"
    return begin(run, config, packer, source, folder, said)
