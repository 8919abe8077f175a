"""`manifest.json` of a corpus: its tokenizer, separator policy, and shards with sizes and checksums."""

from __future__ import annotations

import dataclasses
import gc
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.errors import DataError
from fsdp_pretrain.files import replace_file

MAX_VOCABULARY = 1 << 24
"""A larger vocabulary is a mistake: the tables would not fit into memory."""
Separators = Literal["none", "trailing", "leading"]
"""Separators that stored documents carry: none, one at the end, or one at the beginning."""
Count = Annotated[int, Field(ge=0)]
FileName = Annotated[str, Field(pattern=r"^[^\x00]*[^\x00/.][^\x00/]*$")]
"""A valid file path: no NUL, and a last part that is not only dots."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The valid token ids."""

    size: int
    eod: int
    specials: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Tokenizer | TokenizerEntry) -> Vocabulary:
        return cls(tokenizer.vocab_size, tokenizer.eod, frozenset(tokenizer.specials))


class TokenizerEntry(BaseModel):
    """The tokenizer of a corpus."""

    model_config = ConfigDict(extra="forbid")
    file: str
    kind: Literal["tokenizers", "sentencepiece"]
    vocab_size: int = Field(gt=0, le=MAX_VOCABULARY)
    eod: int = Field(ge=0, lt=MAX_VOCABULARY)
    specials: dict[Annotated[int, Field(ge=0, lt=MAX_VOCABULARY)], str]
    fingerprint: str


@dataclass(slots=True, config=ConfigDict(extra="forbid"))
class ShardEntry:
    """One shard; `tokens` includes the separators that documents carry.

    A dataclass with slots: a corpus may have tens of thousands, and pydantic models take twice the time and memory.
    """

    name: FileName
    documents: Count
    tokens: Count
    bytes: Count
    bin_xxh3: str
    idx_xxh3: str
    path: FileName | None = None
    """Path of `.bin` and `.idx`, without suffix, if not in `shards/`: files adopted by `fsdp-data import`."""

    def prefix(self, directory: Path) -> Path:
        """Path of the shard, without suffix."""
        return directory / (self.path or f"shards/{self.name}")


class CorpusManifest(BaseModel):
    """Contents of `manifest.json`."""

    model_config = ConfigDict(extra="forbid")
    format: Literal[1]
    dtype: Literal["uint8", "int8", "int16", "int32", "int64", "uint16"]
    separators: Separators
    """Separators that stored documents carry. The packer strips them and writes its own."""
    pairs: bool = False
    """Documents 2k and 2k + 1 of every shard are a prompt and its answer."""
    tokenizer: TokenizerEntry
    documents: Count
    tokens: Count
    blocks_xxh3: str
    checksums_xxh3: str
    shards: list[ShardEntry]
    statistics: dict[str, Any] = {}

    @property
    def carried(self) -> int:
        """Separators in each stored document, 0 or 1."""
        return int(self.separators != "none")

    @property
    def fingerprint(self) -> str:
        """Identity of the token stream of this corpus: equal fingerprints give equal training data."""
        parts = [self.dtype, self.separators, self.tokenizer.fingerprint, self.blocks_xxh3]
        parts += ["pairs"] if self.pairs else []
        parts += [entry.bin_xxh3 + entry.idx_xxh3 for entry in self.shards]
        return xxhash.xxh3_128("\n".join(parts).encode()).hexdigest()


def read_manifest(directory: Path) -> CorpusManifest:
    """Read the manifest of a corpus. Raises DataError if it is absent, damaged or of another format."""
    path = directory / "manifest.json"
    try:
        return parse_manifest(path.read_bytes(), str(path))
    except FileNotFoundError:
        begun = (directory / "plan.json").exists()
        unfinished = " (it is unfinished: repeat the command that makes it)" if begun else ""
        raise DataError(
            f"{directory} is not a corpus{unfinished}: it has no manifest.json",
            remedy="make one with `fsdp-data prepare` or `fsdp-data import`",
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def parse_manifest(text: bytes, origin: str) -> CorpusManifest:
    """The manifest in a text; `origin` is for messages. Raises DataError if it is damaged or of another format."""
    collecting = gc.isenabled()
    gc.disable()  # garbage collection over tens of thousands of new objects would double the time
    try:
        return CorpusManifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{origin} is damaged or of another version: {where}: {first['msg']}") from None
    finally:
        if collecting:
            gc.enable()


def write_manifest(directory: Path, manifest: CorpusManifest) -> None:
    """Write `manifest.json` of a corpus. Raises OSError."""
    replace_file(directory / "manifest.json", (manifest.model_dump_json(indent=1, exclude_none=True) + "\n").encode())


def load_json(path: Path) -> Any:
    """Parsed JSON of a file. Raises DataError if it is absent or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
