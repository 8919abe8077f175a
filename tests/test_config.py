"""Configuration: strict, all problems at once, each with its origin and a remedy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from processes import ROOT
from pydantic import ValidationError

from fsdp_pretrain.config.config import Config, load, schema_keys
from fsdp_pretrain.config.reference import meanings, reference
from fsdp_pretrain.config.resume_rules import FREE, changes
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.plan.warnings import in_vain
from fsdp_pretrain.remote import Url
from fsdp_pretrain.units import Bytes, Progress, Seconds

pytestmark = pytest.mark.quick

GOOD = """
[run]
name = "x"
dir = "here"
[model]
family = "llama"
layers = 2
hidden = 64
heads = 4
ffn = 128
vocab = 512
[data]
sequence_length = 64
[[data.sources]]
name = "a"
path = "corpus"
[train]
duration = "100 steps"
global_batch = "512 tokens"
micro_batch = 2
[optimizer]
lr = 1e-3
[checkpoint]
every = "50 steps"
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.toml"
    path.write_text(GOOD)
    return path


def problems(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    assert caught.value.exit == 78
    return str(caught.value)


@pytest.mark.shows("B15")
def test_resolved_configuration_loads_to_the_same_object(good: Path, tmp_path: Path) -> None:
    config = load(good, ["optimizer.lr=2e-4", "parallel.timeout=5 minutes", "train.grad_clip=0", "run.name=other"])
    assert (config.optimizer.lr, config.parallel.timeout.value, config.run.name) == (2e-4, 300, "other")
    again = tmp_path / "again.toml"
    again.write_text(config.to_toml())
    assert load(again) == config


@pytest.mark.parametrize("time", ["14 days", "1234567.891 s", "0.001 s", "1e+16 s", "86399.9999 s"])
def test_a_duration_is_written_as_it_is_read(good: Path, tmp_path: Path, time: str) -> None:
    """A run of which it could not be read could never be resumed."""
    config, again = load(good, [f"eval.overdue={time}"]), tmp_path / "again.toml"
    again.write_text(config.to_toml())
    assert load(again) == config and "e+" not in str(config.eval.overdue)
    assert Seconds.parse("1.2096e+06 s") == Seconds.parse("14 days")  # as it was written once


def test_a_changed_entry_of_a_free_table_is_a_change_of_the_table(good: Path) -> None:
    (change,) = changes(load(good), load(good, ["eval.gen_kwargs.max_gen_toks=64"]))
    assert (change.key, change.kind) == ("eval.gen_kwargs", FREE)
    assert change.text == "eval.gen_kwargs.max_gen_toks: absent -> 64"


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("parallel.shard=nodes", "parallel.shard = 'nodes'"),
        ("checkpoint.keep_every=100B", "checkpoint.keep_every = '100B'"),
        ("train.batch_ramp={first='0 samples', by='2 samples', duration='80 samples'}", "train.batch_ramp.first"),
        ("data.sources.a.weight=-1", "data.sources.0.weight = -1"),
        ("run.dir=", "run.dir = ''"),
        ("data.sources.0.path=", "data.sources.0.path = ''"),
    ],
)
def test_a_wrong_value_is_one_problem_with_its_key_and_its_origin(good: Path, override: str, key: str) -> None:
    text = problems(good, override)
    assert "1 problem in" in text and f"{key}" in text and f"(override {override!r}): " in text, text


