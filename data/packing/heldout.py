"""The held-out samples whose loss is measured during training.

They are packed like training samples: same length, separators, masks and objective. They depend only on the corpora and
names in `eval.loss_on` and on the number of samples, so that runs that share these measure the same text, whatever the
seed, lanes and mixture of their training data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.sections import HeldOutSource
from fsdp_pretrain.data.corpus.corpus import Corpus
from fsdp_pretrain.errors import ConfigError, ReadTimeoutError, UserError
from fsdp_pretrain.units import counted

from .mixture import MixtureWeight
from .objectives import Infilling
from .opening import cache_use, open_objective, slots_of
from .own_objective import OwnObjective
from .packer import Packer

_SEED, _LANES = 0, 256


@dataclass(frozen=True)
class HeldOutSamples:
    """The samples that are measured."""

    packer: Packer  # packs the held-out corpora
    objective: Infilling | OwnObjective | None  # makes the samples; None under the causal objective
    indices: list[int]  # indices of the samples in `packer`, source after source
    counts: dict[str, int]  # number of samples of each source
    fingerprints: dict[str, str]  # fingerprint of each source's corpus


def open_heldout(config: Config, training: Packer) -> HeldOutSamples | None:
    """The samples of `eval.loss_on`; None if it is empty.

    Raises:
        ConfigError: some corpora cannot be used beside those of `training`; lists all problems.
        ReadTimeoutError: storage hangs.
    """
    named, data = config.eval.loss_on, config.data
    if not named:
        return None
    problems = [text for source in named for text in _problems(source, config, training)]
    if problems:
        raise _refused(problems)
    share = config.heldout_samples
    packer = Packer(
        [  # one after the other, so that the samples of a source do not depend on the others
            (source.name, source.path, MixtureWeight(start=at * share, stop=(at + 1) * share))
            for at, source in enumerate(named)
        ],
        data.row,
        seed=_SEED,
        lanes=_LANES,
        read_timeout=config.read_timeout,
        slots=slots_of(data),
        cache=cache_use(config),
    )
    whole = {name: int(samples) for name, samples in packer.epoch_samples.items()}
    least = config.eval.loss_samples or 1
    if problems := [
        f"{name}: the corpus has {samples} whole samples, but {least} are to be measured (eval.loss_samples)"
        for name, samples in whole.items()
        if samples < least
    ]:
        raise _refused(problems)
    counts = {name: min(share, samples) for name, samples in whole.items()}
    indices = [at * share + number for at, count in enumerate(counts.values()) for number in range(count)]
    fingerprints = {name: corpus.manifest.fingerprint for name, corpus in packer.corpora.items()}
    return HeldOutSamples(packer, open_objective(config, packer, seed=_SEED), indices, counts, fingerprints)


def _problems(source: HeldOutSource, config: Config, training: Packer) -> list[str]:
    """Why a corpus cannot be measured."""
    try:
        manifest = Corpus(source.path, read_timeout=config.read_timeout, cache=cache_use(config)).manifest
    except ReadTimeoutError:
        raise
    except UserError as error:
        return [f"{source.name}: {error.cause}"]
    problems = []
    if (manifest.tokenizer.fingerprint, manifest.tokenizer.eod) != (training.tokenizer.fingerprint, training.eod):
        problems.append(
            f"{source.name}: {source.path} was made with another tokenizer or separator than the training data"
        )
    if manifest.pairs and slots_of(config.data) is None:
        problems.append(
            f"{source.name}: {source.path} holds prompts with answers, which the causal objective cannot read"
        )
    same = [name for name, corpus in training.corpora.items() if corpus.manifest.fingerprint == manifest.fingerprint]
    if same:
        problems.append(f"{source.name}: {source.path} is the training source {same[0]!r}, or a copy of it")
    return problems


def _refused(problems: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"{counted(len(problems), 'problem')} in eval.loss_on\n" + "\n".join(f"  - {problem}" for problem in problems),
        effect="the held-out loss would not be measured, or would not say what it seems to",
        remedy="name corpora that `fsdp-data prepare` made of held-out documents with the tokenizer of the training "
        "data, large enough for eval.loss_samples",
    )
