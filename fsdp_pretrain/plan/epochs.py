"""How often a run reads each source."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.data.packing.opening import check_supply, open_packer, open_skips
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.remote import Location, RemoteError, Url
from fsdp_pretrain.units import human_count

MOST = 4.0
"""Epochs without a warning: up to about four are nearly as good as new data (Muennighoff et al., arXiv 2305.16264)."""


@dataclass(frozen=True)
class SourceEpochs:
    """What a run reads of a source."""

    tokens: int  # tokens of the corpus, without separators
    epochs: float  # how often the run reads all of it


def absent(paths: Iterable[Location]) -> list[str]:
    """Those that hold no corpus on this machine; URLs are not looked at."""
    return [str(path) for path in paths if not isinstance(path, Url) and not (path / "manifest.json").is_file()]


def open_corpora(config: Config) -> Packer | None:
    """The packer of a run; None if its corpora are not on this machine, or the storage of a URL does not answer.

    Raises:
        DataError: a corpus is damaged, or the mixture ends before the run.
        ConfigError: the corpora do not fit the model.
    """
    if absent(source.path for source in config.data.sources):
        return None
    try:
        packer = open_packer(config)
    except RemoteError:  # a plan needs no network; the start of the run reports its problems
        return None
    check_supply(config, packer, cursor=0, consumed=0)
    return packer


def read_epochs(config: Config, packer: Packer) -> dict[str, SourceEpochs]:
    """The epochs of every source, by name."""
    read = packer.epochs_read(open_skips(config).after(0, config.schedule.total))
    return {name: SourceEpochs(packer.corpora[name].manifest.tokens, epochs) for name, epochs in read.items()}


def warnings(sources: dict[str, SourceEpochs]) -> Iterator[str]:
    """Warn of sources that are read too often."""
    for name, source in sources.items():
        if source.epochs > MOST:
            yield (
                f"{name} has {human_count(source.tokens)} tokens and is read {source.epochs:.3g} times; more than four "
                "teach ever less (arXiv 2305.16264): more text, or a shorter run"
            )
