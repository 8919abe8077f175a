"""One HTML page with everything inlined: no other file and no network is needed, and nothing else may run in it.

Strings of the record are untrusted: a note may hold `</script>`. The template escapes all of them, and the page's
security policy allows only its own scripts, by their hashes. plotly.js and the figures are compressed: they are most of
the page.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from fsdp_pretrain.errors import ConfigError, install
from fsdp_pretrain.files import replace_file
from fsdp_pretrain.run import environment
from fsdp_pretrain.run.files import RunDir, seconds_of, stamp
from fsdp_pretrain.run.goodput import MEANING, headline
from fsdp_pretrain.run.journal import GROUPS
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.units import counted, human_count, human_time
from fsdp_pretrain.views.gather import RunRecord, read
from fsdp_pretrain.views.status import facts

from .evaluations import newest_texts
from .events import read_events
from .figures import Drawing
from .summary import Summary, summarise

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_LEVELS = ("ok", "warn", "alert")
_SIGNS = {Severity.INFO: "", Severity.WARN: "▲ ", Severity.CRIT: "◆ "}


def write_report(run: RunDir, out: Path, shown: Callable[[Iterable[Any]], Iterable[Any]] = iter) -> tuple[int, Summary]:
    """Write the page of a run. Returns its size in bytes, and the summary on it.

    Args:
        shown: may wrap metrics lines in a progress bar.

    Raises:
        ConfigError: plotly or jinja2 is not installed, or the run was never started.
        OSError: `out` cannot be written.
        UserError: the lineage is damaged.
    """
    library = _library()
    record = read(run, shown)
    made = None if run.fetched is None else seconds_of(run.fetched.made)
    page, summary = render(record, library, made or time.time())
    replace_file(out, content := page.encode())
    return len(content), summary


def _library() -> str:
    """The source of plotly.js."""
    try:
        import jinja2  # noqa: F401
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        what = "jinja2, which fills in the page" if error.name == "jinja2" else "plotly, which draws the curves"
        raise ConfigError(
            f"{what}, is not installed",
            effect="no page was written",
            remedy=f"{install('report')}; or run this on a machine with the extra `train`",
        ) from None
    return str(get_plotlyjs())


def render(record: RunRecord, library: str, made: float) -> tuple[str, Summary]:
    """The page as HTML, and the summary on it. Raises ConfigError.

    Args:
        library: source of plotly.js.
        made: time of the record, in seconds since 1970.
    """
    if (account := record.account) is None:
        raise ConfigError(
            f"there is nothing to show: {record.run.path} was never started",
            effect="no page was written",
            remedy=f"start its training, or see why that failed: fsdp-pretrain journal {record.run.path}",
        )
    import jinja2

    events, left_out = read_events(record.entries, record.history.nodes, record.lines, account.incidents)
    drawing, script = Drawing(record, events), _asset("report.js")
    data = _plain({"places": drawing.places, "marks": drawing.marks, "figures": [*map(vars, drawing.figures)]})
    rows, summary = [*facts(record.report), ("goodput", headline(account))], summarise(record)
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template.filters |= {"time": _time, "step": _step, "span": human_time, "amount": human_count}
    page = template.from_string(_asset("page.html")).render(
        record=record,
        report=record.report,
        levels=_LEVELS,
        summary=summary,
        config=_config(record),
        machines=_machines(record),
        facts=[(name, *text.partition(", ")[::2]) for name, text in rows],  # up to the first comma: in large letters
        made=made,
        account=account,
        meaning=MEANING,
        figures=drawing.figures,
        written=newest_texts(record.run, record.entries),
        events=[*enumerate(events)][::-1],
        left_out=left_out,
        place=drawing.events,
        groups=GROUPS,
        signs=_SIGNS,
        policy=f"{_POLICY}; script-src {_hash(script)} {_hash(library)}",
        style=_asset("report.css"),
        script=script,
        data=_packed(json.dumps(data, separators=(",", ":"), allow_nan=False)),
        library=_packed(library),
    )
    return page, summary


def _config(record: RunRecord) -> str:
    """The resolved configuration, as TOML."""
    return record.run.config.read_text(encoding="utf-8") if record.run.config.exists() else ""


def _machines(record: RunRecord) -> dict[str, str]:
    """Hardware and software of the newest start, as texts by name."""
    started = environment.view(record.run, record.report.status.of_run.segment or 0)
    world, git = started.world, started.git or {}
    mesh = f" ({counted(world.replicas, 'replica')} x {counted(world.shards, 'shard')})" if world is not None else ""
    changed = ", with changes" if git.get("changed") else ""
    shown = {
        "ranks": ", ".join(f"{ranks} on {host}" for host, ranks in started.hosts.items()) + mesh,
        "device": started.device,
        "driver, CUDA, NCCL": ", ".join(filter(None, (started.driver, started.cuda, started.nccl))),
        "torch": started.torch,
        "Python": started.python,
        "fsdp-pretrain": started.fsdp_pretrain,
        "commit": f"{git['commit']}{changed}" if git.get("commit") else None,
    }
    return {name: text for name, text in shown.items() if text}


def _time(seconds: float) -> str:
    return stamp(seconds)[:19].replace("T", " ") if math.isfinite(seconds) else ""


def _step(step: float) -> str:
    return "show" if math.isnan(step) else f"{step:,.0f}"


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _packed(text: str) -> str:
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _plain(value: Any) -> Any:
    """JSON values: arrays with six significant digits, None for NaN."""
    if isinstance(value, np.ndarray):
        return [float(f"{number:.6g}") if math.isfinite(number) else None for number in value.tolist()]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
