"""How often a run reads each source, and what repeating it is worth. No torch.

Muennighoff et al., Scaling Data-Constrained Language Models (NeurIPS 2023, arXiv 2305.16264): U tokens that are read
R + 1 times are worth U + U R* (1 - exp(-R / R*)) tokens of new data, with R* = 15.4, fitted to models of up to 9B
parameters. Up to four epochs are nearly as good as new data; from about 40 on, more are worth nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from data.corpus.cached import FetchError
from data.packing.opening import check_supply, open_packer, open_skips
from data.packing.packer import Packer
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.remote import Url
from fsdp_pretrain.units import human_count

_HALF_WORTH = 15.387756
"""R*."""
MOST = 4.0
"""Epochs without a warning."""


@dataclass(frozen=True)
class SourceEpochs:
    """What a run reads of a source.

    Attributes:
        tokens: of the corpus, without separators.
        epochs: how often all of it is read.
        worth: epochs of new data that would teach as much.
    """

    tokens: int
    epochs: float
    worth: float


def worth(epochs: float) -> float:
    """Epochs of new data that are worth as much as `epochs` of the same data."""
    return epochs if epochs <= 1 else 1 + _HALF_WORTH * (1 - math.exp((1 - epochs) / _HALF_WORTH))


def open_corpora(config: Config) -> Packer | None:
    """The packer of a run; None if its corpora are not on this machine, or the storage of those by URL does not answer.

    Raises:
        DataError: a corpus is damaged, or the mixture ends before the run.
        ConfigError: the corpora do not fit the model.
    """
    paths = (source.path for source in config.data.sources if not isinstance(source.path, Url))
    if not all((path / "manifest.json").is_file() for path in paths):
        return None
    try:
        packer = open_packer(config)
    except FetchError:  # a plan needs no network; the start of the run reports its problems
        return None
    check_supply(config, packer, cursor=0, consumed=0)
    return packer


def read_epochs(config: Config, packer: Packer) -> dict[str, SourceEpochs]:
    """Of every source, by name."""
    read = packer.epochs_read(open_skips(config).after(0, config.schedule.total))
    return {
        name: SourceEpochs(packer.corpora[name].manifest.tokens, epochs, worth(epochs)) for name, epochs in read.items()
    }


def warnings(sources: dict[str, SourceEpochs]) -> Iterator[str]:
    """Of sources that are read too often."""
    for name, source in sources.items():
        if source.epochs > MOST:
            yield (
                f"{name} has {human_count(source.tokens)} tokens and is read {source.epochs:.3g} times, which teaches "
                f"as much as {source.worth:.3g} epochs of new data (arXiv 2305.16264): more text, or a shorter run"
            )
