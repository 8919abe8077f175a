"""Models of the Hugging Face Hub by name, from the cache that its tools fill. Nothing is downloaded here."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fsdp_pretrain.errors import DataError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def cache() -> Path:
    """The cache directory, where `huggingface_hub` has it."""
    if named := os.environ.get("HF_HUB_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"


def cached_model(name: str, files: tuple[str, ...]) -> Path:
    """The folder of a model such as `meta-llama/Llama-2-7b-hf`, at the revision that was downloaded for `main`.

    Raises:
        DataError: no such name, or nothing of it in the cache, or none of `files` in that folder.
    """
    if not _NAME.fullmatch(name):
        raise DataError(f"there is no tokenizer at {name}")
    folder = cache() / f"models--{name.replace('/', '--')}"
    main = folder / "refs/main"
    if main.is_file():
        current = folder / "snapshots" / main.read_text().strip()
        if any((current / file).exists() for file in files):
            return current
    local = f"tokenizers/{name.rpartition('/')[2]}"
    download = f"hf download {name} tokenizer.json tokenizer_config.json --local-dir {local}"
    raise DataError(
        f"there is no tokenizer at {name}, nor one of such a model (revision main) in the Hugging Face cache {cache()}",
        remedy=f"on a machine with network: `{download}` (tokenizer.model, where it has no tokenizer.json); copy the "
        f"folder here and pass --tokenizer {local}",
    )
