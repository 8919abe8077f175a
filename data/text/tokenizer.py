"""sentencepiece and tokenizers models behind one class whose `encode` adds nothing and parses no special token.

Only the packer writes separators. So every way in which a tokenizer adds special tokens by itself is switched off, and
`Tokenizer.load` checks this (see `_probe`).
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_pretrain.errors import DataError

EOD = "<|endoftext|>"
"""Separator of the tokenizers trained here with `--kind bpe`; sentencepiece models use their `</s>`."""

_KNOWN_EODS = (EOD, "</s>", "<eod>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<EOT>", "<eos>")
_UNKNOWN = "\u3402 \U00012000 \U0010fffd"
"""Text that no vocabulary has, to see whether the separator is also the unknown token."""
_FILES = ("tokenizer.json", "tokenizer.model")


class Tokenizer(ABC):
    """A loaded tokenizer. Build it with `load`.

    Attributes:
        path: file of the model.
        kind: `tokenizers` or `sentencepiece`.
        vocab_size: highest id plus one.
        eod: id of the document separator.
        specials: {id: text} of the control tokens; `encode` never produces them.
        fingerprint: sha256 over the file and the separator; equal fingerprints encode equally.
    """

    kind: str
    vocab_size: int
    eod: int
    specials: dict[int, str]

    def __init__(self, path: Path, eod: str | int | None) -> None:
        self.path = path
        self._open()
        number = self._id_of(eod) if isinstance(eod, str) else eod if eod is not None else self._default_eod()
        if number is None or not 0 <= number < self.vocab_size:
            cause = (
                f"the tokenizer {path} has no token {eod!r}"
                if eod is not None
                else f"{path} does not define the token that separates documents"
            )
            names = ", ".join(list(self.specials.values())[:8])
            raise DataError(cause, remedy=f"name one with --eod; its special tokens: {names or 'none'}")
        self.eod = number
        self.specials.setdefault(number, self.decode([number]))
        self.fingerprint = fingerprint_of(path.read_bytes(), number)
        _probe(self)

    @staticmethod
    def load(path: str | Path, eod: str | int | None = None) -> Tokenizer:
        """Open a tokenizer.

        Args:
            path: `tokenizer.json`, a sentencepiece `.model`, or a directory that holds one of them.
            eod: separator, as text or id; needed only if the tokenizer does not name one.

        Raises:
            DataError: there is no tokenizer, or it cannot be read, has no known separator, or adds tokens by itself.
        """
        path = _find(Path(path))
        try:
            return _SentencePiece(path, eod) if path.suffix == ".model" else _Tokenizers(path, eod)
        except DataError:
            raise
        except BaseException as error:  # the libraries raise bare Exception, RuntimeError and panics
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise DataError(f"cannot load the tokenizer {path}: {error}") from None

    def describe(self) -> dict[str, Any]:
        """The entry of this tokenizer in a corpus manifest."""
        return {
            "file": self.path.name,
            "kind": self.kind,
            "vocab_size": self.vocab_size,
            "eod": self.eod,
            "specials": {str(number): text for number, text in sorted(self.specials.items())},
            "fingerprint": self.fingerprint,
        }

    @abstractmethod
    def _open(self) -> None:
        """Load the file at `path`, and set `vocab_size` and `specials`."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text; nothing is added, and special tokens in a text are treated as plain text.

        The library `tokenizers` needs 160 bytes of memory per character of all texts.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, with special tokens visible."""

    @abstractmethod
    def _id_of(self, token: str) -> int | None: ...

    @abstractmethod
    def _default_eod(self) -> int | None: ...


def fingerprint_of(content: bytes, eod: int) -> str:
    """The fingerprint of a tokenizer, from the content of its file and its separator."""
    return hashlib.sha256(content + f"\neod {eod}".encode()).hexdigest()


class _Tokenizers(Tokenizer):
    """A `tokenizer.json` of the `tokenizers` library."""

    kind = "tokenizers"

    def _open(self) -> None:
        from tokenizers import Tokenizer as Model

        self._model = Model.from_file(str(self.path))
        self._model.no_truncation()  # truncation and padding can be stored in the file, and would act silently
        self._model.no_padding()
        self._model.encode_special_tokens = True  # a literal "</s>" in a text stays text; not stored in the file
        if getattr(self._model.model, "dropout", None):
            self._model.model.dropout = None  # BPE dropout, if stored in the file, would make encoding random
        added = self._model.get_added_tokens_decoder()
        self.specials = {number: token.content for number, token in added.items() if token.special}
        self.vocab_size = max(self._model.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [item.ids for item in self._model.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode(list(ids), skip_special_tokens=False))

    def _id_of(self, token: str) -> int | None:
        number: int | None = self._model.token_to_id(token)
        return number

    def _default_eod(self) -> int | None:
        """The end token of `tokenizer_config.json` beside the file, else the only special token with a known name."""
        config = self.path.with_name("tokenizer_config.json")
        if config.is_file():
            try:
                content = json.loads(config.read_bytes())["eos_token"]
            except (ValueError, RecursionError) as error:
                raise DataError(f"cannot read {config}: {error}") from None
            except (KeyError, TypeError):
                content = None
            content = content.get("content") if isinstance(content, dict) else content
            if isinstance(content, str):
                return self._id_of(content)
        known = [number for number, content in self.specials.items() if content in _KNOWN_EODS]
        return known[0] if len(known) == 1 else None


class _SentencePiece(Tokenizer):
    """A sentencepiece `.model`."""

    kind = "sentencepiece"

    def _open(self) -> None:
        from sentencepiece import SentencePieceProcessor

        self._model = SentencePieceProcessor()
        self._model.Load(str(self.path))  # the constructor could set add_bos/add_eos for all later calls
        self.vocab_size = self._model.GetPieceSize()
        pieces = range(self.vocab_size)
        self._control = {n: self._model.IdToPiece(n) for n in pieces if self._model.IsControl(n)}
        self.specials = dict(self._control)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        ids: list[list[int]] = self._model.Encode(
            list(texts), out_type=int, add_bos=False, add_eos=False, num_threads=1
        )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Control pieces decode to nothing in sentencepiece; show their text."""
        if self._control.keys().isdisjoint(ids):
            return str(self._model.Decode(list(ids)))
        parts: list[str] = []
        run: list[int] = []
        for number in ids:
            if number in self._control:
                parts += [self._model.Decode(run), self._control[number]]
                run = []
            else:
                run.append(int(number))
        return "".join([*parts, self._model.Decode(run)])

    def _id_of(self, token: str) -> int | None:
        number = int(self._model.PieceToId(token))
        return number if self._model.IdToPiece(number) == token else None

    def _default_eod(self) -> int | None:
        number = int(self._model.eos_id())
        return number if number >= 0 else None


