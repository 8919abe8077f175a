"""Strict, typed configuration: one TOML file (with includes) plus `key=value` overrides.

Every problem is reported at once, with the origin of the value and the nearest valid key. Relative paths are relative
to the working directory, except `include`, which is relative to its file. `docs/config.md` is generated from the
docstrings of `sections`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tomli_w
from pydantic import BaseModel, SerializeAsAny, TypeAdapter, ValidationError

from fsdp_pretrain import extensions
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.remote import Url
from fsdp_pretrain.units import Progress, counted

from . import parts
from .base import Section
from .data_section import DataSection, GLMObjective
from .model import AnyModel, GLMModel, GPTModel, LlamaModel, Model
from .operations import HealthSection, LaunchSection, WatchdogSection
from .schedule import Schedule
from .sections import (
    CheckpointSection,
    CodeSection,
    EvalSection,
    ObserverSection,
    OptimizerSection,
    ParallelSection,
    RecordSection,
    RunSection,
    TrainSection,
)
from .timeline import TimelineEntry
from .toml_file import describe_all, override, read_toml

_HELDOUT_EVERY, _HELDOUT_BATCHES = 500, 4
"""Defaults of the held-out loss, in full global batches: a ramp of the batch changes neither samples nor their cost."""


S = TypeVar("S", bound=Section)


class Config(Section):
    """A whole run."""

    code: CodeSection = CodeSection()
    run: RunSection
    model: SerializeAsAny[Model]
    data: DataSection
    train: TrainSection
    optimizer: SerializeAsAny[OptimizerSection]
    observers: list[SerializeAsAny[ObserverSection]] = []
    """Observers of your own."""
    parallel: ParallelSection = ParallelSection()
    checkpoint: CheckpointSection
    eval: EvalSection = EvalSection()
    record: RecordSection = RecordSection()
    health: HealthSection = HealthSection()
    watchdog: WatchdogSection = WatchdogSection()
    launch: LaunchSection = LaunchSection()
    timeline: list[TimelineEntry] = []
    """What changes in the course of the run: `[[timeline]]` tables, in any order."""

    @cached_property
    def schedule(self) -> Schedule:
        """The run's schedules as numbers."""
        return Schedule(self.data, self.train, self.optimizer, self.checkpoint, self.timeline)

    @property
    def read_timeout(self) -> float:
        """Seconds that a read from a corpus may take."""
        timeout = self.data.read_timeout
        return self.parallel.timeout.value / 3 if timeout is None else timeout.value

    @property
    def heldout_every(self) -> Progress:
        """Interval between measurements of the held-out loss."""
        return self.eval.loss_every or Progress(_HELDOUT_EVERY * self.schedule.batch.full, "sample")

    def save_due(self, *, step: int, before: int, after: int) -> bool:
        """Whether a checkpoint is due after step number `step`, which took `consumed` from `before` to `after`: for
        `checkpoint.every`, or to be kept, evaluated or merged."""
        merged = None if self.eval.merge is None or self.eval.every is None else self.eval.merge.every
        intervals = (self.schedule.save_every(after), *self.checkpoint.kept_intervals, self.eval.every, merged)
        return any(self.schedule.due(every, step=step, before=before, after=after) for every in intervals)

    @property
    def heldout_samples(self) -> int:
        """Held-out samples of each source; the most of them, if `eval.loss_samples` is not given."""
        shared = _HELDOUT_BATCHES * self.schedule.batch.full // max(1, len(self.eval.loss_on))
        return self.eval.loss_samples or max(1, shared)

    @property
    def compiles_on_gpu(self) -> bool:
        """Whether blocks are compiled on a GPU."""
        if self.parallel.compile != "auto":
            return self.parallel.compile
        # Scores scaled by layer would make every layer a graph of its own, and torch compiles one code only 8 times.
        return isinstance(self.model, LlamaModel) or self.model.scores == "fused"

    def to_toml(self) -> str:
        """The resolved configuration; loading it gives an equal object."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


def cross_checks(sections: dict[str, Any]) -> Iterator[str]:
    """Contradictions between the sections that are valid in themselves, by name."""
    model, data, train = sections.get("model"), sections.get("data"), sections.get("train")
    optimizer, checkpoint, evaluation, parallel = (
        sections.get(name) for name in ("optimizer", "checkpoint", "eval", "parallel")
    )
    if isinstance(model, GPTModel) and data and model.positions != "alibi" and data.sequence_length > model.positions:
        yield f"data.sequence_length = {data.sequence_length} exceeds model.positions = {model.positions}"
    if isinstance(model, LlamaModel) and data and (data.positions, data.attention) == ("document", "causal"):
        yield (
            "data.positions = document with data.attention = causal: rotary positions are distances between tokens, "
            "and a token would see the documents before its own at wrong ones; set data.attention = document as well"
        )
    if data:
        yield from _objective_checks(data, model)
        yield from _stage_checks(data, train)
        yield from _cache_checks(data, evaluation)
    if optimizer and optimizer.min_lr > optimizer.lr:
        yield f"optimizer.min_lr = {optimizer.min_lr} is above optimizer.lr = {optimizer.lr}"
    timeline = sections.get("timeline")
    if data and train and optimizer and checkpoint and timeline is not None:
        try:
            Schedule(data, train, optimizer, checkpoint, timeline)
        except ValueError as error:
            yield from map(str, error.args)
    read_timeout = data and data.read_timeout
    if read_timeout and parallel and not 0 < read_timeout.value < parallel.timeout.value:
        yield (
            f"data.read_timeout = {read_timeout} must end before parallel.timeout = {parallel.timeout}, "
            "or the other ranks time out first"
        )
    if evaluation and evaluation.every is not None and evaluation.heldout is None and evaluation.bundled_tasks:
        named = ", ".join(evaluation.bundled_tasks)
        yield f"eval.tasks has {named}, made from held-out documents, but eval.heldout names no file"
    files = [task for task in evaluation.tasks if "/" in task or task.endswith(".yaml")] if evaluation else []
    if files:
        yield f"eval.tasks has {', '.join(files)}: name the task, and put the folder of its file into eval.include"
    if evaluation and evaluation.merge is not None and evaluation.command is not None:
        yield "eval.merge has no effect with eval.command, which evaluates the checkpoint alone: leave one out"
    if evaluation and evaluation.every is not None and not evaluation.tasks:
        yield "eval.tasks names no task, but eval.every schedules evaluations"


def _cache_checks(data: DataSection, evaluation: EvalSection | None) -> Iterator[str]:
    named = {f"data.sources.{n}.path": source.path for n, source in enumerate(data.sources)}
    named |= {
        f"eval.loss_on.{n}.path": source.path for n, source in enumerate(evaluation.loss_on if evaluation else [])
    }
    urls = [f"{key} = {value}" for key, value in named.items() if isinstance(value, Url)]
    if urls and data.cache is None:
        yield f"{', '.join(urls)} needs local disk for its blocks: set data.cache.dir and data.cache.size"


def _objective_checks(data: DataSection, model: AnyModel | None) -> Iterator[str]:
    """Contradictions between the objective, the rest of `data`, and the model (None if it is not valid)."""
    objective, length = data.objective, data.sequence_length
    if not isinstance(objective, GLMObjective):
        if model is not None and model.two_dimensions:
            yield "model.positions = rope-2d needs data.objective.kind = glm: a causal sample has one position a token"
        return
    if model is not None and not isinstance(model, GLMModel):
        yield f"data.objective.kind = glm needs model.family = glm: a {model.family} model cannot see a prefix"
    for key in ("attention", "positions", "loss_across_documents"):
        if getattr(data, key) != DataSection.model_fields[key].default:
            yield f"data.{key} belongs to the causal objective; leave it out, the objective sets what it means"
    slots, row = objective.slots, objective.row
    if row >= length:
        yield (
            f"data.objective.row = {row} leaves no room for special tokens; make it smaller than "
            f"data.sequence_length = {length}"
        )
    if length % slots or row % slots:
        yield (
            f"data.objective.slots = {slots} must divide data.sequence_length = {length} and data.objective.row = {row}"
        )
    if length // slots < 8:
        yield f"data.objective.slots = {slots} makes slots of {length // slots} tokens; 8 is the least"


def _stage_checks(data: DataSection, train: TrainSection | None) -> Iterator[str]:
    """Contradictions between `data.stages` and keys that suppose one length. The schedule checks the stages alone."""
    if not data.stages:
        return
    if isinstance(data.objective, GLMObjective):
        yield (
            "data.stages with data.objective.kind = glm: blanks and slots are made for one length of samples; leave "
            "the stages out"
        )
    ramp = train.batch_ramp if train is not None else None
    sizes: dict[str, Progress] = {"train.global_batch": train.global_batch} if train is not None else {}
    sizes |= {f"train.batch_ramp.{name}": value for name, value in ramp or () if isinstance(value, Progress)}
    for name, size in sizes.items():
        if size.unit == "token":
            yield f"{name} = {size}: with data.stages, how many samples that is changes on the way; give it in samples"


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply `section.key=value` overrides, and check the result.

    The value of an override is a TOML literal, or a plain string if it is not valid TOML. Raises ConfigError, which
    lists every problem.
    """
    path = Path(path)
    origin: dict[str, str] = {}
    raw = read_toml(path, origin)
    problems = [problem for text in overrides if (problem := override(raw, text, origin))]
    extensions.trust(parts.packages(raw))
    return _resolve(raw, path, origin, problems)


