"""One HTML page with everything inlined: no other file and no network is needed, and nothing else may run in it.

Strings of the record are untrusted: a note may hold `</script>`. In the data `<` is escaped, `report.js` only sets
texts, and the page's security policy allows only its own scripts, by their hashes.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import html
import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from fsdp_pretrain.atomic import replace_file
from fsdp_pretrain.errors import ConfigError, StorageError
from fsdp_pretrain.record.files import RunDir, stamp

from .gather import RunPage, gather, read
from .panels import PanelLayout, lay_out
from .summary import Fact

_SCRIPTS = ("uPlot.iife.min.js", "series.js", "plot.js", "curves.js", "charts.js", "tables.js", "report.js")
_STYLES = ("uPlot.min.css", "report.css")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def write_report(runs: list[RunDir], out: Path, shown: Callable[[Iterable[Any]], Iterable[Any]] = iter) -> int:
    """Write the page of one run, or of several to compare. Returns its size in bytes.

    Args:
        shown: may wrap metrics lines in a progress bar.

    Raises:
        ConfigError: a run was never started, or `out` cannot be written.
        UserError: the lineage of a run is damaged.
    """
    records = [read(run, shown) for run in runs]
    layout = lay_out(name for record in records for name in record.lines.kept.columns)
    pages = [gather(record, layout.columns, len(runs)) for record in records]
    content = render(pages, layout, time.time()).encode()
    try:
        replace_file(out, content)
    except OSError as error:
        kind = StorageError if error.errno in _FULL else ConfigError
        raise kind(f"cannot write {out}: {error.strerror}", remedy="name a file elsewhere: --out FILE") from None
    return len(content)


def render(runs: list[RunPage], layout: PanelLayout, made: float) -> str:
    """The page, made at a time in seconds since 1970."""
    names = ", ".join(run.name for run in runs)
    scripts = [_asset(name) for name in _SCRIPTS]
    data = json.dumps(_plain({"made": made, "panels": layout.panels, "runs": runs}), separators=(",", ":"))
    return Template(_asset("page.html")).substitute(
        title=html.escape(names),
        policy=f"{_POLICY}; script-src {' '.join(map(_hash, scripts))}",
        styles="\n".join(_asset(name) for name in _STYLES),
        headers="\n".join(_header(run, number) for number, run in enumerate(runs)),
        made=stamp(made)[:19].replace("T", " "),
        data=data.replace("<", "\\u003c"),
        licence=_asset("uPlot.LICENSE"),
        scripts="\n".join(f"<script>{text}</script>" for text in scripts),
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _header(run: RunPage, number: int) -> str:
    said, escape = run.summary, html.escape
    bar = ""
    if said.progress is not None:
        bar = f'<progress max="1" value="{said.progress:.4f}" aria-label="share of the steps done"></progress>'
    problems = "".join(f'<li class="{level}">{escape(text)}</li>' for level, text in said.problems)
    return (
        f'<section class="run" data-run="{number}"><h2><span class="swatch"></span>{escape(run.name)} '
        f'<span class="state {said.level}">{escape(said.state)}</span></h2>'
        f'<p class="about">{escape(said.about)}<br><code>{escape(run.path)}</code></p>{bar}'
        f'<dl class="facts">{"".join(map(_fact, said.facts))}</dl>'
        + (f'<ul class="problems">{problems}</ul>' if problems else "")
        + "</section>"
    )


def _fact(fact: Fact) -> str:
    name, value, more = map(html.escape, (fact.name, fact.value, fact.more))
    return f'<div class="{fact.level}"><dt>{name}</dt><dd>{value}<small>{more}</small></dd></div>'


def _plain(value: Any) -> Any:
    """JSON values: arrays as base64 of their bytes, little-endian; None for NaN and infinity."""
    if isinstance(value, np.ndarray):
        kind = "<f4" if value.dtype == np.float32 else "<f8"
        return {kind[1:]: base64.b64encode(value.astype(kind).tobytes()).decode()}
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.13g}") if math.isfinite(value) else None
    return value
