"""Copies of evaluation data in a corpus: what `validate` finds, what it leaves alone, and the list for `data.exclude`."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import DATA, Run

from fsdp_pretrain.config.config import load
from fsdp_pretrain.data.packing.opening import open_packer
from fsdp_pretrain.data.prepare.prepare import PrepareOptions
from fsdp_pretrain.data.prepare.train_tokenizer import train_tokenizer
from fsdp_pretrain.data.text.ngrams import ngram_hashes
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.data.validate import contamination
from fsdp_pretrain.data.validate import validate as validation
from fsdp_pretrain.data.validate.contamination import contaminated
from fsdp_pretrain.data.validate.protected import Protection, protect
from fsdp_pretrain.data.validate.validate import validate

pytestmark = pytest.mark.quick
LETTERS = "bcdfghjklmnprstvw"
WORDS = [first + vowel + last for first in LETTERS for vowel in "aeiou" for last in LETTERS]
Found = dict[tuple[str, int], tuple[str, float]]


def prose(seed: int, words: int) -> str:
    """Sentences of random words: two of them share no n-gram, see `test_a_clean_corpus_is_clean`."""
    rng = random.Random(seed)
    chosen = [rng.choice(WORDS) for _ in range(words)]
    return " ".join(word.title() if n % 9 == 0 else word + "." * (n % 9 == 8) for n, word in enumerate(chosen))


def spaced(text: str) -> str:
    return text.replace(" ", " \n\t ").replace(".", " ...")


def cut(text: str, share: float) -> str:
    """The middle of a text: both ends are cut."""
    words = text.split()
    gone = int(len(words) * (1 - share) / 2)
    return " ".join(words[gone : len(words) - gone])


def edited(text: str, every: int) -> str:
    """Each so many words another one."""
    return " ".join("qqq" if n % every == every - 1 else word for n, word in enumerate(text.split()))


@pytest.fixture
def made(tmp_path: Path, tokenizer: Tokenizer, helpers: Any) -> Callable[..., Path]:
    """`made(texts, name)`: a corpus of these documents; of two shards: document n is n // 2 of shard n % 2."""

    def make(texts: list[str], name: str = "c") -> Path:
        path: Path = helpers.corpus(tmp_path / name, tokenizer.encode(texts), tokenizer)
        return path

    return make


def protection(texts: list[str]) -> Protection:
    return Protection(protect(texts), [("the book", len(texts))])


def found(corpus: Path, texts: list[str], **options: Any) -> Found:
    """{(shard, document): (text, share)} of what is found, of which the report counts all."""
    report = validate(corpus, protection=protection(texts), quiet=True, **options)
    finding = report.findings.by_code.get("contaminated-documents")
    assert (finding.count if finding else 0) == len(report.contaminated)
    return {(place.shard, place.document): (place.text, place.share) for place in report.contaminated}


# ---------------------------------------------------------------- n-grams


@pytest.mark.parametrize(
    "same",
    [
        "THE QUICK, BROWN FOX. JUMPS (OVER) THE LAZY DOG -- NAÏVE CAFÉ 42!",
        "the\nquick\tbrown  fox jumps over the lazy dog naïve café 42",
        "the quick brown fox: jumps over the «lazy» dog… naive cafe\u0301 ４２",
        "...the 'quick' brown_fox/jumps/over/the/lazy/dog nai\u0308ve\u00a0cafe\u200942",
    ],
)
def test_writing_makes_no_difference(same: str) -> None:
    plain = ngram_hashes(["the quick brown fox jumps over the lazy dog naive cafe 42"])
    assert len(plain[0]) == 12 - 7 and np.array_equal(ngram_hashes([same])[0], plain[0])


def test_hashes_are_those_of_eight_words() -> None:
    """Equal for equal words and for no others, in the order of the words, and never across two texts."""
    rng = random.Random(2)
    texts = [" ".join(rng.choices(["ab", "ba", "bb"], k=rng.randrange(40))) for _ in range(400)]
    grams = [
        (n, tuple(text.split()[at : at + 8])) for n, text in enumerate(texts) for at in range(len(text.split()) - 7)
    ]
    hashes, owners = ngram_hashes(texts)
    assert owners.tolist() == [n for n, _ in grams]
    assert len(set(zip(hashes.tolist(), (gram for _, gram in grams), strict=True))) == len(set(hashes.tolist()))
    assert len(set(hashes.tolist())) == len({gram for _, gram in grams}) > 2000
    assert len(ngram_hashes([])[0]) == len(ngram_hashes(["", " ", "a b c d e f g"])[0]) == 0
    assert len(ngram_hashes(["ab c d e f g h i"])[0]) == 1 != len(ngram_hashes(["a b c d e f g h i"])[0])


