"""Finding input files, the format of each, and decompression.

Truncated, damaged or misnamed files raise a DataError that names them. Errors of the operating system are not
converted, see `fsdp_pretrain.console.explain`.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import IO, Any, Literal

from fsdp_pretrain.errors import DataError, naming

Kind = Literal["text", "jsonl", "parquet"]
_KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
PACKED = {".gz": "gzip", ".zst": "zstd"}
TEXT_SUFFIXES = (
    ".parquet",
    *(suffix + packed for suffix in (".txt", ".jsonl", ".ndjson") for packed in ("", *PACKED)),
    *(f".json{packed}" for packed in PACKED),
)
"""Suffixes of the files taken from directories by default."""
_PACKED_PARQUET = tuple(f".parquet{packed}" for packed in PACKED)
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    "heldout": "heldout",
}
"""Words in names of files and folders that stand for a split: those of the Hugging Face Hub, and our own."""
_NUMBERED = re.compile(r"(.*)[-.](\d{5})-of-(\d{5})\b")
DAMAGED = "the file is cut off, damaged or not what its name says: restore it or fetch it again"
_UNPACKED = 64 << 20
"""Maximum bytes of a document in a packed file, unless the file is larger: a few kB can unpack to any size."""


def stamp_of(file: Path) -> list[int]:
    """[size, time of the last change in ns] of a file. Raises OSError."""
    stamp = file.stat()
    return [stamp.st_size, stamp.st_mtime_ns]


def find_files(inputs: Sequence[str | Path], suffixes: Sequence[str] = (), only: str | None = None) -> list[Path]:
    """The named files and those in named directories, without duplicates (symbolic links resolved).

    Their order determines the document numbers. From directories, only files that end in one of `suffixes` are taken,
    by default `.txt`, JSONL and parquet, and nothing whose name begins with a dot. If a directory holds several splits,
    `only` names the one to take. Raises DataError if an input does not exist or is not a file, its name does not tell
    its format, a directory holds several splits and `only` is None, or there are no files.
    """
    wanted = tuple(suffix + packed for suffix in suffixes for packed in ("", *PACKED)) or TEXT_SUFFIXES
    missing = [str(name) for name in inputs if not Path(name).exists()]
    if missing:
        raise DataError(f"there is no input {', '.join(missing)}", remedy="look for a mistake in the path")
    files: dict[Path, Path] = {}
    for name in inputs:
        for path in _files_of(Path(name), wanted, only):
            files.setdefault(path.resolve(), path)
    if not files:
        raise DataError(
            f"no input files in {', '.join(map(str, inputs))}",
            remedy=f"files should end in {', '.join(wanted[:4])} ... or be named one by one",
        )
    return list(files.values())


def _files_of(path: Path, wanted: tuple[str, ...], only: str | None) -> Sequence[Path]:
    """The files of one input."""
    files, wanted = [path], (*wanted, *_PACKED_PARQUET)
    if path.is_dir():
        inside = {file.relative_to(path): file for file in files_below(path) if file.name.endswith(wanted)}
        files = _of_split(path, {name: file for name, file in inside.items() if not _hidden(name)}, only)
    elif not path.name.endswith((*wanted, *TEXT_SUFFIXES)):
        require_file(path)
        raise DataError(
            f"the name of {path} does not say its format",
            remedy="rename it, or name a symbolic link to it that ends in .txt, .jsonl or .parquet (packed: and in "
            ".gz or .zst); plain text may also end in what --suffix says",
        )
    for file in files:
        require_file(file)
        if file.name.endswith(_PACKED_PARQUET):
            raise DataError(f"{file} is a packed parquet file", remedy="unpack it: parquet is compressed inside")
    return files


def _hidden(path: PurePath) -> bool:
    """Whether a file is in a hidden folder, such as `.cache/huggingface`, `.git`, `.ipynb_checkpoints`."""
    return any(part.startswith(".") for part in path.parts)


def split_of(path: PurePath) -> str | None:
    """The split that the name of a file, or of a folder around it, stands for; `path` is relative to the input.

    `data/train-00000-of-00042.parquet`, `my_train_file.jsonl` and `train/0.jsonl.zst` are of the split train. If the
    name of a numbered file has no such word, it is the name of a split itself, as on the Hugging Face Hub. Plain text
    has no split.
    """
    if kind_of(path) == "text":
        return None
    for part in (path.name, *reversed(path.parts[:-1])):
        words = [_SPLITS[word] for word in re.split("[^a-z]+", part.lower()) if word in _SPLITS]
        if words:
            return words[0]
    numbered = _NUMBERED.match(path.name)
    return numbered[1] if numbered else None


def _of_split(directory: object, files: dict[Path, Path], only: str | None) -> list[Path]:
    """The files of one split among `files`, whose keys are paths below a directory. Raises DataError if there are
    several splits and `only` is None, or it names none of them."""
    splits = list(map(split_of, files))
    counts = Counter(splits)
    shown = ", ".join(f"{name or 'no split'}: {count:_}" for name, count in sorted(counts.items(), key=str))
    if only is not None:
        wanted = _SPLITS.get(only.lower(), only)
        if wanted not in counts:
            raise DataError(f"{directory} has no files of the split {only} (files of {shown or 'no split: 0'})")
        return [file for file, split in zip(files.values(), splits, strict=True) if split == wanted]
    if len(counts) > 1:
        name = "train" if "train" in counts else next(filter(None, counts))
        raise DataError(
            f"{directory} holds several splits (files of {shown})",
            effect="text that is meant for judging the model would be trained on",
            remedy=f"take one with --only {name}, or name files or folders one by one",
        )
    return list(files.values())


def missing_numbers(files: Sequence[Path]) -> list[str]:
    """A text for each set of files `NAME-00000-of-00042...` that is incomplete."""
    sets: dict[tuple[str, str, int], set[int]] = {}
    for file in files:
        if match := _NUMBERED.match(file.name):
            sets.setdefault((str(file.parent), match[1], int(match[3])), set()).add(int(match[2]))
    return [
        f"{folder}/{name}: {len(numbers):_} of {total:_} files are there"
        for (folder, name, total), numbers in sorted(sets.items())
        if len(numbers) < total
    ]


def files_below(directory: Path) -> list[Path]:
    """All files in and below a directory, sorted; follows symbolic links, but enters no directory twice. Raises OSError
    if a directory cannot be read."""
    files: list[Path] = []
    entered: set[str] = set()
    waiting = [directory]

    def fail(error: OSError) -> None:
        raise error

    while waiting:  # first the directory itself, then the targets of links in it
        for folder, folders, names in os.walk(waiting.pop(0), onerror=fail):
            place = os.path.realpath(folder)
            if place in entered:
                folders.clear()
                continue
            entered.add(place)
            files += [Path(folder, name) for name in names]
            waiting += [inner for inner in (Path(folder, name) for name in folders) if inner.is_symlink()]
    return sorted(files)


def require_file(path: Path) -> None:
    """Raise DataError unless `path` is a regular file, which can be read more than once."""
    if path.is_file():
        return
    if path.is_symlink() and not path.exists():
        raise DataError(f"{path} is a broken symbolic link")
    if not path.exists():
        raise DataError(f"there is no file {path}")
    raise DataError(
        f"{path} is a directory, a pipe or a device",
        effect="its content cannot be read in parts, nor again when the command continues",
        remedy="write the data to a file whose name tells its format, such as .txt, .jsonl.zst or .parquet",
    )


def kind_of(path: PurePath) -> Kind:
    """The format of a file, by its suffix; an unknown one is text. Packed `.json` is JSONL, as it is published."""
    name = path.name
    for packed in PACKED:
        name = name.removesuffix(packed)
    suffix = Path(name).suffix
    return "jsonl" if suffix == ".json" and name != path.name else _KINDS.get(suffix, "text")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn a library's errors about the content of `path` into DataError; add the name to other OSErrors.

    Errors of libraries have no error number, those of the operating system have one.
    """
    try:
        with naming(path):
            yield
    except OSError as error:
        if error.errno is not None:
            raise
        raise DataError(f"cannot read {path}: {error}", remedy=DAMAGED) from None


