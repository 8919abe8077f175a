"""`fsdp-data train-tokenizer`: trains a byte-level BPE with `tokenizers`, or a BPE with `sentencepiece`, both lossless.

There is no normalisation (sentencepiece's default rewrites text), white space is kept and may form pieces, and unknown
characters fall back to bytes. So decoding gives the encoded text again; this was measured on code and prose.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path

from fsdp_pretrain.data.text.bad_records import BadRecords, passed_over
from fsdp_pretrain.data.text.inputs import plan_shards
from fsdp_pretrain.data.text.tokenizer import EOD, Tokenizer
from fsdp_pretrain.errors import DataError
from fsdp_pretrain.files import replace_file

from .prepare import PrepareOptions

_LINE = 1 << 14
"""Characters of the longest line that sentencepiece gets; longer ones come in pieces."""


def train_tokenizer(
    inputs: Sequence[str | Path], out: Path, *, kind: str, vocab_size: int, options: PrepareOptions, max_bytes: int
) -> Tokenizer:
    """Train a tokenizer and store it in the directory `out`.

    Args:
        kind: `bpe` or `sentencepiece`.
        vocab_size: number of tokens, special ones included.
        max_bytes: about so many bytes of text are used; of a larger input, every n-th document.

    Raises:
        DataError: the input is damaged, or the vocabulary too small or too large for the text.
    """
    if vocab_size < 260:
        raise DataError(
            f"--vocab-size {vocab_size} is too small",
            remedy="256 bytes and the special tokens need at least 260",
        )
    out.mkdir(parents=True, exist_ok=True)
    name, train = ("tokenizer.json", _train_bpe) if kind == "bpe" else ("tokenizer.model", _train_sentencepiece)
    replace_file(out / name, train(_sample(inputs, options, max_bytes), vocab_size))
    return Tokenizer.load(out / name)


def _sample(inputs: Sequence[str | Path], options: PrepareOptions, max_bytes: int) -> Iterator[str]:
    """The texts to train on. Raises DataError, OSError."""
    shards = plan_shards(options.find(inputs), None, lines=options.lines)
    units = [unit for shard in shards for unit in shard]
    every = max(1, -(-sum(unit.size for unit in units) // max_bytes))
    bad = BadRecords(options.max_bad)
    for document in islice(chain.from_iterable(options.read(unit, bad) for unit in units), 0, None, every):
        if not options.holds_out(document):
            yield document.text
    if bad.count:
        print(passed_over(bad.count, list(map(str, bad.first))), file=sys.stderr)


def _train_bpe(texts: Iterator[str], vocab_size: int) -> bytes:
    from tokenizers import Tokenizer as Model
    from tokenizers import decoders, models, pre_tokenizers, trainers

    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    text: str = model.to_str(pretty=True)  # `save` does not report a full disk
    return text.encode()


def _train_sentencepiece(texts: Iterator[str], vocab_size: int) -> bytes:
    from sentencepiece import SentencePieceTrainer

    buffer = io.BytesIO()
    try:
        SentencePieceTrainer.Train(
            sentence_iterator=(
                line[at : at + _LINE]
                for text in texts
                for line in text.split("\n")
                for at in range(0, len(line), _LINE)
            ),
            model_writer=buffer,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=4 * _LINE,  # bytes; sentencepiece leaves longer ones out, without a word
            character_coverage=0.9999,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise DataError(
            f"sentencepiece could not train {vocab_size} pieces: {str(error).strip().splitlines()[-1]}",
            remedy="more text, or a smaller --vocab-size",
        ) from None
    return buffer.getvalue()