def test_characters_are_words_where_no_spaces_are() -> None:
    assert len(ngram_hashes(["这是一个很大的图书馆"])[0]) == 10 - 7
    assert np.array_equal(ngram_hashes(["这是一个很大的图书馆。"])[0], ngram_hashes(["这是 一个 很大的、图书馆"])[0])
    assert len(ngram_hashes(["한국어는 띄어쓰기를 한다 " * 3])[0]) == 9 - 7  # Korean has spaces
    assert len(ngram_hashes(["हिन्दी में शब्दों के बीच रिक्त स्थान होता है"])[0]) == 9 - 7  # marks are in their words


# ---------------------------------------------------------------- what is found


@pytest.mark.promise("copies-found")
@pytest.mark.parametrize(
    ("copy", "share"),
    [
        (lambda text: text, 1.0),
        (str.upper, 1.0),
        (spaced, 1.0),
        (lambda text: f"{prose(90, 200)} {text} {prose(91, 3000)}", 1.0),
        (lambda text: cut(text, 0.6), 0.6),
        (lambda text: edited(text, 20), 0.65),
        (lambda text: " ".join(text.split()[200:290]), 0.2),
    ],
    ids="itself case space inside cut edited passage".split(),
)
def test_copies_are_found(made: Callable[..., Path], copy: Callable[[str], str], share: float) -> None:
    texts = [prose(n, 400) for n in range(5)]
    documents = [prose(100 + n, 300) for n in range(20)]
    documents[7] = copy(texts[3])
    ((place, (text, measured)),) = found(made(documents), texts).items()
    assert (place, text) == (("s1", 3), "the book, document 3") and measured == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize(("words", "is_found"), [(7, False), (8, True), (12, True), (14, True), (60, True)])
def test_short_texts_are_found_as_a_whole(made: Callable[..., Path], words: int, is_found: bool) -> None:
    """Not part of one of up to 13 words; half of a longer one. Fewer than 8 words are too short, and counted so."""
    text = prose(1, words)
    documents = [prose(100 + n, 50) for n in range(20)]
    part = made([*documents, " ".join(text.split()[1:])], "part")
    documents[5] += " " + text + " " + prose(3, 50)
    assert len(found(made(documents), [text])) == is_found
    assert len(found(part, [text])) == (words > 13)
    assert ("1 of them too short to compare" in str(protection([text]))) != is_found


@pytest.mark.parametrize("words", [8, 30])
def test_less_than_half_a_passage_is_not_found(made: Callable[..., Path], words: int) -> None:
    texts = [prose(n, 400) for n in range(5)]
    documents = [prose(100 + n, 300) for n in range(20)]
    documents[7] += " " + " ".join(texts[3].split()[200 : 200 + words])
    assert found(made(documents), texts) == {}


def test_what_many_documents_share_is_no_evidence(made: Callable[..., Path]) -> None:
    """Of a text, a passage in eleven documents; a whole text counts until it is in 10 (here) or in 0.1% of them."""
    licence, text = prose(1, 100), prose(2, 400)
    protected = [f"{licence}\n{text}", prose(3, 400)]
    others = [prose(100 + n, 60) for n in range(100)]
    for count, kept in ((10, 11), (11, 1)):
        documents = [f"{licence} {other}" if n < count else other for n, other in enumerate(others)]
        places = found(made([*documents, text], f"c{count}"), protected)
        assert len(places) == kept and places[f"s{100 % 2}", 50][1] == pytest.approx(0.8, abs=0.01)
    documents = [*others, *[protected[1]] * 10]
    assert len(found(made(documents, "ten"), protected)) == 10
    assert found(made([*documents, protected[1]], "eleven"), protected) == {}
    eleven = np.arange(11)
    shared = contamination.Shared(eleven, np.full(11, 0), np.full(11, 0.5))
    assert [len(contaminated({"s": [shared]}, protection(protected), size)) for size in (10_999, 11_000)] == [0, 11]


def test_a_document_has_the_text_of_which_it_holds_most(made: Callable[..., Path]) -> None:
    texts = [prose(n, 100) for n in range(3)]
    both = f"{cut(texts[2], 0.6)} {cut(texts[0], 0.8)} {cut(texts[1], 0.7)}"
    ((text, share),) = found(made([both, prose(9, 90)]), texts).values()
    assert text == "the book, document 0" and share == pytest.approx(0.8, abs=0.04)


