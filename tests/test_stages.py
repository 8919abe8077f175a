"""Sequence length in stages: every token once whatever the stages, clocks in tokens, kills and rollbacks over a change."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter, defaultdict
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laboratory import write_tokens

from fsdp_pretrain.checkpoint.state import forbidden, identity
from fsdp_pretrain.config.config import Config, load
from fsdp_pretrain.config.schedule import BatchSchedule, Ramp
from fsdp_pretrain.config.sequence_stages import SequenceStages
from fsdp_pretrain.config.skips import Skips
from fsdp_pretrain.data.packing import pieces
from fsdp_pretrain.data.packing.loader import Loader, StepBatch
from fsdp_pretrain.data.packing.mixture import MixtureWeight
from fsdp_pretrain.data.packing.opening import check_supply, open_packer, open_skips
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.units import Progress

quick = pytest.mark.quick
STAGES = SequenceStages((0, 80, 130), (8, 16, 32))  # 20 windows of 32 in 4 pieces, 25 in 2, then whole ones
TABLES = [{"length": 8, "until": "77 samples"}, {"length": 16, "until": "1440 tokens"}]


@pytest.fixture
def groups_of_6(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "GROUP", 6)


def samples(count: int) -> Progress:
    return Progress(count, "sample")


# ------------------------------------------------------------------ samples and tokens

drawn_stages = st.lists(st.tuples(st.sampled_from([2, 4, 8, 16, 32]), st.integers(1, 40), st.booleans()), max_size=4)
drawn_skips = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 60)), max_size=4)


def drawn(stages: list[tuple[int, int, bool]]) -> SequenceStages:
    """Stages of these lengths and about so many samples more each, their ends in samples or in tokens."""
    given, found = list[tuple[int, Progress]](), SequenceStages.constant(32)
    for length, more, in_tokens in stages:
        start = found.starts[-1]
        end = Progress(found.tokens(start) + more * length, "token") if in_tokens else samples(start + more)
        given.append((length, end))
        found = SequenceStages.of(given, 32)
    return found


@quick
@settings(max_examples=30, deadline=None)
@given(stages=drawn_stages, skipped=drawn_skips)
def test_conversions_are_sums_over_the_samples(stages: list[tuple[int, int, bool]], skipped: list[Any]) -> None:
    """Of samples read, and of samples trained where others are skipped, also over the ends of stages."""
    read, skips = drawn(stages), Skips((first, first + size) for first, size in skipped)
    lengths = [read.length_at(sample) for sample in range(700)]
    for (start, stop), length in zip(pairwise(read.starts), read.lengths, strict=False):
        assert (stop - start) * length % 32 == 0 and lengths[start:stop] == [length] * (stop - start)
    for clock, each in ((read, lengths), (read.trained(skips), [lengths[sample] for sample in skips.take(0, 250)])):
        sums = [0, *accumulate(each)]
        assert [clock.tokens(count) for count in range(len(sums))] == sums
        for tokens in random.Random(1).sample(range(sums[-1]), 40):
            assert clock.samples(tokens) == bisect_left(sums, tokens)
        first, stop = 13, 160
        assert clock.between(first, stop) == Counter(each[first:stop])


# ------------------------------------------------------------------ pieces of windows


def mixed(tmp_path: Path, tokenizer: Tokenizer) -> list[tuple[str, Path, float | MixtureWeight]]:
    """Two sources, one ramped and one that joins later, small enough for several epochs."""
    rng = np.random.default_rng(3)
    made = []
    for name, count in (("a", 40), ("b", 9)):
        documents = [rng.integers(5, 400, rng.integers(2, 70)).tolist() for _ in range(count)]
        made.append(write_tokens(tmp_path / name, documents, tokenizer))
    return [("a", made[0], MixtureWeight(((0, 3.0), (60, 1.0)))), ("b", made[1], MixtureWeight(start=12))]


def rows(packer: Packer, first: int, stop: int) -> list[list[int]]:
    """The tokens of samples, packed seven at a time, over the ends of stages too."""
    found = list[list[int]]()
    for start in range(first, stop, 7):
        found += [row.tolist() for row in packer.pack(start, min(7, stop - start)).rows]
    return found


@pytest.mark.shows("B21")
@quick
@pytest.mark.usefixtures("groups_of_6")
def test_every_token_is_predicted_once_over_stages_sources_and_epochs(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The pieces of a window, put together, are the window of a run without stages; those after the stages too."""
    sources = mixed(tmp_path, tokenizer)
    options: dict[str, Any] = {"seed": 3, "lanes": 3, "reshuffle": [18, 61]}
    plain, staged = Packer(sources, 32, **options), Packer(sources, 32, **options, stages=STAGES)
    windows, parts = 150, defaultdict[int, list[list[int]]](list)
    for sample, row in enumerate(rows(staged, 0, staged.pieces.first_sample(windows))):
        window, piece, _ = staged.pieces.place(sample)
        assert piece == len(parts[window])  # pieces of a window come in order
        parts[window].append(row)
    for window, whole in enumerate(rows(plain, 0, windows)):
        assert all(a[-1] == b[0] for a, b in pairwise(parts[window]))
        assert [token for part in parts[window] for token in part[:-1]] + parts[window][-1][-1:] == whole
    assert min(plain.epochs_read(windows).values()) > 1.5