def test_relative_paths_become_absolute(good: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(good)
    assert config.run.dir == tmp_path / "here"
    assert config.data.sources[0].path == tmp_path / "corpus"


@pytest.mark.promise("mistakes-first")
def test_all_problems_come_in_one_report(good: Path) -> None:
    text = problems(
        good,
        "train.lrr=3",
        "train.duration=100",
        "optimizer.warmup=500 potatoes",
        "model.heads=3",
        "data.sources.0.pathh=x",
        "optimizer.lr=abc",
        "checkpoint.keep_last=1",
        "data.sources.7.weight=1",
    )
    assert "8 problems" in text
    for part in (
        "there is no data.sources.7",
        "train.lrr (override 'train.lrr=3'): unknown key; did you mean 'optimizer.lr'?",
        "train.duration = 100",
        "bare number has no unit",
        "unknown unit 'potatoes'",
        "hidden = 64 is not a multiple of heads = 3",
        "did you mean 'data.sources.path'?",
        "optimizer.lr = 'abc'",
        "checkpoint.keep_last = 1",
    ):
        assert part in text


def test_a_misspelt_required_key_is_one_problem(good: Path) -> None:
    good.write_text(good.read_text().replace("layers", "layrs"))
    text = problems(good)
    assert "1 problem in" in text and "unknown key; did you mean 'model.layers'?" in text and "this key" not in text


@pytest.mark.shows("A16")
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optimizer.warmup=500 steps", "warm-up of 500 steps (4_000 samples) is longer than the decay"),
        ("optimizer.min_lr=1", "optimizer.min_lr = 1.0 is above optimizer.lr"),
        ("train.global_batch=100 tokens", "not a whole number of samples of 64 tokens"),
        ("eval.every=50 steps", "eval.heldout names no file"),
        ("train.batch_ramp={first='2 samples', by='5 samples', duration='80 samples'}", "whole increments"),
        ("train.batch_ramp={first='2 samples', by='2 samples', duration='80 steps'}", "cannot be in steps"),
        ("train.duration=0 steps", "less than one step"),
        ("checkpoint.every=0 steps", "0 steps is no length"),
        ("model.family=bert", "must be one of 'llama', 'mistral', 'qwen2', 'qwen3', 'olmo3', 'gemma3_text', 'gpt'"),
        ("model.positions=32", "unknown key"),
        ("data.positions=document", "set data.attention = document as well"),
        ("nonsense", "not of the form section.key=value"),
        ("data.sources.3.name=x", "there is no data.sources.3"),
        ("run.name.x=1", "is a value, not a section"),
        ("train.micro_batch='2'", "valid integer"),
        ("optimizer.lr=nan", "optimizer.lr = nan (override 'optimizer.lr=nan'): input should be a finite number"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas.1 = 1.0"),
        ("data.sources.0.stop=0 tokens", "`stop` = 0 tokens is not after"),
        ("watchdog.hang.soft=0 s", "'0 s' is too short"),
        (f"parallel.timeout={'9' * 400} s", "is too long"),
        ("data.read_timeout=5 Tokens", "unknown unit 'Tokens'"),
        ("data.skip=['5:5 samples']", "it ends where it begins"),
        ("data.skip=['5:9']", "not a range of samples"),
        ("data.reshuffle=['5 steps']", "counted in samples or tokens, not in steps"),
    ],
)
def test_each_mistake_is_named(good: Path, override: str, expected: str) -> None:
    assert expected in problems(good, override)


NUMERIC = (int, float, Progress, Seconds, Bytes)
ZEROS = (0, 0.0, "0 steps", "0 samples", "0 s", "0B")
MEANINGFUL_ZEROS = """
run.seed data.seed eval.num_fewshot model.dropout parallel.recompute
train.batch_ramp.start train.grad_clip train.z_loss
optimizer.betas optimizer.momentum optimizer.groups.lr_scale optimizer.groups.weight_decay
optimizer.min_lr optimizer.lr_scale optimizer.warmup optimizer.weight_decay optimizer.embedding_shrink
data.prefetch data.reshuffle data.sources.start data.sources.weight.at data.max_quarantined data.sources.weight data.sources.weight.value
data.objective.mask_share
record.statistics_every
timeline.at timeline.optimizer.min_lr.from timeline.optimizer.min_lr.to timeline.optimizer.lr_scale.from
timeline.optimizer.lr_scale.to timeline.optimizer.weight_decay.from timeline.optimizer.weight_decay.to
timeline.optimizer.betas timeline.optimizer.embedding_shrink.from
timeline.optimizer.embedding_shrink.to timeline.train.grad_clip.from timeline.train.grad_clip.to
timeline.train.z_loss.from timeline.train.z_loss.to
""".split()
ZEROS_REFUSED_ELSEWHERE = """
data.stages.until data.sources.stop train.duration train.batch_ramp.duration
""".split()
"""Keys whose zero is refused where it is compared with other keys."""


