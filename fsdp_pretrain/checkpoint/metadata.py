"""Safe reader of DCP's `.metadata`, which lists a checkpoint's tensors and their locations. No torch.

The file is a pickle, which can call any function. The unpickler here accepts only the names that DCP writes for
tensors, and maps each to an empty record class of its own, never to the real class or function, so a file cannot call
or change anything of torch. Every field used is then validated. Non-tensor objects are refused: this trainer saves
none.
"""

from __future__ import annotations

import math
import pickle
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fsdp_pretrain.errors import CheckpointError

METADATA = ".metadata"
DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
_DCP = "torch.distributed.checkpoint"
_ROOT, _INDEX, _TENSOR = (f"{_DCP}.metadata.{name}" for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata"))
_CHUNK, _PROPERTIES = (f"{_DCP}.metadata.{name}" for name in ("ChunkStorageMetadata", "TensorProperties"))
_PLACE, _LAYOUT, _SIZE = f"{_DCP}.filesystem._StorageInfo", "torch.serialization._get_layout", "torch.Size"
NAMES = frozenset(
    {
        *(_ROOT, _INDEX, _TENSOR, _CHUNK, _PROPERTIES, _PLACE, _LAYOUT, _SIZE),
        *(f"{_DCP}.metadata.StorageMeta", f"{_DCP}.metadata._MEM_FORMAT_ENCODING"),
        *("pathlib.PosixPath", "pathlib._local.PosixPath"),  # the directory; Python 3.13 writes the second
        *(f"torch.{name}" for name in DTYPES),
    }
)
"""All names that a `.metadata` may contain; the same for torch 2.11 to 2.13."""
_FILE = re.compile(r"__\d+_\d+\.distcp")
_MOST = 2**48
"""Upper bound for sizes and offsets."""
_DIMENSIONS = 8


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor: `offsets` and `sizes` per dimension; `start` and `length` in the file, in bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint; `dtype` is one of `DTYPES`, and the chunks have as many elements as `shape`."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def read_metadata(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint by name.

    Raises:
        CheckpointError: `.metadata` cannot be read, is damaged, or was not written by DCP for this trainer.
    """
    try:
        return _read(folder / METADATA)
    except OSError as error:
        raise CheckpointError(
            f"cannot read {folder / METADATA}: {error.strerror}",
            remedy="if the run is live, retention may just have deleted it: take a newer one",
        ) from None
    except _NotDCPError as error:
        raise CheckpointError(
            f"{folder / METADATA} {error}",
            effect="nothing was loaded",
            remedy="take another checkpoint; docs/trust.md says which files may come from others",
        ) from None


def wrong_metadata(folder: Path) -> list[str]:
    """What is wrong with a checkpoint's `.metadata`: at most one text."""
    try:
        _read(folder / METADATA)
    except OSError as error:
        return [f"{METADATA}: {error.strerror}"]
    except _NotDCPError as error:
        return [f"{METADATA} {error}"]
    return []


class _NotDCPError(Exception):
    """The file is not what DCP writes; the message continues the file's name."""


class _Record:
    """Inert stand-in for an object in the file: keeps its constructor arguments and state."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Accepts only `NAMES`. Each instance creates its own classes, since a pickle can set class attributes too."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._known: dict[str, Any] = {_SIZE: tuple}

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full not in NAMES:
            raise _NotDCPError(f"names {full[:200]!r}, as no checkpoint of this trainer does: it could run any program")
        return self._known.setdefault(full, type(full, (_Record,), {}))


def _read(path: Path) -> dict[str, StoredTensor]:
    """Raises OSError, _NotDCPError."""
    with path.open("rb") as file:
        try:
            return _tensors(_Unpickler(file).load())
        except (OSError, _NotDCPError):
            raise
        except Exception as error:  # malformed pickles raise anything
            raise _NotDCPError(f"is damaged ({type(error).__name__}: {str(error)[:200]})") from None


def _tensors(root: Any) -> dict[str, StoredTensor]:
    """Validate and convert the records. Raises _NotDCPError, or anything, if they are not a checkpoint's."""
    fields = _fields(root, _ROOT)
    places: dict[tuple[str, tuple[int, ...]], tuple[str, int, int]] = {}
    for index, place in fields["storage_data"].items():
        at = _fields(index, _INDEX)
        places[at["fqn"], _sizes(at["offset"])] = _place(_fields(place, _PLACE))
    missing: list[str] = []
    tensors = {
        _text(name): _tensor(name, _fields(tensor, _TENSOR), places, missing)
        for name, tensor in fields["state_dict_metadata"].items()
    }
    if missing:
        raise _NotDCPError(f"lists {len(missing)} chunks that are in no file, the first of {missing[0]}")
    return tensors


def _tensor(name: str, fields: dict[str, Any], places: dict[Any, Any], missing: list[str]) -> StoredTensor:
    shape, chunks, found = _sizes(fields["size"]), [], 0
    for chunk in fields["chunks"]:
        block = _fields(chunk, _CHUNK)
        offsets, sizes = _sizes(block["offsets"]), _sizes(block["sizes"])
        if any(at + size > whole for at, size, whole in zip(offsets, sizes, shape, strict=True)):
            raise _NotDCPError(f"has a chunk outside {name}")
        found += math.prod(sizes)
        place = places.get((name, offsets))
        if place is None:
            missing.append(name)
        else:
            chunks.append(Chunk(offsets, sizes, *place))
    if found != math.prod(shape) or found > _MOST:
        raise _NotDCPError(f"has chunks of {found} elements for {name}, which has {math.prod(shape)}")
    return StoredTensor(_dtype(fields["properties"]), shape, tuple(chunks))


def _dtype(properties: Any) -> str:
    """The dtype in properties. Raises _NotDCPError if it is unknown, or the tensor is not strided."""
    if not _is(properties, _PROPERTIES):
        raise _NotDCPError("has a tensor without properties")
    dtype, layout, *_ = properties.state
    name = dtype.__name__.removeprefix("torch.") if isinstance(dtype, type) else ""
    if name not in DTYPES or not _is(layout, _LAYOUT) or layout.args != ("torch.strided",):
        raise _NotDCPError("has a tensor of an unknown dtype or layout")
    return name


def _place(fields: dict[str, Any]) -> tuple[str, int, int]:
    file, (start, length) = _text(fields["relative_path"]), _sizes((fields["offset"], fields["length"]))
    if not _FILE.fullmatch(file) or fields.get("transform_descriptors"):
        raise _NotDCPError(f"has a chunk in {file[:200]!r}, where DCP puts none")
    return file, start, length


def _fields(value: Any, kind: str) -> dict[str, Any]:
    """The fields of a record that must be of a kind. Raises _NotDCPError."""
    if not _is(value, kind) or not isinstance(value.state, dict):
        raise _NotDCPError(f"has a {type(value).__name__} where {kind} belongs")
    fields: dict[str, Any] = value.state
    return fields


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _Record) and type(value).__name__ == kind


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _NotDCPError(f"has a {type(value).__name__} where a name belongs")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    """Sizes or offsets per dimension. Raises _NotDCPError."""
    if not isinstance(value, tuple) or len(value) > _DIMENSIONS:
        raise _NotDCPError("has a size that is not a short tuple")
    if not all(type(n) is int and 0 <= n <= _MOST for n in value):
        raise _NotDCPError("has a size that is negative, enormous or no number")
    return value