def parse(text: str) -> Config:
    """The resolved configuration in a text that a parent process sent. Imports the packages that it names.

    Raises ConfigError, which lists every problem.
    """
    return _resolve(tomllib.loads(text), Path("(from the parent process)"), {})


def with_timeline(config: Config, timeline: Sequence[TimelineEntry], path: Path) -> Config:
    """The configuration with another timeline, checked as a whole. `path` is for messages.

    Raises ConfigError, which lists every problem.
    """
    raw = config.model_dump(mode="json", exclude_none=True)
    raw["timeline"] = [entry.model_dump(mode="json", exclude_none=True) for entry in timeline]
    return _resolve(raw, path, {})


def _invalid(problems: list[str], path: Path) -> ConfigError:
    listed = "\n".join(f"  - {problem}" for problem in problems)
    return ConfigError(f"{counted(len(problems), 'problem')} in {path}\n{listed}")


def replace_in(section: S, name: str, values: Mapping[str, Any], overrides: Sequence[str], path: Path) -> S:
    """The section `name` with keys replaced by `values`, then by `name.key=value` overrides.

    `path` is for messages. Raises ConfigError, which lists every problem; an override of another section is one.
    """
    raw: dict[str, Any] = {name: {**section.model_dump(mode="json", exclude_none=True), **values}}
    origin: dict[str, str] = {f"{name}.{key}": "command line" for key in values}
    problems = []
    for text in overrides:
        key = text.partition("=")[0].strip()
        if "." in key and key.partition(".")[0] != name:
            problems.append(f"override {text!r}: only keys of [{name}] can be replaced, the rest is as it was trained")
        elif problem := override(raw, text, origin):
            problems.append(problem)
    sections, errors = _check(raw)
    problems += describe_all([error for error in errors if error["loc"][0] == name], path, origin, schema_keys())
    if problems:
        raise _invalid(problems, path)
    changed: S = sections[name]
    return changed