@quick
@pytest.mark.usefixtures("groups_of_6")
def test_a_sample_adds_its_length_to_the_epochs_of_its_source(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """To those of no other; a window as much as in a run without stages."""
    sources = mixed(tmp_path, tokenizer)
    plain, staged = (Packer(sources, 32, seed=3, lanes=3, stages=stages) for stages in (None, STAGES))
    windows, read = 60, {"a": 0.0, "b": 0.0}
    window_of = {name: plain.epochs_read(windows)[name] / count for name, count in sources_of(plain, windows).items()}
    for sample in range(staged.pieces.first_sample(windows)):
        assert staged.epochs_read(sample) == pytest.approx(read)
        (source,) = {piece.source for piece in staged.provenance(sample)}
        read[source] += window_of[source] * STAGES.length_at(sample) / 32
    assert read == pytest.approx(plain.epochs_read(windows))


def sources_of(packer: Packer, samples: int) -> Counter[str]:
    """How many of the first samples are of each source."""
    return Counter(packer.provenance(sample)[0].source for sample in range(samples))


# ------------------------------------------------------------------ batches


def learned(step: StepBatch) -> list[list[tuple[int, int]]]:
    """(input, label) of every target of every sample of a rank's share."""
    found = []
    for micro in step.micro:
        labels = micro.tokens[:, 1:] if micro.labels is None else micro.labels
        assert micro.lengths is not None and (micro.lengths.sum(1) == labels.shape[1]).all()
        for inputs, targets in zip(micro.tokens[:, :-1].tolist(), labels.tolist(), strict=True):
            found.append([(a, b) for a, b in zip(inputs, targets, strict=True) if b != -100])
    return found


@quick
@pytest.mark.usefixtures("groups_of_6")
@pytest.mark.parametrize(("world", "micro_batch"), [(1, 12), (1, 5), (2, 3), (4, 1), (6, 2)])
def test_batches_over_a_change_do_not_depend_on_the_ranks(
    tmp_path: Path, tokenizer: Tokenizer, world: int, micro_batch: int
) -> None:
    """The samples that are not skipped, in order, each whole: in, at and after a change, wherever it was resumed."""
    packer = Packer(mixed(tmp_path, tokenizer), 32, seed=3, lanes=3, stages=STAGES)
    skips, batches = Skips([(20, 33), (75, 84), (128, 129)]), BatchSchedule(24, Ramp(12, 12, 0, 60))
    kept, at, position = skips.take(0, 200), 0, Position()
    for _ in range(9):
        ranks = []
        for rank in range(world):
            options = {"micro_batch": micro_batch, "prefetch": 0, "skips": skips, "with_lengths": True}
            loader = Loader(packer, batches, rank=rank, world=world, start=position, **options)
            ranks.append(next(loader))
            blank = loader.blank(position)
            assert [m.tokens.shape for m in blank.micro] == [m.tokens.shape for m in ranks[-1].micro]
            assert not any(m.targets for m in blank.micro)
        size = ranks[0].position.batch
        expected = [list(pairwise(packer.pack(i, 1).tokens[0].tolist())) for i in kept[at : at + size]]
        assert [sample for rank in ranks for sample in learned(rank)] == expected
        assert sum(rank.targets for rank in ranks) == sum(map(len, expected))
        assert all((rank.separators, rank.adjacent_specials) == (rank.documents, 0) for rank in ranks)
        digest = sum(packer.pack(i, 1).digest for i in kept[at : at + size])
        assert sum(rank.digest for rank in ranks) % 2**64 == digest % 2**64
        position, at = ranks[0].position, at + size
    assert position.cursor > 130


@pytest.mark.parametrize("data", [{}, {"attention": "document", "positions": "document"}], ids=["causal", "documents"])
def test_filler_beside_a_shorter_sample_changes_no_loss(lab: Any, data: dict[str, Any]) -> None:
    from fsdp_pretrain import models
    from fsdp_pretrain.data.packing.loader import micro_batch
    from fsdp_pretrain.models import forward
    from fsdp_pretrain.parallel.fsdp import materialise

    config = load(lab.config(data={"stages": TABLES, **data}))
    packer, device = open_packer(config), torch.device("cpu")
    model = materialise(models.build(config.model), 1, device)

    def losses(indices: list[int]) -> list[list[float]]:
        packed = packer.pack_samples(indices)
        micro = micro_batch(packed, with_lengths=config.data.uses_lengths, across_documents=True)
        measured = forward.losses(model, micro, config.data, device)
        return [row[row != 0].tolist() for row in measured.losses.detach()]

    together = losses([79, 80, 129, 130])
    assert [len(row) for row in together] == [8, 16, 16, 32]
    for index, row in zip([79, 80, 129, 130], together, strict=True):
        assert row == pytest.approx(losses([index])[0], rel=1e-5)


# ------------------------------------------------------------------ the configuration


@pytest.mark.shows("B21")
@quick
def test_clocks_in_tokens_count_the_tokens_trained(lab: Any) -> None:
    """Duration, warm-up, decay and shrink in tokens, with samples skipped in two of the stages."""
    ramp = {"at": "500 tokens", "optimizer": {"embedding_shrink": {"to": 0.5, "over": "1000 tokens"}}}
    config = load(
        lab.config(
            data={"stages": TABLES, "skip": ["20:31 samples", "78:83 samples"]},
            train={"duration": "4000 tokens"},
            optimizer={"warmup": "400 tokens", "decay": "3000 tokens"},
            timeline=[ramp],
        )
    )
    schedule, kept = config.schedule, open_skips(config).take(0, 400)
    sums = [0, *accumulate(STAGES.length_at(sample) for sample in kept)]
    assert [schedule.tokens(n) for n in range(400)] == sums[:400]
    marks = {tokens: bisect_left(sums, tokens) for tokens in (400, 500, 3000, 4000)}
    assert (schedule.warmup, schedule.decay) == (marks[400], marks[3000])
    assert schedule.lr_at(marks[400]) == 1e-2 and schedule.lr_at(marks[3000]) == 1e-3 < schedule.lr_at(marks[3000] - 1)
    assert schedule.marks == [marks[500], bisect_left(sums, sums[marks[500]] + 1000)]
    assert schedule.total == -(-marks[4000] // 8) * 8
    every = Progress(256, "token")
    due = [s for s in range(1, schedule.steps + 1) if schedule.due(every, step=s, before=8 * s - 8, after=8 * s)]
    assert due == [s for s in range(1, schedule.steps + 1) if sums[8 * s] // 256 > sums[8 * s - 8] // 256]
    assert STAGES.interval(every) == -(-256 // STAGES.lengths[-1]) and STAGES.interval(Progress(7, "sample")) == 7


@quick
@pytest.mark.parametrize(
    ("data", "overrides", "expected"),
    [
        ({"stages": [{"length": 12, "until": "9 samples"}]}, [], "a length of 12 is not a whole part of"),
        ({"stages": [*TABLES, {"length": 8, "until": "130 samples"}]}, [], "stage 3 ends at 130 samples, which is not"),
        ({"stages": [{"length": 8, "until": "5 steps"}]}, [], "counted in samples or tokens, not in steps"),
        ({"stages": TABLES}, ["train.global_batch=256 tokens"], "train.global_batch = 256 tokens: with data.stages"),
        (
            {"stages": TABLES, "objective": {"kind": "glm", "row": 24, "slots": 2}},
            ["model={family='glm', layers=1, hidden=32, heads=4, vocab=576}"],
            "data.stages with data.objective.kind = glm",
        ),
    ],
)
def test_refused(lab: Any, data: dict[str, Any], overrides: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(lab.config(data=data), overrides)
    assert expected in str(refused.value)


def changed(lab: Any, old: dict[str, Any], new: dict[str, Any], cursor: int) -> list[str]:
    def of(data: dict[str, Any]) -> Any:
        config = load(lab.config(data=data))
        return identity(config, open_packer(config))

    return forbidden(of(old), of(new), cursor)


@quick
@pytest.mark.usefixtures("groups_of_6")
def test_what_of_the_stages_is_past(lab: Any) -> None:
    """Ahead of the cursor, and from the end of a begun group of windows on, stages and the mixture may change."""
    first, second = TABLES
    longer, group = {**first, "until": "200 samples"}, {"length": 8, "until": "24 samples"}  # 6 windows in 4 pieces
    assert not changed(lab, {"stages": TABLES}, {}, 0)
    assert not changed(lab, {"stages": TABLES}, {"stages": [first]}, 80)
    assert not changed(lab, {"stages": TABLES}, {"stages": [longer]}, 24)
    assert not changed(lab, {"stages": TABLES}, {"stages": [group, second]}, 24)
    (refused,) = changed(lab, {"stages": TABLES}, {"stages": [group, second]}, 25)
    assert "data.stages: samples before 25 would be others; from sample 48 on" in refused
    (refused,) = changed(lab, {}, {"stages": TABLES}, 3)
    assert "from sample 3 on" in refused
    assert not changed(lab, {}, {"stages": [{"length": 32, "until": "3 samples"}, *TABLES]}, 3)
    more = {"name": "more", "path": str(lab.corpus)}
    sources = {"sources": [{"name": "text", "path": str(lab.corpus)}, {**more, "start": "30 samples"}]}
    assert not changed(lab, {"stages": TABLES}, {"stages": TABLES, **sources}, 30)
    assert changed(lab, {"stages": TABLES}, {"stages": TABLES, **sources}, 49)
    assert not changed(lab, {"stages": TABLES}, {"stages": TABLES, "reshuffle": ["30 samples"]}, 48)
    assert changed(lab, {"stages": TABLES}, {"stages": TABLES, "reshuffle": ["30 samples"]}, 49)


@quick
def test_skips_that_do_not_explain_the_counters_are_refused(lab: Any) -> None:
    """How many tokens were trained would not be known: a range before the cursor came too late."""
    config = load(lab.config(data={"stages": TABLES, "skip": ["8:16 samples"]}))
    packer = open_packer(config)
    check_supply(config, packer, cursor=48, consumed=40)
    with pytest.raises(ConfigError, match="would have read 48 samples after training 40, but it has read 40"):
        check_supply(config, packer, cursor=40, consumed=40)


# ------------------------------------------------------------------ compiled


# ------------------------------------------------------------------ real runs


def staged(lab: Any, **sections: dict[str, Any]) -> Path:
    """20 steps of 8 samples: 8 tokens up to step 10, 16 to the middle of step 17, then 32; clocks in tokens."""
    found: Path = lab.config(
        **{
            "data": {"stages": TABLES},
            "optimizer": {"warmup": "200 tokens", "decay": "2000 tokens"},
            "checkpoint": {"every": "2 steps", "keep_last": 9, "background": False},
            **sections,
        }
    )
    return found


def tokens_of(config: Config) -> list[int]:
    return [config.schedule.tokens(8 * step) for step in range(1, config.schedule.steps + 1)]


def kept(records: list[dict[str, Any]], key: str) -> list[Any]:
    """A value of every step as last trained."""
    return list({record["step"]: record[key] for record in records}.values())


@pytest.mark.slow
def test_kills_in_a_stage_and_over_its_end_continue_bit_for_bit(lab: Any, helpers: Any, gates: Any) -> None:
    config = staged(lab)
    whole, killed = lab.path / "run", lab.path / "killed"
    lab.train(config, ranks=2)
    records, packer = helpers.metrics(whole), open_packer(load(config))
    assert kept(records, "data_digest") == [f"{packer.pack(8 * n, 8).digest:016x}" for n in range(20)]
    assert [record["tokens"] for record in records] == tokens_of(load(config))
    assert [record["sequence_length"] for record in records] == [8] * 10 + [16] * 6 + [32] * 4
    assert [record["step_tokens"] for record in records if record["step_tokens"]] == [2 * 16 + 6 * 32]
    for step, saved in ((11, 10), (18, 16)):  # at the end of a stage, and in one before the step with both lengths
        gates(step)
        job = lab.start(config, f"run.dir={killed}", ranks=2)
        made = killed / f"checkpoints/step-{saved:08}/manifest.json"
        helpers.wait_for(lambda made=made, job=job: made.exists() or job.ranks[0].poll() is not None, what="a save")
        job.kill()
        job.wait()
    gates()
    lab.train(config, f"run.dir={killed}", ranks=2)
    for key in ("loss", "lr", "data_digest", "tokens", "grad_norm", "sequence_length"):
        assert kept(helpers.metrics(killed), key) == kept(records, key), key
