"""A run's counters, saved in every checkpoint, and its identity, which must not change between starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import zip_longest

from fsdp_pretrain.config.config import Config
from fsdp_pretrain.config.resume_rules import differences
from fsdp_pretrain.config.sequence_stages import SequenceStages
from fsdp_pretrain.data.packing.mixture import SCALE, Mixture, MixtureWeight
from fsdp_pretrain.data.packing.objectives import VERSION
from fsdp_pretrain.data.packing.opening import windows_at
from fsdp_pretrain.data.packing.packer import Packer
from fsdp_pretrain.data.packing.pieces import Pieces
from fsdp_pretrain.data.packing.position import Position
from fsdp_pretrain.run import state_files
from fsdp_pretrain.run.environment import WorldShape
from fsdp_pretrain.run.files import now

from .code_identity import other_code
from .manifest import PartIdentity, RunIdentity, SavedState, TokenizerIdentity


@dataclass(frozen=True)
class TrainState(Position):
    """The counters of a checkpoint. There is no RNG state: random numbers are functions of (seed, step, rank)."""

    loss_scale: list[float] | None = None  # `parallel.loss_scaler.LossScaler.state()` of an fp16 run, else None

    @classmethod
    def at(cls, position: Position) -> TrainState:
        """The state at a position, without a loss scale."""
        return cls(position.step, position.consumed, position.cursor, position.batch)

    def to_json(self, *, identity: RunIdentity, tokens: int, world: WorldShape) -> str:
        """Contents of a checkpoint's `train_state.json`."""
        saved = SavedState(**vars(self), tokens=tokens, world=world, written=now(), identity=identity)
        return state_files.seal(saved.model_dump())

    @classmethod
    def of(cls, saved: SavedState) -> TrainState:
        """The counters in a `train_state.json`."""
        return cls(**{field.name: getattr(saved, field.name) for field in fields(cls)})


def identity(config: Config, packer: Packer, code: Mapping[str, PartIdentity] | None = None) -> RunIdentity:
    """The identity of a run: model, data order and objective, which no resume may change.

    `code`: from `witness.code_identity`, where the code is used.
    """
    data, mixture = config.data, packer.mixture
    objective = data.objective.model_dump(mode="json")
    if data.objective.kind != "causal":
        objective["version"] = VERSION
    fixed = ("sequence_length", "seed", "lanes", "attention", "positions", "loss_across_documents")
    stages = packer.pieces.stages
    lengths = {"stages": list(map(list, zip(stages.starts, stages.lengths, strict=True)))} if data.stages else {}
    return RunIdentity(
        model=config.model.model_dump(mode="json", exclude={"declared_params"}),
        data={**{key: getattr(data, key) for key in fixed}, "objective": objective, **lengths},
        mixture={name: weight.to_json() for name, weight in mixture.weights.items()},
        corpora={name: corpus.manifest.fingerprint for name, corpus in packer.corpora.items()},
        reshuffle=windows_at(data, data.reshuffle),
        excluded=packer.excluded_digest,
        tokenizer=TokenizerIdentity(fingerprint=packer.tokenizer.fingerprint, eod=packer.tokenizer.eod),
        code=dict(code or {}),
    )


def forbidden(stored: RunIdentity, current: RunIdentity, cursor: int) -> list[str]:
    """Forbidden changes of the model, or of the data before sample `cursor`, as `key: old -> new`.

    From `cursor` on the mixture may change: other weights, sources added or dropped, a reshuffle, the length of the
    samples.
    """
    kept = {"model", "data", "tokenizer"}
    was, is_ = (side.model_dump(include=kept, exclude={"data": {"stages"}}) for side in (stored, current))
    old, new = ({"model": side["model"], "objective": side["data"]["objective"]} for side in (was, is_))
    same = [key for key in old if old[key] == new[key]]  # other settings compute something else
    code = [other_code(stored.code, current.code, key) for key in same]
    return [*differences(was, is_), *filter(None, code), *_changed_past(stored, current, cursor)]


def _changed_past(stored: RunIdentity, current: RunIdentity, cursor: int) -> list[str]:
    """Differences in the data before sample `cursor`."""
    cuts = _pieces(stored), _pieces(current)
    lengths, others = (cut.past(cursor) for cut in cuts)
    if lengths != others:
        ahead = cuts[0].first_sample(cuts[0].begun(cursor))
        return [
            f"data.stages: samples before {cursor:_} would be others; from sample {ahead:_} on, a new stage may begin"
        ]
    cursor = cuts[0].begun(cursor)  # from here on in windows
    before, now_ = (sorted(place for place in side.reshuffle if place < cursor) for side in (stored, current))
    changed = differences({"reshuffle": before}, {"reshuffle": now_}, "data")
    pasts = [
        Mixture({name: MixtureWeight.from_json(weight) for name, weight in side.mixture.items()}).past(cursor)
        for side in (stored, current)
    ]
    for (start, old), (other, new) in zip_longest(*pasts, fillvalue=(cursor, {})):
        was, is_ = (
            {n: {"share": rate / SCALE, "corpus": side.corpora[n]} for n, rate in plan.items()}
            for plan, side in ((old, stored), (new, current))
        )
        if start != other or was != is_:
            at = [f"data.sources: the shares change at sample {start} -> {other}"]
            changed += differences(was, is_, "data.sources") or at
            break
    return changed


def _pieces(recorded: RunIdentity) -> Pieces:
    starts, lengths = zip(*recorded.data.get("stages", [(0, recorded.data["sequence_length"])]), strict=True)
    return Pieces(SequenceStages(starts, lengths))
