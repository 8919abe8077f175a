"""Long texts are encoded in parts, with the ids of the whole: for every tokenizer, whatever the text."""

from __future__ import annotations

import json
import random
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Model

from data.text import splitting
from data.text import tokenizer as module
from data.text.tokenizer import EOD, Tokenizer

pytestmark = pytest.mark.quick
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA_3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + CONTRACTIONS + "?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + CONTRACTIONS + "?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = [
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
]
# What the vocabulary learns: pieces with white space everywhere, so that a wrong cut shows.
TRAINING = [
    "a b c\n\nab  bc 1 12 123 a.\n\n ab, é の 文字\n don't I'LL b's й\n\n \n" * 20,
    "aaaa    \n\n\n\n....1111 " * 20,
]
PIECES = [
    *"ab1 \n.'é文の\t\r/🙂\x00\u0301\u00a0\u3000\u2028\x85ﬁＡ⑴\ufdfaŀ각й",
    *("  ", "\n\n", "'s", "'LL", "x y", "e\u0301", EOD, "<add>"),
]


def split(*expressions: str) -> Any:
    steps = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in expressions]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


GPT_2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
CUTTABLE: dict[str, tuple[Any, Any, list[AddedToken]]] = {
    "gpt-2": (None, GPT_2, []),
    "gpt-2 NFC": (normalizers.NFC(), GPT_2, [AddedToken("<add>", normalized=True)]),
    "gpt-2 NFKC": (normalizers.Sequence([normalizers.NFKC()]), GPT_2, [AddedToken("<add>", lstrip=True)]),
    "digits": (None, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT_2]), []),
    "llama-3": (None, split(LLAMA_3), [AddedToken("<add>"), AddedToken("\n\n")]),
    "gpt-4o": (normalizers.NFC(), split(GPT_4O), []),
    "deepseek": (None, split(*DEEPSEEK), [AddedToken("文字")]),
}
WHOLE: dict[str, tuple[Any, Any, list[AddedToken]]] = {
    "rstrip": (None, GPT_2, [AddedToken("b", rstrip=True)]),
    "single word": (None, GPT_2, [AddedToken(" ", single_word=True)]),
    "a token over a cut": (None, GPT_2, [AddedToken("a b")]),
    "a token that is one when normalized": (normalizers.NFKC(), GPT_2, [AddedToken("Ａ\u00a0", normalized=True)]),
    "lower case": (normalizers.Lowercase(), GPT_2, []),
    "decomposed": (normalizers.NFD(), split(LLAMA_3), []),
    "prefix space": (None, pre_tokenizers.ByteLevel(add_prefix_space=True), []),
    "no pieces": (None, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), []),
    "metaspace": (None, pre_tokenizers.Metaspace(), []),
    "an unknown expression": (None, split(r"\p{L}+ ?|\s+|[^\s\p{L}]+"), []),
    "an expression that leaves gaps": (None, split(r"\p{N}{1,3}"), []),
    "other pieces": (None, pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA_3), "merged_with_next"), GPT_2]), []),
}  # fmt: skip


def make(folder: Path, normalizer: Any, pre_tokenizer: Any, added: list[AddedToken]) -> Tokenizer:
    model = Model(models.BPE())
    model.pre_tokenizer, model.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        model.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[EOD], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    model.train_from_iterator(TRAINING, trainer)
    model.add_tokens(added)
    model.save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


@pytest.mark.parametrize("kind", CUTTABLE)
def test_parts_give_the_ids_of_the_whole(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, rng, cut = make(tmp_path, *CUTTABLE[kind]), random.Random(kind), 0
    plain = Model.from_file(str(tmp_path / "tokenizer.json"))
    plain.encode_special_tokens = True
    for _ in range(1500):
        text = "".join(rng.choices(PIECES + PIECES[:4] * rng.randrange(20), k=rng.randrange(60)))
        size = rng.randrange(1, 6)
        monkeypatch.setattr(module, "_AT_ONCE", size)
        assert tokenizer.encode([text, "a b"])[0] == plain.encode(text, add_special_tokens=False).ids, repr(text)
        pieces = list(splitting.parts(text, size))
        assert "".join(pieces) == text and all(len(piece) >= size for piece in pieces[:-1])
        cut += len(pieces) > 2
    assert cut > 500  # it was cut sometimes


@pytest.mark.parametrize("kind", WHOLE)
def test_other_tokenizers_get_their_texts_whole(kind: str, tmp_path: Path) -> None:
    tokenizer = make(tmp_path, *WHOLE[kind])
    assert not tokenizer._cuts  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["rstrip", "a token over a cut", "prefix space", "decomposed", "no pieces"])
def test_cutting_those_would_show(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conditions are necessary: for some text the parts give other ids than the whole."""
    tokenizer = make(tmp_path, *WHOLE[kind])
    texts = ["ab  bc a b", "b \nc", "a b", "aaaa    \n", "й\n\nb й.\n\n"]
    whole = tokenizer.encode(texts)
    tokenizer._cuts = True  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "_AT_ONCE", 1)
    assert tokenizer.encode(texts) != whole


def test_what_stands_before_a_cut_stays_a_letter_or_digit() -> None:
    """In any Unicode version of the library, and through the allowed normalizers."""
    before = [chr(n) for n in range(0x110000) if splitting.CUT.search(chr(n) + " ")]
    assert len(before) > 30_000
    for character in before:
        assert unicodedata.ucd_3_2_0.category(character)[0] in "LN"
        for form in ("NFC", "NFKC"):
            assert unicodedata.category(unicodedata.normalize(form, character)[-1])[0] in "LN"


def test_progress_is_told_part_by_part(shared_corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", 100)
    tokenizer, progress = Tokenizer.load(shared_corpus / "tokenizer"), list[int]()
    text = json.loads((shared_corpus / "train.jsonl").read_text().splitlines()[0])["text"] * 40
    tokenizer.encode([text], progress.append)
    assert sum(progress) == len(text) and len(progress) > 5 and max(progress) < 200