def load_known(path: Path, *, own: bool) -> tuple[Config, dict[str, Any]]:
    """Load a resolved configuration that another version of this program may have written.

    `own`: whether the packages that it names are trusted; else they must be already.

    Returns the configuration without the keys that this version does not know, and their values by dotted key. Raises
    ConfigError, which lists every other problem.
    """
    raw = read_toml(path, {})
    if own:
        extensions.trust(parts.packages(raw))
    extensions.refuse_untrusted(parts.packages(raw), path)
    unknown: dict[str, Any] = {}
    for error in _check(raw)[1]:
        if error["type"] == "extra_forbidden":
            node: Any = raw
            for part in error["loc"][:-1]:
                node = node[part]
            unknown[".".join(map(str, error["loc"]))] = node.pop(error["loc"][-1])
    return _resolve(raw, path, {}), unknown


def _resolve(raw: dict[str, Any], path: Path, origin: dict[str, str], problems: Sequence[str] = ()) -> Config:
    """The configuration of raw values. Raises ConfigError, which lists every problem, `problems` first."""
    sections, errors = _check(raw)
    problems = [*problems, *describe_all(errors, path, origin, schema_keys()), *cross_checks(sections)]
    if problems:
        raise _invalid(problems, path)
    return Config.model_construct(**sections)  # not checked again: unions know only our own sections


