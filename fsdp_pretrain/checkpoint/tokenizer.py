"""The tokenizer of a checkpoint: find it, compare it, export it for transformers."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.errors import CheckpointError, DataError

from .store import Checkpoint

_SAMPLES = (
    "",
    "a",
    " a  b\n\n\tc ",
    "The run writes every checkpoint before it reads a shard: 1234567890, 3.14 + x_1 != y[-2];",
    "def main(argv: list[str]) -> int:\n    return 0\n",
    "Où est-ce? Größe, naïve, Привет, 你好，世界, こんにちは, שלום, 👩‍🔬 \u3402 \U00012000 \U0010fffd",
    "<s> </s> <|endoftext|> <unk> <0x41>",
)
QWEN2_WARNING = (
    "; AutoTokenizer of transformers 5 splits the texts of every Qwen2 as Qwen's tokenizer does: unless this is that "
    "one, load it by PreTrainedTokenizerFast"
)


def find_tokenizer(checkpoint: Checkpoint, config: Config) -> Tokenizer:
    """The tokenizer of a run: the copy in the run directory, or the one of its first corpus.

    Raises:
        CheckpointError: the model was trained with another tokenizer.
        DataError: there is no tokenizer.
    """
    recorded = checkpoint.train_state().identity.tokenizer
    copy = checkpoint.path.parent.parent / "tokenizer"
    path = copy if copy.exists() else config.data.sources[0].path
    tokenizer = Tokenizer.load(path, eod=recorded.eod)
    if tokenizer.fingerprint != recorded.fingerprint:
        raise CheckpointError(
            f"{tokenizer.path} is not the tokenizer of {checkpoint.path.name} (fingerprint differs)",
            effect="its ids would mean other texts: scores would be meaningless",
            remedy=f"put the right one at {copy}",
        )
    return tokenizer


def samples(tokenizer: Tokenizer) -> list[str]:
    """Texts to compare tokenizers with: typical ones, and decoded random ids of the whole vocabulary."""
    rng = random.Random(0)
    ids = [n for n in range(tokenizer.vocab_size) if n not in tokenizer.specials]
    drawn = [tokenizer.decode(rng.choices(ids, k=50)) for _ in range(200)]
    return [*_SAMPLES, *drawn]


def first_difference(tokenizer: Tokenizer, encoded: Sequence[Sequence[int]]) -> str | None:
    """The first of `samples(tokenizer)` whose ids differ from those in `encoded`, or None."""
    texts = samples(tokenizer)
    for text, ours, theirs in zip(texts, tokenizer.encode(texts), encoded, strict=True):
        if list(ours) != list(theirs):
            return text
    return None


def compare_with_folder(tokenizer: Tokenizer, folder: Path, *, accept: bool) -> str:
    """Compare the tokenizer of the corpora with that of a Hugging Face folder. Returns the result as a sentence.

    Args:
        accept: whether to accept that they cannot be compared.

    Raises:
        DataError: they encode differently, or cannot be compared.
    """
    names = ("tokenizer.json", "tokenizer.model")
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    try:
        if path is None:
            raise DataError(f"{folder} has no tokenizer.json or tokenizer.model")
        theirs = Tokenizer.load(path, eod=tokenizer.eod)
    except DataError as error:
        if accept:
            return f"not checked: whether the corpora fit its tokenizer (--accept tokenizer): {error.cause}"
        raise DataError(
            f"the tokenizer of the model cannot be compared with that of the corpora: {error.cause}",
            effect="if it is another, the imported model would be shown ids that mean something else to it",
            remedy="put the tokenizer.json or tokenizer.model of the model into the folder; if you know that the "
            "corpora were prepared with it, add --accept tokenizer",
        ) from None
    text = first_difference(tokenizer, theirs.encode(samples(tokenizer)))
    if text is not None:
        raise DataError(
            f"{path} encodes {text[:60]!r} differently from the tokenizer of the corpora, {tokenizer.path}",
            effect="the imported model would be shown ids that mean something else to it",
            remedy=f"prepare the corpora with --tokenizer {path}",
        )
    return f"its {theirs.path.name} encodes as the tokenizer of the corpora"


def export_tokenizer(tokenizer: Tokenizer, folder: Path, *, sequence_length: int) -> str:
    """Write `tokenizer.json` and `tokenizer_config.json` for transformers' AutoTokenizer.

    The export encodes like ours: nothing is added, and special token names inside a text are plain text. A
    sentencepiece model is converted if the result encodes all `samples` equally, else copied. `sequence_length` is
    written as `model_max_length`. Returns a description of what was written.
    """
    description = "tokenizer.json"
    if tokenizer.kind == "tokenizers":
        content = _plain(json.loads(tokenizer.path.read_text(encoding="utf-8")))
    else:
        converted = _from_sentencepiece(tokenizer)
        if converted is None:
            shutil.copyfile(tokenizer.path, folder / "tokenizer.model")
            return "tokenizer.model as it is: no tokenizer.json encodes every sample alike, so AutoTokenizer may differ"
        content, description = converted, "tokenizer.json, converted from sentencepiece; equal on all samples"
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.specials[tokenizer.eod],
        "model_max_length": sequence_length,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "fix_mistral_regex": False,  # it encodes as in training; else transformers suggests to change that
    }
    for name, value in (("tokenizer.json", content), ("tokenizer_config.json", settings)):
        (folder / name).write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    return description


def _plain(content: dict[str, Any]) -> dict[str, Any]:
    """A `tokenizer.json` without truncation, padding, BPE dropout and added special tokens."""
    content |= {"truncation": None, "padding": None}
    if content["model"].get("dropout"):
        content["model"]["dropout"] = None
    processor = content.get("post_processor") or {}
    steps = processor.get("processors", [processor])  # a Sequence has several
    if any(step.get("type") not in (None, "ByteLevel") for step in steps):
        content["post_processor"] = None  # ByteLevel only trims offsets, so it may stay
    return content


def _from_sentencepiece(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """A sentencepiece BPE model as `tokenizer.json`; None if it does not encode all samples equally."""
    from sentencepiece import SentencePieceProcessor
    from tokenizers import AddedToken, decoders, normalizers
    from tokenizers import Tokenizer as Model
    from tokenizers.models import BPE

    pieces = SentencePieceProcessor()
    pieces.Load(str(tokenizer.path))
    size = pieces.GetPieceSize()
    vocab = {pieces.IdToPiece(n): n for n in range(size)}
    joined = {
        piece: n for piece, n in vocab.items() if not (pieces.IsControl(n) or pieces.IsUnknown(n) or pieces.IsByte(n))
    }
    merges = sorted(
        (-pieces.GetScore(number), joined[piece[:cut]], joined[piece[cut:]], piece[:cut], piece[cut:])
        for piece, number in joined.items()
        for cut in range(1, len(piece))
        if piece[:cut] in joined and piece[cut:] in joined
    )
    fallback = any(pieces.IsByte(n) for n in range(size))
    unknown = pieces.IdToPiece(pieces.unk_id())
    pairs = [(left, right) for _, _, _, left, right in merges]
    model = Model(BPE(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=fallback))
    before: list[Any] = [normalizers.Replace(" ", "▁")]
    after: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if pieces.EncodeAsPieces("a")[0].startswith("▁"):  # a text begins as if a space preceded it
        before.insert(0, normalizers.Prepend("▁"))
        after.append(decoders.Strip(" ", left=1))
    model.normalizer = normalizers.Sequence(before)
    model.decoder = decoders.Sequence(after)
    model.add_special_tokens([AddedToken(text, normalized=False) for _, text in sorted(tokenizer.specials.items())])
    model.encode_special_tokens = True
    encoded = [item.ids for item in model.encode_batch(samples(tokenizer))]
    if first_difference(tokenizer, encoded) is not None:
        return None
    content: dict[str, Any] = json.loads(model.to_str())
    return content