def _find(path: Path) -> Path:
    if path.is_dir():
        candidates = [path / name for name in _FILES if (path / name).is_file()] or sorted(path.glob("*.model"))
        if len(candidates) != 1:
            what = "no tokenizer" if not candidates else f"several tokenizers ({', '.join(p.name for p in candidates)})"
            raise DataError(f"{path} holds {what}", remedy="name the tokenizer.json or .model file itself, by its path")
        return candidates[0]
    if not path.is_file():
        raise DataError(
            f"there is no tokenizer at {path}",
            remedy="nothing is downloaded; of a model of the Hugging Face Hub: `hf download NAME tokenizer.json "
            "tokenizer_config.json --local-dir tokenizers/NAME` (tokenizer.model, where it has no tokenizer.json)",
        )
    return path


def _probe(tokenizer: Tokenizer) -> None:
    """Raise DataError if encoding adds specials, turns their literals in a text into specials, or unknown text into the
    separator. Tokens declared as text (user-defined, or added and not special) are allowed, except the separator."""
    literals = list(tokenizer.specials.values())
    texts = ["", "a", "b c\n", " x ".join(literals), "".join(literals), *literals, _UNKNOWN]
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        slipped = sorted(set(ids) & ({tokenizer.eod} if text == _UNKNOWN else set(tokenizer.specials)))
        if slipped:
            names = ", ".join(f"{number} {tokenizer.specials[number]!r}" for number in slipped[:4])
            raise DataError(
                f"{tokenizer.path} produces special tokens by itself ({names}) when it encodes {text[:60]!r}",
                effect="documents would have separators from the tokenizer and from the packer",
                remedy="declare those tokens as control (sentencepiece) or special (tokenizers), or name another --eod",
            )
