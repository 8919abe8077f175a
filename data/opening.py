"""From a run's configuration to its packer: what training, `where` and evaluation open in the same way. No torch."""

from __future__ import annotations

from fsdp_pretrain.config import Config
from fsdp_pretrain.errors import ConfigError

from .packer import Packer


def open_packer(config: Config) -> Packer:
    """The packer of a run, if the model fits the corpora's tokenizer. Raises DataError, ConfigError."""
    data = config.data
    packer = Packer(
        [(source.name, source.path, source.weight) for source in data.sources],
        data.sequence_length,
        seed=data.seed,
        lanes=data.lanes,
        mirrors={source.name: source.mirror for source in data.sources if source.mirror is not None},
        read_timeout=config.read_timeout,
    )
    if packer.tokenizer.vocab_size > config.model.vocab:
        raise ConfigError(
            f"model.vocab = {config.model.vocab}, but the corpora's tokenizer has {packer.tokenizer.vocab_size} tokens",
            effect="ids above the embedding table would crash a GPU kernel in the middle of a run",
            remedy=f"set model.vocab to at least {packer.tokenizer.vocab_size}",
        )
    return packer
