"""One HTML page with everything inlined: no other file and no network is needed, and nothing else may run in it.

Strings of the record are untrusted: a note may hold `</script>`. All are escaped, and the page's security policy allows
only its own scripts, by their hashes. plotly.js and the figures are compressed: they are most of the page.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import math
import time
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from fsdp_pretrain.atomic import replace_file
from fsdp_pretrain.errors import ConfigError
from fsdp_pretrain.run.files import RunDir, stamp
from fsdp_pretrain.views.gather import RunRecord, read

from . import tables
from .events import GROUPS, read_events
from .figures import Drawing, Figure

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def write_report(run: RunDir, out: Path, shown: Callable[[Iterable[Any]], Iterable[Any]] = iter) -> int:
    """Write the page of a run. Returns its size in bytes.

    Args:
        shown: may wrap metrics lines in a progress bar.

    Raises:
        ConfigError: plotly is not installed, or the run was never started.
        OSError: `out` cannot be written.
        UserError: the lineage is damaged.
    """
    library = _library()
    content = render(read(run, shown), library, time.time()).encode()
    replace_file(out, content)
    return len(content)


def _library() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigError(
            "plotly, which draws the curves, is not installed",
            effect="no page was written",
            remedy="in the checkout: pip install -e '.[report]'; or run this on a machine with the extra `train`",
        ) from None
    return str(get_plotlyjs())


def render(record: RunRecord, library: str, made: float) -> str:
    """The page, made at a time in seconds since 1970, with the source of plotly.js. Raises ConfigError."""
    if (account := record.account) is None:
        raise ConfigError(
            f"there is nothing to show: {record.run.path} was never started",
            effect="no page was written",
            remedy=f"start its training, or see why that failed: fsdp-pretrain journal {record.run.path}",
        )
    events, left_out = read_events(record.entries, record.history.nodes, record.lines, account.incidents)
    drawing, script = Drawing(record, events), _asset("report.js")
    data = _plain({"places": drawing.places, "marks": drawing.marks, "figures": [*map(vars, drawing.figures)]})
    evaluations = [_panel(figure) for figure in drawing.figures if figure.scores]
    return Template(_asset("page.html")).substitute(
        title=html.escape(record.name),
        policy=f"{_POLICY}; script-src {_hash(script)} {_hash(library)}",
        style=_asset("report.css"),
        header=tables.header(record, account),
        made=stamp(made)[:19].replace("T", " "),
        panels="".join(_panel(figure) for figure in drawing.figures if not figure.scores),
        hidden="" if evaluations else "hidden",
        evaluations="".join(evaluations),
        account=tables.account(account),
        groups="".join(f"<option>{group}</option>" for group in GROUPS),
        events=tables.events(events, left_out, drawing.events),
        data=_packed(json.dumps(data, separators=(",", ":"), allow_nan=False)),
        library=_packed(library),
        script=script,
    )


def _panel(figure: Figure) -> str:
    """Its heading, and the place of its figure."""
    title, about = html.escape(figure.title), html.escape(figure.about)
    return (
        f'<section class="panel" aria-label="{title}"><h3>{title}</h3><p class="about">{about}</p>'
        f'<div class="plot" role="img" aria-label="{title} {about}" style="height:{figure.height}px"></div></section>'
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _plain(value: Any) -> Any:
    """JSON values: arrays with six significant digits, None for NaN."""
    if isinstance(value, np.ndarray):
        return [float(f"{each:.6g}") if math.isfinite(each) else None for each in value.tolist()]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
