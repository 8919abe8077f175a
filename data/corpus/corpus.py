"""A corpus: shards, a manifest, and a block table that locates every document.

    CORPUS/manifest.json     tokenizer fingerprint, separator policy, shards with sizes and checksums
    CORPUS/blocks.npy        int64 [blocks, 5], see `BLOCK_COLUMNS`
    CORPUS/tokenizer.json    or tokenizer.model: a copy of the tokenizer
    CORPUS/shards/*.bin,.idx Megatron-Core indexed datasets; adopted ones stay where they are, the manifest has the path

Blocks are runs of documents of about 4M tokens within one shard. A process needs only the table to locate every
training sample: 20 MB for a corpus of 2T tokens.
"""

from __future__ import annotations

import dataclasses
import gc
import io
import json
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from data.text.tokenizer import Tokenizer
from fsdp_pretrain.atomic import replace_file
from fsdp_pretrain.errors import DataError

from .reading import READ_TIMEOUT, MirroredPlaces
from .shards import Part, Shard

BLOCK_TOKENS = 4_000_000
MAX_VOCABULARY = 1 << 24
"""More is a mistake: the tables would not fit into memory."""
BLOCK_COLUMNS = ("shard", "first_document", "documents", "nonempty_documents", "tokens")
_OPEN_SHARDS = 512
Separators = Literal["none", "trailing", "leading"]
"""What stored documents carry: no separator, one at the end, or one at the beginning."""


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
    """One shard: `tokens` counts what the file stores, carried separators included.

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
    """What stored documents carry. The packer strips it and writes its own separators."""
    pairs: bool = False
    """Documents 2k and 2k + 1 of every shard are a prompt and its answer."""
    tokenizer: TokenizerEntry
    documents: Count
    tokens: Count
    blocks_xxh3: str
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
        text = path.read_bytes()
    except FileNotFoundError:
        begun = (directory / "plan.json").exists()
        unfinished = " (it is unfinished: repeat the command that makes it)" if begun else ""
        raise DataError(
            f"{directory} is not a corpus{unfinished}: it has no manifest.json",
            remedy="make one with `fsdp-data prepare` or `fsdp-data import`",
        ) from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    collecting = gc.isenabled()
    gc.disable()  # garbage collection over tens of thousands of new objects would double the time
    try:
        return CorpusManifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{path} is damaged or of another version: {where}: {first['msg']}") from None
    finally:
        if collecting:
            gc.enable()


def build_blocks(
    shards: Iterable[Shard], block_tokens: int = BLOCK_TOKENS, carried: int = 0, *, pairs: bool = False
) -> npt.NDArray[np.int64]:
    """Cut each shard into runs of documents of about `block_tokens`; int64 [blocks, 5], see `BLOCK_COLUMNS`.

    Separators that documents carry (`carried` each) are not counted, so the table does not depend on how documents are
    stored. With `pairs`, no block separates a prompt from its answer.
    """
    rows = []
    for number, shard in enumerate(shards):
        lengths = shard.lengths - carried
        ends = np.cumsum(lengths, dtype=np.int64)
        full = np.cumsum(lengths > 0, dtype=np.int64)
        first, done_tokens, done_full = 0, 0, 0
        while first < shard.documents:
            stop = int(np.searchsorted(ends, done_tokens + block_tokens)) + 1
            stop = min(stop + (stop % 2 if pairs else 0), shard.documents)
            tokens, nonempty = int(ends[stop - 1]), int(full[stop - 1])
            if nonempty > done_full:
                rows.append((number, first, stop - first, nonempty - done_full, tokens - done_tokens))
            first, done_tokens, done_full = stop, tokens, nonempty
    return np.asarray(rows, dtype=np.int64).reshape(-1, len(BLOCK_COLUMNS))


def write_corpus(
    directory: Path,
    tokenizer: Tokenizer,
    entries: list[dict[str, Any]],
    dtype: np.dtype[Any],
    statistics: dict[str, Any],
    separators: Separators = "none",
    *,
    pairs: bool = False,
    blocks: npt.NDArray[np.int64] | None = None,
) -> CorpusManifest:
    """Write block table, tokenizer copy and finally, atomically, the manifest of shards already in place.

    The block table is computed from the shards unless given.
    """
    if blocks is None:
        shards = (Shard(ShardEntry(**entry).prefix(directory)) for entry in entries)
        blocks = build_blocks(shards, carried=int(separators != "none"), pairs=pairs)
    buffer = io.BytesIO()
    np.save(buffer, blocks)
    replace_file(directory / "blocks.npy", buffer.getvalue())
    description = tokenizer.describe()
    description["file"] = "tokenizer.model" if tokenizer.kind == "sentencepiece" else "tokenizer.json"
    replace_file(directory / description["file"], tokenizer.path.read_bytes())
    manifest = CorpusManifest.model_validate(
        {
            "format": 1,
            "dtype": dtype.name,
            "separators": separators,
            "pairs": pairs,
            "tokenizer": description,
            "documents": sum(entry["documents"] for entry in entries),
            "tokens": sum(entry["tokens"] for entry in entries),
            "blocks_xxh3": xxhash.xxh3_128(buffer.getvalue()).hexdigest(),
            "shards": entries,
            "statistics": statistics,
        }
    )
    replace_file(directory / "manifest.json", (manifest.model_dump_json(indent=1, exclude_none=True) + "\n").encode())
    return manifest


class Corpus:
    """A corpus opened for reading; shards are mapped when first needed, and a bounded number stays open.

    What cannot be read from `directory` is read from its copy `mirror`.

    Attributes:
        blocks: int64 [blocks, 5].
        places: the directories, with read times and notices.

    Raises:
        DataError: not a corpus, another block table than the manifest names, or a mirror of another corpus.
    """

    def __init__(self, directory: Path, mirror: Path | None = None, *, read_timeout: float = READ_TIMEOUT) -> None:
        self.directory = directory
        self.places = MirroredPlaces([directory, mirror] if mirror is not None else [directory], read_timeout)
        self.manifest = self.places.read("manifest.json", read_manifest)
        self._entries = {directory: self.manifest.shards}
        if mirror is not None:
            self._entries[mirror] = self._check_mirror(mirror, read_timeout)
        self.blocks = self.places.read("blocks.npy", self._read_blocks)
        if not len(self.blocks):
            raise DataError(f"{directory} holds no tokens")
        self._open: OrderedDict[int, Shard] = OrderedDict()

    def _check_mirror(self, mirror: Path, timeout: float) -> list[ShardEntry]:
        """The shards of the mirror: the same, possibly under other paths. Raises DataError for another corpus."""
        found = MirroredPlaces([mirror], timeout).read("manifest.json", read_manifest)
        if found.fingerprint != self.manifest.fingerprint:
            raise DataError(
                f"{mirror} is not a copy of {self.directory}: their manifests have different fingerprints "
                f"({found.fingerprint[:12]}, {self.manifest.fingerprint[:12]})",
                effect="reading from it would change the data in the middle of a run",
                remedy="copy the corpus again, or remove the source's mirror from the configuration",
            )
        return found.shards

    def _read_blocks(self, place: Path) -> npt.NDArray[np.int64]:
        path = place / "blocks.npy"
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read the block table {path}: {error.strerror}") from None
        if xxhash.xxh3_128(raw).hexdigest() != self.manifest.blocks_xxh3:
            raise DataError(
                f"{path} is not the block table that manifest.json names",
                effect="samples would begin and end at other tokens than the run expects",
                remedy="restore both files from the same copy of the corpus, or run `fsdp-data prepare` again",
            )
        blocks: npt.NDArray[np.int64] = np.load(io.BytesIO(raw), allow_pickle=False)
        return blocks

    def kept(self, number: int, part: Part) -> Shard | None:
        """Shard `number` if it is open and `part` is known to be in memory, else None; reads nothing."""
        shard = self._open.get(number)
        return shard if shard is not None and shard.resident(part) else None

    def shard(self, number: int, part: Part = ("tokens", 0, 0)) -> Shard:
        """Shard `number` in manifest order, opened and with `part` in memory. Raises DataError."""
        if shard := self.kept(number, part):
            return shard
        entry, kept = self.manifest.shards[number], self._open.get(number)

        def read(place: Path) -> Shard:
            prefix = self._entries[place][number].prefix(place)
            shard = kept if kept is not None and kept.prefix == prefix else self._open_shard(prefix, entry)
            shard.load(part)
            return shard

        shard = self._open[number] = self.places.read(f"shards/{entry.name}", read)
        self._open.move_to_end(number)
        if len(self._open) > _OPEN_SHARDS:
            self._open.popitem(last=False)
        return shard

    def _open_shard(self, prefix: Path, entry: ShardEntry) -> Shard:
        """Open a shard and check its index and sizes against the manifest."""
        shard = Shard(prefix)
        text = "{} documents of {} in {} bytes"
        found = text.format(shard.documents, shard.dtype.name, shard.tokens.nbytes)
        said = text.format(entry.documents, self.manifest.dtype, entry.bytes)
        if found != said:
            raise DataError(
                f"{prefix}.idx and .bin hold {found}, the manifest says {said}",
                remedy="the shard is not the one the manifest was made for; restore it",
            )
        return shard

    def tokenizer(self) -> Tokenizer:
        """The tokenizer stored with the corpus. Raises DataError if it is not the one the manifest names."""
        entry = self.manifest.tokenizer
        tokenizer = self.places.read(entry.file, lambda place: Tokenizer.load(place / entry.file, eod=entry.eod))
        if tokenizer.fingerprint != entry.fingerprint:
            raise DataError(
                f"{tokenizer.path} is not the tokenizer this corpus was made with (fingerprint differs)",
                effect="its text and the tokens of the corpus would not agree",
                remedy="restore the file, or prepare the corpus again",
            )
        return tokenizer


def load_json(path: Path) -> Any:
    """Parsed JSON of a file. Raises DataError if it is absent or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
