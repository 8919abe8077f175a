"""Quantities with units: `"2000 steps"`, `"1_098_632 samples"`, `"2T tokens"`, `"30 minutes"`.

Bare numbers are rejected: unit mistakes in schedules have cost real runs days.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

_MULTIPLIER = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_NUMBER = re.compile(r"^\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([KMBT]?)\s*([A-Za-z]+)\s*$")
_RANGE = re.compile(r"^\s*([0-9][0-9_]*)\s*:\s*([0-9][0-9_]*)\s+samples?\s*$")
_BYTES = re.compile(r"^\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([kKMGTP]?)(i?)B\s*$")
_SCIENTIFIC = re.compile(r"^([0-9.]+e\+[0-9]+) s$")
"""How earlier versions wrote a million seconds and more into the configurations of runs and checkpoints."""
_SECONDS = {"s": 1, "second": 1, "minute": 60, "min": 60, "hour": 3600, "h": 3600, "day": 86400}


def _parse(text: object, units: dict[str, int], example: str) -> tuple[Decimal, str]:
    """Split `"2T tokens"` into (2e12, "token"). Raises ValueError with the allowed units."""
    names = ", ".join(f"{unit}s" for unit in units if len(unit) > 3)
    if isinstance(text, bool) or not isinstance(text, str):
        raise ValueError(f"a bare number has no unit; write a string such as {example!r} ({names})")
    match = _NUMBER.match(text)
    if match is None:
        raise ValueError(f"not a quantity with a unit; write something like {example!r} ({names})")
    number, multiplier, unit = match.groups()
    if unit not in units:
        unit = unit.removesuffix("s")
    if unit not in units:
        raise ValueError(f"unknown unit {multiplier + match.group(3)!r}; use one of {names}, for example {example!r}")
    return Decimal(number.replace("_", "")) * _MULTIPLIER[multiplier], unit


class _Quantity(ABC):
    """Base of quantities that are strings in configurations: read by `parse`, written by `str`."""

    @classmethod
    def parse(cls, text: object) -> Self:
        """The quantity in a text. Raises ValueError."""
        return text if isinstance(text, cls) else cls._read(text)

    @classmethod
    @abstractmethod
    def _read(cls, text: object) -> Self:
        """Parse a text. Raises ValueError."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema  # only pydantic calls this; the commands' parsers need no pydantic

        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )


@dataclass(frozen=True)
class Progress(_Quantity):
    """An amount of training in steps, samples or tokens, as `"2000 steps"`.

    Conversion to other units depends on the batch ramp, see `config.schedule`.
    """

    value: int
    unit: str
    UNITS = {"step": 1, "sample": 1, "token": 1}  # noqa: RUF012 (not annotated, so not a field of the dataclass)
    EXAMPLE, LEAST = "2000 steps", 0

    @classmethod
    def _read(cls, text: object) -> Self:
        number, unit = _parse(text, cls.UNITS, cls.EXAMPLE)
        if number != int(number) or number < cls.LEAST:
            raise ValueError(f"{text!r} is not a {'positive ' if cls.LEAST else ''}whole number of {unit}s")
        return cls(int(number), unit)

    def __str__(self) -> str:
        return f"{self.value:_} {self.unit}{'' if self.value == 1 else 's'}"


class BatchSize(Progress):
    """A batch in samples, or in tokens (which must be whole samples), as `"256 samples"`."""

    UNITS = {"sample": 1, "token": 1}  # noqa: RUF012
    EXAMPLE, LEAST = "256 samples", 1


class Steps(Progress):
    """A number of optimiser steps, at least one, as `"128 steps"`."""

    UNITS = {"step": 1}  # noqa: RUF012
    EXAMPLE, LEAST = "128 steps", 1


@dataclass(frozen=True)
class SampleRange(_Quantity):
    """Samples [first, stop) by index, as `"1200:1332 samples"`."""

    first: int
    stop: int

    @classmethod
    def _read(cls, text: object) -> Self:
        match = _RANGE.match(text) if isinstance(text, str) else None
        if match is None:
            raise ValueError(
                'not a range of samples; write something like "1200:1332 samples" (the second is not in it)'
            )
        first, stop = (int(number.replace("_", "")) for number in match.groups())
        if stop <= first:
            raise ValueError(f"{text!r} is empty: it ends where it begins or before")
        return cls(first, stop)

    def __str__(self) -> str:
        return f"{self.first}:{self.stop} samples"


@dataclass(frozen=True)
class Seconds(_Quantity):
    """A wall-clock duration (s, minutes, hours, days), as `"30 minutes"`."""

    value: float

    @classmethod
    def _read(cls, text: object) -> Self:
        if isinstance(text, str) and (written := _SCIENTIFIC.match(text)) is not None:
            text = f"{Decimal(written[1]):f} s"
        number, unit = _parse(text, _SECONDS, "30 minutes")
        seconds = float(number * _SECONDS[unit])
        if not 1e-3 <= seconds < math.inf:
            raise ValueError(f"{text!r} is too {'short' if seconds < 1 else 'long'}")
        return cls(seconds)

    def __str__(self) -> str:
        return f"{Decimal(repr(self.value)):f}".removesuffix(".0") + " s"  # all digits, without an exponent


@dataclass(frozen=True)
class Bytes(_Quantity):
    """An amount of storage, as `"200GB"` or `"1.5 TiB"`."""

    value: int

    @classmethod
    def _read(cls, text: object) -> Self:
        match = _BYTES.match(text) if isinstance(text, str) else None
        value = 0
        if match is not None:
            number, multiplier, binary = match.groups()
            base = 1024 if binary else 1000
            value = int(Decimal(number.replace("_", "")) * base ** " KMGTP".index(multiplier.upper() or " "))
        if not value:
            raise ValueError('not an amount of storage with a unit; write something like "200GB" or "1.5TiB"')
        return cls(value)

    def __str__(self) -> str:
        power = max(power for power in range(6) if self.value % 1000**power == 0)
        return f"{self.value // 1000**power}{' KMGTP'[power].strip()}B"


def human_count(value: float) -> str:
    """1_260_000_000 -> `1.26B`; rounded, for people."""
    return _scaled(value, 1000, ("", "K", "M", "B", "T"))


def human_bytes(value: float) -> str:
    """Bytes in binary units, `61.3 GiB`."""
    return _scaled(value, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def counted(number: int, noun: str) -> str:
    """`1 shard`, `2_000 shards`."""
    return f"{number:_} {noun}{'s' * (number != 1)}"


def _scaled(value: float, base: int, suffixes: Sequence[str]) -> str:
    """Three significant digits, or all integer digits if more, and the suffix of a power of `base`."""
    power = 0
    while abs(value) >= base - 0.5 and power < len(suffixes) - 1:
        value, power = value / base, power + 1
    return f"{value:.0f}{suffixes[power]}" if abs(value) >= 99.95 else f"{value:.3g}{suffixes[power]}"


def human_time(seconds: float) -> str:
    """Seconds as `3h12m`, `2d04h`, `45s`; infinity as `an unknown time`."""
    if math.isinf(seconds):
        return "an unknown time"
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.3g}s" if seconds < 10 else f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