def numbers_in(annotation: Any) -> set[Any]:
    """The types of numbers and quantities that a key takes, in lists too."""
    if isinstance(annotation, type):
        return {kind for kind in NUMERIC if issubclass(annotation, kind) and annotation is not bool}
    return {kind for part in getattr(annotation, "__args__", ()) for kind in numbers_in(part)}


SCHEMA = schema_keys()
NUMBERS = [key for key, (section, name) in SCHEMA.items() if numbers_in(section.model_fields[name].annotation)]


def takes(key: str, value: object) -> bool:
    """Whether a key takes a value, alone, or in a list of one or two."""
    section, name = SCHEMA[key]
    for given in (value, [value], [value, value]):
        try:
            section.model_validate({section.model_fields[name].alias or name: given})
        except ValidationError as error:
            if any(found["loc"][:1] == (section.model_fields[name].alias or name,) for found in error.errors()):
                continue
        return True
    return False


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.promise("units")
def test_no_key_takes_a_number_without_a_meaning(key: str) -> None:
    """Of all keys: not a number, infinite, below zero, and zero unless it means something."""
    for value in (math.nan, math.inf, -math.inf, -1, -1.0, "nan steps", "inf s", "-1 steps", "-1 s", "-1B"):
        assert not takes(key, value), value
    taken = any(takes(key, value) for value in ZEROS)
    assert taken == (key in MEANINGFUL_ZEROS or key in ZEROS_REFUSED_ELSEWHERE)


def test_every_problem_of_the_schedule_is_reported(good: Path) -> None:
    text = problems(
        good,
        "optimizer.curve=wsd",
        "optimizer.decay_length=100 steps",
        "optimizer.warmup=10 steps",
        "train.duration=5 steps",
    )
    assert "2 problems" in text and "begins within the warm-up" in text and "is longer than the decay" in text


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (["curve=constant", "min_lr=1e-5"], "optimizer.min_lr = 1e-05 has no effect with optimizer.curve = constant"),
        (["curve=constant", "decay=50 steps"], "optimizer.decay = 50 steps has no effect"),
        (["warmup_shape=parabolic"], "optimizer.warmup_shape = parabolic has no effect without optimizer.warmup"),
        (["shrink_paths=input"], "optimizer.shrink_paths = input has no effect without optimizer.embedding_shrink"),
        (["train.loss_scale.window=500"], "train.loss_scale has no effect with train.precision = auto"),
        (["model.rope_scaling={kind='linear', factor=2, original_length=64}"], "original_length = 64 has no effect"),
        (["eval.loss_samples=8"], "eval.loss_samples = 8 has no effect without eval.loss_on"),
        (["decay_shape=linear"], None),  # fork --anneal uses it
        (["momentum=0.9"], "optimizer.momentum = 0.9 has no effect with optimizer.kind = adamw"),
        (["eval.merge={last='10 steps'}"], "eval.merge has no effect without eval.every"),
        (["curve=wsd", "decay_length=10 steps", "min_lr=1e-5", "decay=90 steps", "decay_shape=linear"], None),
        (["groups=[{match='blocks.*', kind='muon'}]", "momentum=0.9", "update_scale=spectral"], None),
        (["curve=constant", "warmup=5 steps", "warmup_shape=parabolic"], None),
        (["shrink_paths=input", "timeline=[{at='9 steps',optimizer={embedding_shrink=0.95}}]"], None),
        (["train.precision=fp16", "train.loss_scale.window=500"], None),
    ],
)
def test_what_is_set_in_vain_is_warned_of(good: Path, overrides: list[str], warned: str | None) -> None:
    whole = ("train.", "model.", "checkpoint.", "eval.", "record.", "timeline=")
    config = load(good, [text if text.startswith(whole) else f"optimizer.{text}" for text in overrides])
    found = list(in_vain(config))
    assert found == [] if warned is None else len(found) == 1 and warned in found[0]