def _check(raw: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The valid sections, and the errors of the others in pydantic's form.

    Each is checked on its own, so that the valid ones can still be checked against each other.
    """
    sections: dict[str, Any] = {}
    unknown = [key for key in raw if key not in Config.model_fields]
    errors: list[dict[str, Any]] = [{"type": "extra_forbidden", "loc": (key,), "input": raw[key]} for key in unknown]
    errors += parts.load(raw)
    for key, field in Config.model_fields.items():
        if any(error["loc"][0] == key for error in errors):
            continue
        if key in raw:
            try:
                sections[key] = (parts.checker(key, raw[key]) or _checker(key)).validate_python(raw[key])
            except ValidationError as error:
                errors += _located(raw, key, error.errors(include_url=False))
        elif field.is_required():
            errors.append({"type": "missing", "loc": (key,)})
        else:
            sections[key] = field.get_default()
    return sections, errors


@cache
def _checker(key: str) -> TypeAdapter[Any]:
    """Checks one section of our own."""
    field = Config.model_fields[key]
    annotation: Any = Annotated[field.annotation, field]
    return TypeAdapter(annotation)


def _located(raw: dict[str, Any], key: str, items: Sequence[Any]) -> list[dict[str, Any]]:
    """Pydantic's errors in a section, each at its key: pydantic inserts labels of the types of a union, and has an
    error for each of these types."""
    located: dict[tuple[Any, ...], dict[str, Any]] = {}
    for item in items:
        place = _path(raw, (key, *item["loc"]), missing=item["type"] == "missing")
        if place in located:
            message = item["msg"].removeprefix("Value error, ")
            located[place]["msg"] += f", or {message[:1].lower()}{message[1:]}"
        else:
            located[place] = {**item, "loc": place}
    return list(located.values())


def _path(raw: Any, location: Sequence[Any], *, missing: bool) -> tuple[Any, ...]:
    """The keys of a location: those that lead to a raw value, and at the end that of one that is missing."""
    path: list[Any] = []
    for number, part in enumerate(location, 1):
        if (isinstance(raw, dict) and part in raw) or (isinstance(raw, list) and isinstance(part, int)):
            path.append(part)
            raw = raw[part]
        elif missing and number == len(location):
            path.append(part)
    return tuple(path)


def schema_keys() -> dict[str, tuple[type[BaseModel], str]]:
    """Every valid dotted key (list entries without index) -> (its section class, field name)."""
    keys: dict[str, tuple[type[BaseModel], str]] = {}

    def walk(section: type[BaseModel], prefix: str) -> None:
        for name, field in section.model_fields.items():
            key = prefix + (field.alias or name)
            keys.setdefault(key, (section, name))
            for inner in sections_in(field.annotation):
                walk(inner, f"{key}.")

    walk(Config, "")
    for prefix, section in parts.sections():
        walk(section, prefix)
    return keys


def sections_in(annotation: Any) -> list[type[Section]]:
    """The section classes in the type of a key."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in getattr(annotation, "__args__", ()) for section in sections_in(part)]
