"""What a directory was made from, so that the same command need not make it again.

`made.json` names everything that decides the files: inputs with size and time of change, options, this program's code
and the packages that it uses; and the checksums of the files. If any of it differs, they are made again.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

from data.corpus.manifest import load_json
from data.text.files import files_below, stamp_of
from data.text.remote_files import find_objects
from fsdp_pretrain.atomic import replace_file
from fsdp_pretrain.errors import DataError
from fsdp_pretrain.remote import is_url

_RECORD = "made.json"
_PACKAGES = ("tokenizers", "sentencepiece", "pyarrow", "numpy")


def origin(inputs: Iterable[str | Path], **options: Any) -> dict[str, Any]:
    """Everything that decides what is made from `inputs` (files, or directories with all that is in them; missing ones
    are for the caller to report; URLs). Raises OSError if one cannot be read; DataError, RemoteError for URLs."""
    inputs = list(inputs)
    objects = [file for text in inputs if is_url(str(text)) for file in find_objects(str(text)).files]
    paths = [Path(text) for text in inputs if not is_url(str(text))]
    files = [file for path in paths for file in (files_below(path) if path.is_dir() else [path])]
    stamps: dict[str, Any] = {
        str(file): (found.st_size, found.st_mtime_ns) for file in files if file.exists() and (found := file.stat())
    }
    stamps |= {file.url: stamp_of(file) for file in objects}
    return {
        "inputs": hashlib.sha256(json.dumps(sorted(stamps.items())).encode()).hexdigest(),
        "options": {name: str(value) for name, value in options.items()},
        "code": _code(),
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in _PACKAGES},
    }


def _code() -> str:
    """Digest of the modules of `data`."""
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def is_made(out: Path, source: dict[str, Any]) -> bool:
    """Whether `out` holds what `source` (see `origin`) makes, whole and unchanged."""
    try:
        found = load_json(out / _RECORD)
        files: dict[str, str] = found["files"]
        return bool(files) and found["origin"] == source and files == _checksums(out, list(files))
    except (OSError, DataError, KeyError, TypeError, AttributeError):
        return False


def begin(out: Path) -> None:
    """Before the files are written: they are not whole from now on. Raises OSError."""
    (out / _RECORD).unlink(missing_ok=True)


def finish(out: Path, source: dict[str, Any], names: Sequence[str]) -> None:
    """After `names` were written. Raises OSError."""
    record = {"origin": source, "files": _checksums(out, names)}
    replace_file(out / _RECORD, (json.dumps(record, indent=1) + "\n").encode())


def _checksums(out: Path, names: Sequence[str]) -> dict[str, str]:
    return {name: xxhash.xxh3_128_hexdigest((out / name).read_bytes()) for name in names}