def test_a_corpus_by_url_needs_a_cache(good: Path, tmp_path: Path) -> None:
    place = "data.sources.0.path"
    url = f'{place}="s3://bucket/corpora/web"'
    with pytest.raises(ConfigError) as caught:
        load(good, [url, "optimizer.min_lr=100.0"])
    assert f"{place} = s3://bucket/corpora/web needs local disk" in str(caught.value)
    assert "data.cache.dir and data.cache.size" in str(caught.value) and "optimizer.min_lr" in str(caught.value)
    for wrong in ("s4://bucket/web", "s3://key:secret@bucket/web"):
        with pytest.raises(ConfigError, match=r"data\.sources\.0"):
            load(good, [f'{place}="{wrong}"'])
    cache = [f'data.cache.dir="{tmp_path}"', 'data.cache.size="1.5 TiB"']
    config = load(good, [url, *cache])
    assert config.data.cache is not None and config.data.cache.size.value == 1536 * 2**30
    again = tmp_path / "again.toml"
    again.write_text(config.to_toml())
    assert load(again) == config and isinstance(load(again).data.sources[0].path, Url)
    with pytest.raises(ConfigError, match="amount of storage"):
        load(good, [url, *cache[:1], "data.cache.size=200"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD + '[[data.sources]]\nname = "a"\npath = "b"\n', ["source names must differ"]),
        (
            GOOD.replace('family = "llama"', 'family = "gpt"\npositions = 32').replace("ffn = 128", ""),
            ["data.sequence_length = 64 exceeds model.positions = 32"],
        ),
        ('[run]\nname = "x"\n', ["run.dir: this key is required", "[model]: this section is missing"]),
    ],
)
def test_files_that_are_no_run(tmp_path: Path, text: str, expected: list[str]) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    found = problems(path)
    assert all(problem in found for problem in expected)


def test_includes_merge_under_the_file_and_name_themselves(good: Path, tmp_path: Path) -> None:
    top = tmp_path / "sub/top.toml"
    top.parent.mkdir()
    top.write_text('include = ["../good.toml"]\n[model]\nlayers = 5\n[train]\nmicro = 1\n')
    text = problems(top)
    assert f"train.micro ({top})" in text and "train.micro_batch" in text
    top.write_text('include = ["../good.toml"]\n[model]\nlayers = 5\n')
    assert (load(top).model.layers, load(top).model.hidden) == (5, 64)
    good.write_text('include = ["sub/top.toml"]\n')
    assert "includes itself" in problems(top)


@pytest.mark.parametrize("content", ["[run", "\xff"])
def test_unreadable_files(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content.encode("latin-1"))
    assert "not valid TOML" in problems(path)
    assert "cannot read" in problems(tmp_path / "absent.toml")


@pytest.mark.promise("documented")
def test_reference_page_is_current_and_complete() -> None:
    page = (ROOT / "docs/config.md").read_text()
    assert page == reference(), "run: fsdp-pretrain config-reference > docs/config.md"
    for key, (section, name) in schema_keys().items():
        assert f"`{key.rpartition('.')[2]}`" in page or section is Config, key
        assert meanings(section)[name] or section is Config, f"{key} has no docstring"


@pytest.mark.promise("units")
def test_durations_are_never_bare_numbers() -> None:
    for section, name in schema_keys().values():
        annotation = str(section.model_fields[name].annotation)
        if name in ("every", "keep_every", "duration", "warmup", "decay", "end", "start"):
            assert Progress.__name__ in annotation, name
