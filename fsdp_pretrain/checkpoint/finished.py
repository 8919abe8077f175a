"""Whether a run has nothing left to train, without starting it. No torch."""

from __future__ import annotations

from data.corpus.corpus import Corpus
from data.packing.opening import cache_use
from fsdp_pretrain.config.config import Config
from fsdp_pretrain.errors import UserError
from fsdp_pretrain.record import state_files
from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.lock import is_held
from fsdp_pretrain.record.status import Status

from .expected import missing
from .locations import stores


def left_to_do(config: Config) -> str:
    """Why the run of a configuration must be started; empty if it is complete and a start would change nothing.

    Complete means: it ended so, with this very configuration and these corpora, and its last checkpoint is there and
    verified.
    """
    run = RunDir(config.run.dir)
    try:
        return _left_to_do(run, config)
    except (UserError, OSError) as error:
        return error.cause if isinstance(error, UserError) else str(error)


def _left_to_do(run: RunDir, config: Config) -> str:
    status = state_files.read(run.status, Status)
    if status is None:
        return "it was never started"
    status = status if is_held(run) else status.of_run
    if status.state != "complete" or is_held(run):
        return f"it is {status.state} at step {status.step or 0:_} of {status.total_steps or 0:_}"
    if run.rollback.exists():
        return "a rollback is under way"
    if run.config.read_text() != config.to_toml():
        return "its configuration has changed"
    if (lost := missing(run)) is not None:
        return lost.text
    found = [item for item in stores(run).scan() if item.problem is None and item.verified]
    if not found or not found[-1].manifest().final or found[-1].step != status.step:
        return "its last checkpoint is not there"
    cache = cache_use(config)
    corpora = {source.name: Corpus(source.path, cache=cache).manifest.fingerprint for source in config.data.sources}
    if corpora != found[-1].train_state().identity.corpora:
        return "its corpora have changed"
    return ""