@contextmanager
def open_unpacked(path: Path) -> Iterator[IO[bytes]]:
    """Open a file's bytes, decompressed if its name ends in `.gz` or `.zst`; members or frames are concatenated.

    Reading raises OSError without a number if the last of them is truncated or followed by something else.
    """
    with path.open("rb") as file:
        if path.suffix not in PACKED:
            yield file
            return
        from pyarrow import CompressedInputStream

        if not path.stat().st_size:
            raise DataError(f"{path} is empty, not a valid {path.suffix} file", remedy=DAMAGED)
        yield io.BufferedReader(CompressedInputStream(file, PACKED[path.suffix]), 1 << 16)


class BoundedReader:
    """Reads a file from `open_unpacked` whole or by lines; refuses a packed file with too long a document or line."""

    def __init__(self, file: IO[bytes], path: Path) -> None:
        self._file, self._path = file, path
        self._longest = max(_UNPACKED, path.stat().st_size) if path.suffix in PACKED else None

    def line(self) -> bytes:
        """Read the next line, empty at the end. Raises DataError."""
        return self._checked(self._file.readline(-1 if self._longest is None else self._longest + 1))

    def rest(self) -> bytes:
        """Read the rest. Raises DataError."""
        return self._checked(self._file.read(-1 if self._longest is None else self._longest + 1))

    def _checked(self, piece: bytes) -> bytes:
        if self._longest is not None and len(piece) > self._longest:
            raise DataError(
                f"{self._path} unpacks to a document or a line of more than {self._longest:_} bytes",
                remedy="if that is meant, unpack the file first: plain files have no such limit",
            )
        return piece


def parse_json(line: bytes | str) -> Any:
    """The JSON value in a line. Raises ValueError."""
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