def test_pieces_and_processes_do_not_change_what_is_found(
    made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [prose(n, 100) for n in range(20)]
    documents = [" ".join([*texts[n : n + 3], prose(50 + n, 40)]) for n in range(18)]
    corpus = made(documents)
    whole = found(corpus, texts)
    assert len(whole) == 18
    for patched in (contamination, "_BATCH_TOKENS"), (validation, "MEASURED_TOKENS"):
        monkeypatch.setattr(*patched, 300)
        assert found(corpus, texts) == whole
    monkeypatch.undo()
    monkeypatch.setattr(validation, "_POOL_BYTES", 0)
    assert found(corpus, texts, workers=2) == whole


@pytest.mark.promise("copies-found")
def test_a_clean_corpus_is_clean(tmp_path: Path, tokenizer: Tokenizer, helpers: Any) -> None:
    """Four megabytes of random sentences, against half a megabyte. Of 1,445 words, so few n-grams are equal by chance."""
    ids = [np.array(part) for part in tokenizer.encode([f" {word}" for word in WORDS])]
    rng = np.random.default_rng(1)
    documents = [np.concatenate([ids[n] for n in rng.integers(0, len(ids), 500)]).tolist() for _ in range(2000)]
    corpus = helpers.corpus(tmp_path / "c", documents, tokenizer)
    held = [prose(n, 500) for n in range(250)]
    assert found(corpus, held) == {}
    documents[1999] = tokenizer.encode([spaced(held[77])])[0]
    assert list(found(helpers.corpus(tmp_path / "d", documents, tokenizer), held)) == [("s1", 999)]


def test_ids_outside_the_vocabulary_hide_no_copy(tmp_path: Path, shared_corpus: Path, helpers: Any) -> None:
    """Of sentencepiece, which refuses to decode them."""
    options = {"kind": "sentencepiece", "vocab_size": 400, "options": PrepareOptions(), "max_bytes": 10**6}
    tokenizer = train_tokenizer([shared_corpus / "train.jsonl"], tmp_path / "t", **options)
    text = prose(1, 200)
    ids = tokenizer.encode([text])[0]
    corpus = helpers.corpus(tmp_path / "c", [[*ids[:30], 60_000, *ids[30:]], [5, 6, 7]], tokenizer)
    assert [place for place, _ in found(corpus, [text]).items()] == [("s0", 0)]


def test_ids_of_the_wrong_type_are_told(tmp_path: Path, tokenizer: Tokenizer, helpers: Any) -> None:
    """Of int16, which cannot hold the separator."""
    content = json.loads(tokenizer.path.read_text())
    vocabulary, (special,) = content["model"]["vocab"], content["added_tokens"]
    vocabulary.update({f"unused {n}": n for n in range(len(vocabulary), 40_000)})
    content["added_tokens"].append({**special, "id": 40_000, "content": "[SEP]"})
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    text = prose(1, 200)
    ids = tokenizer.encode([text])[0]
    corpus = helpers.corpus(tmp_path / "c", [[*ids[:30], -500, *ids[30:]], [5, 6, 7]], tokenizer, "<i2")
    large = Tokenizer.load(path, "[SEP]")
    report = validate(corpus / "shards", tokenizer=large, protection=protection([text]), quiet=True)
    assert report.findings.by_code["outside-vocabulary"].count == 1
    assert report.findings.by_code["contaminated-documents"].count == 1


# ---------------------------------------------------------------- the command


def report_of(done: Any) -> list[dict[str, Any]]:
    corpora: list[dict[str, Any]] = json.loads(done.stdout)["corpora"]
    return corpora


@pytest.mark.promise("copies-found")
def test_the_list_of_copies_is_what_a_run_excludes(
    lab: Any, made: Callable[..., Path], tmp_path: Path, run_command: Run, helpers: Any
) -> None:
    """Of the held-out file, a held-out corpus and a file of tasks; with the list, nothing more is found."""
    held, kept, task = [prose(n, 300) for n in range(4)], [prose(n, 300) for n in range(10, 14)], prose(20, 60)
    documents = [prose(100 + n, 100) for n in range(20)]
    documents[2], documents[5], documents[9] = held[1].upper(), cut(kept[2], 0.8), spaced(f"{documents[9]} {task}")
    sources = [{"name": "web", "path": str(made(documents))}, {"name": "clean", "path": str(made(documents[10:], "o"))}]
    loss_on = [{"name": "kept", "path": str(made(kept, "kept"))}]
    listed, tasks = tmp_path / "copies.txt", helpers.jsonl(tmp_path / "tasks.jsonl", [prose(21, 50), task])
    evaluation = {"heldout": str(helpers.jsonl(tmp_path / "held.jsonl", held)), "loss_on": loss_on}
    data = {"sequence_length": 32, "sources": sources}
    before = lab.config("before", data=data, eval={**evaluation, "tasks": ["heldout_bpb", "arc_easy"]})
    corpora = [source["path"] for source in sources]

    plain = run_command(DATA, "validate", *corpora, "--against", before)
    assert plain.returncode == 1 and "WARNING contaminated-documents: 2 documents (10.000%)" in plain.stdout
    assert "s0, document 1: holds 100% of " in plain.stdout and "held.jsonl, document 1: " in plain.stdout
    assert "the held-out corpus 'kept', document 1" in plain.stdout
    assert "not with the tasks arc_easy: `fsdp-eval texts`" in plain.stdout

    options = ["--protect", tasks, "--contamination", listed, "--json"]
    web, clean = report_of(run_command(DATA, "validate", *corpora, "--against", before, *options, expect=1))
    (finding,) = web["findings"]
    assert (finding["count"], finding["severity"]) == (3, "warning") and not clean["findings"]
    assert "4 documents of" in web["compared"] and "arc_easy" not in web["compared"]
    lines = listed.read_text().splitlines()
    assert [line for line in lines if line[0] != "#"] == ["web s0 1", "web s1 2", "web s1 4"]
    assert lines[4] == f"# holds 100% of {tasks}, document 1"

    after = lab.config("after", data={**data, "exclude": str(listed)}, eval=evaluation)
    again = run_command(DATA, "validate", *corpora, "--against", after, *options)
    assert again.returncode == 0 and listed.read_text().splitlines() == lines
    assert open_packer(load(after))._excluded == {("web", "s0", 1), ("web", "s1", 2), ("web", "s1", 4)}
    twice = {**data, "sources": [*sources, {**sources[0], "name": "again"}]}
    both, of_web = (
        lab.config("both", data=twice, eval=evaluation),
        lab.config("of_web", data={**twice, "exclude": str(listed)}),
    )
    run_command(
        DATA, "validate", corpora[0], "--against", of_web, *options[:2], "--quiet", expect=1
    )  # learned in `again`
    run_command(
        DATA, "validate", corpora[0], "--against", both, "--protect", tasks, "--contamination", tmp_path / "two"
    )
    named = [line.split()[0] for line in (tmp_path / "two").read_text().splitlines() if line[0] != "#"]
    assert named == ["web", "again"] * 3
    renamed = [{**sources[0], "name": "net"}, sources[1]]  # the list is of another source
    other = lab.config("other", data={**data, "sources": renamed, "exclude": str(listed)}, eval=evaluation)
    run_command(DATA, "validate", corpora[0], "--against", other, "--quiet", expect=1)
    kept_apart = run_command(DATA, "validate", loss_on[0]["path"], "--against", after, "--json")
    assert kept_apart.returncode == 0 and report_of(kept_apart)[0]["compared"] == ""


def test_texts_without_a_run(
    made: Callable[..., Path], tokenizer: Tokenizer, tmp_path: Path, run_command: Run, helpers: Any
) -> None:
    text = prose(1, 60)
    corpus = made([text, prose(2, 60)])
    tasks = helpers.jsonl(tmp_path / "tasks.jsonl", [text])
    done = run_command(DATA, "validate", corpus, "--protect", tasks)
    assert done.returncode == 1 and "contaminated-documents: 1 documents" in done.stdout
    bare = [DATA, "validate", corpus / "shards", "--protect", tasks, "--json"]
    unknown = run_command(*bare, "--vocab-size", tokenizer.vocab_size, "--eod", 0)
    assert unknown.returncode == 0 and "no tokenizer is known" in report_of(unknown)[0]["compared"]
    run_command(*bare, "--tokenizer", tokenizer.path, expect=1)
    (other := tmp_path / "other.jsonl").write_text('{"question": "abc"}\n')
    refused = run_command(DATA, "validate", corpus, "--protect", other, expect=78).stderr
    assert "no field 'text'" in refused and "always read from `text`" in refused and "--" not in refused, refused


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--contamination", "LIST"], "name the run with --against"),
        (["--against", "CONFIG", "--contamination", "LIST"], "is no source of a run"),
        (["--against", "FITS", "--contamination", "/nowhere/list"], "there is no /nowhere for the list"),
        (["--against", "GONE"], r"there is no file .*gone.jsonl \(eval.heldout\)"),
        (["--protect", "/nowhere.jsonl"], "cannot use /nowhere.jsonl"),
    ],
)
def test_what_is_refused(
    lab: Any, made: Callable[..., Path], tmp_path: Path, run_command: Run, arguments: list[str], named: str
) -> None:
    gone = lab.config("gone", eval={"heldout": str(tmp_path / "gone.jsonl")})
    corpus = made([prose(1, 60)] * 2)
    fits = lab.config("fits", data={"sources": [{"name": "web", "path": str(corpus)}]})
    known = {"LIST": tmp_path / "list", "CONFIG": lab.config(), "GONE": gone, "FITS": fits}
    done = run_command(DATA, "validate", corpus, *(known.get(word, word) for word in arguments), expect=78)
    assert re.search(named, done.stderr) and not (tmp_path / "list").exists(), done.stderr
