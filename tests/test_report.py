"""`fsdp-pretrain report`: what the page holds, against the record; and what a person sees of it, in Chromium."""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from browser import Tab, browser, needs_chromium
from long_run import LongRun, write_long_run
from records import results
from released import unpack
from sight import tree

from fsdp_pretrain.run.files import RunDir, stamp
from fsdp_pretrain.run.goodput import goodput
from fsdp_pretrain.run.lines import read_lines
from fsdp_pretrain.run.metrics import read_metrics
from fsdp_pretrain.run.start_history import read_history
from fsdp_pretrain.units import human_time
from fsdp_pretrain.views.report import summary
from fsdp_pretrain.views.report.evaluations import newest_texts
from fsdp_pretrain.views.report.events import read_events
from fsdp_pretrain.views.report.summary import moving_mean

pytest.importorskip("plotly")

ROOT = Path(__file__).resolve().parent.parent
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


class Page:
    """What a page holds: its figures with their lines, and the cells of its tables and facts."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text()
        found = re.search(r'<script type="text/plain" id="data">(.*?)</script>', self.text)
        assert found is not None
        self.data: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(found[1])))

    def lines(self, title: str) -> list[dict[str, Any]]:
        """The lines of a figure."""
        return [line for each in self.data["figures"] if each["title"] == title for line in each["traces"]]

    def line(self, title: str, name: str) -> dict[str, Any]:
        (found,) = (line for line in self.lines(title) if line.get("name") == name)
        return found

    def at(self, line: dict[str, Any], clock: str = "step") -> Any:
        """The positions of a line's values."""
        column = self.data["places"][line["place"]][clock]
        return numbers(column if "rows" not in line else [None if row is None else column[row] for row in line["rows"]])

    def curve(self, title: str, name: str) -> tuple[Any, Any]:
        """Positions and values of a line, without its breaks."""
        line = self.line(title, name)
        steps, values = self.at(line), numbers(line["y"])
        return steps[np.isfinite(values)], values[np.isfinite(values)]

    def rows(self, kind: str) -> list[list[str]]:
        """The cells of the tables of a kind."""
        tables = re.findall(f'<table class="{kind}">.*?</table>', self.text, re.DOTALL)
        found = [re.findall(r"<td[^>]*>(.*?)</td>", row) for table in tables for row in table.split("<tr")[2:]]
        return [[html.unescape(re.sub("<[^>]*>", "", cell)).strip() for cell in row] for row in found]

    def facts(self) -> dict[str, str]:
        return dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)<", self.text))


def numbers(values: list[float | None]) -> Any:
    return np.array([np.nan if value is None else value for value in values])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> LongRun:
    """A run of 12,000 steps in eight starts, with a rollback."""
    return write_long_run(tmp_path_factory.mktemp("long") / "run", steps=12_000, starts=8)


@pytest.fixture(scope="module")
def written(made: LongRun, run_command: Any) -> Path:
    """Its page."""
    done = run_command("fsdp_pretrain.cli", "report", made.run.path)
    out = made.run.path / "report.html"
    assert done.returncode == 0 and str(out) in done.stdout, done.stderr
    return out


@pytest.mark.quick
def test_no_code_of_others_lies_in_the_repository() -> None:
    """What others wrote comes from a registry; minified code is what nobody here wrote."""
    for kind in ("js", "css", "html"):
        for path in (ROOT / "fsdp_pretrain").rglob(f"*.{kind}"):
            assert max(map(len, path.read_text().splitlines())) < 1000, path


@pytest.mark.quick
def test_without_plotly_it_says_what_to_install(tmp_path: Path, helpers: Any, run_command: Any) -> None:
    (tmp_path / "run/segments/0001").mkdir(parents=True)
    code = "import sys; sys.modules['plotly'] = None; from fsdp_pretrain.cli.main import main; sys.exit(main())"
    line = [sys.executable, "-c", code, "report", tmp_path / "run"]
    done = subprocess.run(line, capture_output=True, text=True, cwd="/", env=helpers.environment())
    assert done.returncode == 78 and "plotly" in done.stderr and "[report]'" in done.stderr
    done = run_command("fsdp_pretrain.cli", "report", tmp_path / "run")  # with it
    assert done.returncode == 78 and "never started" in done.stderr and "remedy: " in done.stderr


def test_extremes_survive_and_what_was_left_behind_is_there(made: LongRun, written: Path) -> None:
    shown = Page(written)
    truth = list(read_metrics(made.run))
    for title, name, values in (
        ("Loss", "training", [record.loss.mean for record in truth]),
        ("Gradient norm", "before clipping", [record.grad_norm for record in truth]),
        ("Step time by part", "waiting for data", [record.seconds.data for record in truth]),
        ("Loss by source", "code", [record.sources["code"].mean for record in truth]),
    ):
        line, (steps, mean) = shown.line(title, name), shown.curve(title, name)
        assert steps[-1] == 12_000 and (np.diff(steps) > 0).all() and 3_000 < len(steps) < 9_000
        low, high = (numbers(line[edge]) for edge in ("low", "high"))
        parts = [values[first:stop] for first, stop in pairwise([0, *steps.astype(int)])]
        assert mean == pytest.approx([sum(part) / len(part) for part in parts], rel=1e-5)
        assert high[np.isfinite(high)] == pytest.approx([max(part) for part in parts], rel=1e-5)
        assert low[np.isfinite(low)] == pytest.approx([min(part) for part in parts], rel=1e-5)
    *rolled_back, unnoticed = made.spikes
    line, (steps, _) = shown.line("Loss", "training"), shown.curve("Loss", "training")
    high = numbers(line["high"])[np.isfinite(numbers(line["y"]))]
    assert high.max() == 9.0 and steps[high.argmax()] >= unnoticed > steps[high.argmax() - 1]
    assert rolled_back and shown.curve("Loss", "training, left behind")[1].max() == 9.0
    assert shown.at(line, "trained")[-1] == truth[-1].tokens
    assert written.stat().st_size < 5e6


def test_what_was_open_at_a_fork_is_not_open_in_the_new_run(tmp_path: Path) -> None:
    lines = read_lines(run := RunDir(tmp_path), read_history(run))
    alarm = {"kind": "alarm", "time": stamp(1.0), "severity": "CRIT", "state": "open", "text": "CRIT"}
    fork = {"kind": "fork", "time": stamp(2.0), "text": "from step 3", "segment": 2, "step": 3}
    entries = [{**alarm, "key": "hang"}, fork, {**alarm, "key": "disk/run", "time": stamp(3.0)}]
    events, _ = read_events(entries, [], lines, [])
    assert [(event.kind, event.text, event.open) for event in events] == [
        ("alarm", "hang: CRIT", False), ("fork", "from step 3", False), ("alarm", "disk/run: CRIT", True),
    ]  # fmt: skip


def test_the_smoothed_loss_is_a_mean_around_each_step() -> None:
    column = np.array([3.0, 1.0, math.nan, 7.0, 5.0, math.inf])
    for length in (1, 2, 3, 4, 12):
        around = [column[max(0, at - length // 2) : at + (length + 1) // 2] for at in range(6)]
        finite = [part[np.isfinite(part)] for part in around]
        expected = [part.mean() if len(part) else math.nan for part in finite]
        assert moving_mean(column, length) == pytest.approx(expected, nan_ok=True)


def test_account_checkpoints_evaluations_and_events_are_those_of_the_record(made: LongRun, written: Path) -> None:
    shown, account = Page(written), goodput(made.run)
    assert account is not None
    rows = [[str(state), human_time(seconds), f"{seconds / account.wall_seconds:.3%}"]
            for state, seconds in account.states.items() if seconds]  # fmt: skip
    assert [row[:3] for row in shown.rows("account")] == rows
    score, left = shown.lines("hellaswag acc_norm")
    assert len(score["y"]) == 50 and not left["y"]
    low, high = (score["y"][-1] + side for side in (-score["error_y"]["arrayminus"][-1], score["error_y"]["array"][-1]))
    assert (high - low) / 2 == pytest.approx(1.96 * 0.007, rel=1e-3)
    assert f"95% within {low:.4g} to {high:.4g}" in score["text"][-1]
    kinds = [kind.lstrip("▲◆ ") for _, _, kind, _ in shown.rows("all")]
    saves = [line for line in shown.lines("Events") for group in line["y"] if group == "saves"]
    assert len(saves) == kinds.count("checkpoint") == 26
    assert kinds.count("rollback") == len(made.spikes) - 1 == kinds.count("note")
    assert kinds.count("interruption") == len([i for i in account.incidents if i.kind == "failure"])
    ((_, _, kind, text),) = (row for row in shown.rows("all") if row[3].startswith("hang: "))
    assert kind == "◆ alarm" and "(open)" not in text and text.endswith("over after 20s")
    facts = shown.facts()
    assert facts["step"].startswith("12_000") and facts["checkpoint"].startswith("step 12_000")
    assert facts["goodput"].startswith(f"{account.goodput:.1%}")
    losses = [record.loss.mean for record in read_metrics(made.run)]
    assert (
        f"loss {np.mean(losses[:600]):.3f} at first, {np.mean(losses[-600:]):.3f} now (means of 600 steps)"
        in shown.text
    )
    (acc,) = {float(value) for value in re.findall(r"hellaswag acc_norm ([\d.]+) ± 0.007", shown.text)}
    assert acc == pytest.approx(score["y"][-1], rel=1e-3)
    assert "sequence_length = " in shown.text.partition("<summary>all keys</summary>")[2]


@pytest.mark.quick
def test_numbers_of_a_probe_are_no_scores() -> None:
    """Nor are those of a merge of checkpoints."""
    row = {"second": 0.125}
    scores = {"separator_probe": row, "separator_probe@merge": row, "arc_easy@merge": row}
    entry = {"kind": "eval", "step": 8, "time": stamp(0.0), "scores": scores}
    record = SimpleNamespace(entries=[entry], lines=SimpleNamespace(locate=lambda step, at: None))
    assert [name for name, _ in summary._scores(record)] == [("arc_easy@merge", "second")]  # type: ignore[arg-type]


@pytest.mark.quick
def test_texts_that_were_left_behind_are_not_the_newest(tmp_path: Path) -> None:
    """A rollback went back to step 20, and the same step 40 was not evaluated again."""
    entries = []
    for step in (10, 40):
        folder = tmp_path / f"evals/step-{step:08d}/tasks"
        folder.mkdir(parents=True)
        found = results(step=step, committed=f"commit {step}", texts={"the ": str(step)})
        (folder / "results.json").write_text(json.dumps(found))
        entries.append(
            {"kind": "eval", "time": "", "text": "", "step": step, "scores": {}, "committed": f"commit {step}"}
        )
    newest = newest_texts(RunDir(tmp_path), entries)
    assert newest is not None and newest.texts == {"the ": "40"}
    newest = newest_texts(RunDir(tmp_path), [*entries, {"kind": "rollback", "time": "", "text": "", "step": 20}])
    assert newest is not None and newest.texts == {"the ": "10"}


def test_it_names_machines_versions_and_commit(tmp_path: Path, run_command: Any) -> None:
    run, page = unpack(tmp_path), tmp_path / "page.html"
    done = run_command("fsdp_pretrain.cli", "report", run, "--out", page)
    assert done.returncode == 0 and re.search(r"^  result +loss [\d.]+ at first", done.stdout, re.MULTILINE), (
        done.stderr
    )
    machines = dict(re.findall(r'<th scope="row">([^<]*)</th><td>([^<]*)', page.read_text()))
    recorded = json.loads((RunDir(run).segments[-1] / "environment.json").read_text())
    assert {name: machines[name] for name in ("torch", "device")} == {k: recorded[k] for k in ("torch", "device")}
    changed = ", with changes" if recorded["git"]["changed"] else ""
    assert machines["commit"] == recorded["git"]["commit"] + changed
    assert all(f"{ranks} on {host}" in machines["ranks"] for host, ranks in recorded["hosts"].items())


def test_it_writes_nothing_but_the_page_and_works_on_a_disk_that_is_read_only(
    tmp_path: Path, run_command: Any, small_disk: Any
) -> None:
    disk = small_disk("20m")
    run = write_long_run(disk / "run", steps=800, starts=5).run.path
    before = tree(run)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    done = run_command("fsdp_pretrain.cli", "report", run, "--out", tmp_path / "one.html")
    assert done.returncode == 0 and tree(run) == before, done.stderr
    refused = run_command("fsdp_pretrain.cli", "report", run)
    assert refused.returncode == 78 and "name another path" in refused.stderr
    one = Page(tmp_path / "one.html")
    steps, losses = one.curve("Loss", "training")
    records = list(read_metrics(RunDir(run)))
    assert losses == pytest.approx([r.loss.mean for r in records], rel=1e-5)
    assert steps.tolist() == [record.step for record in records]
    assert len(one.curve("Loss", "training, left behind")[0]) and 'id="evaluations" ><h2>' in one.text


# --------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, run_command: Any) -> Path:
    """The page of a run with a hostile name and note that still runs."""
    path = tmp_path_factory.mktemp("hostile")
    other = write_long_run(path / "run", steps=3_000, starts=5, seed=1, name=f"b {HOSTILE}")
    with other.run.journal.open("a") as file:
        entry = {"time": "2026-06-01T12:00:00.000Z", "kind": "note", "text": HOSTILE, "step": 2_500, "by": HOSTILE}
        file.write(json.dumps(entry) + "\n")
    done = run_command("fsdp_pretrain.cli", "report", other.run.path, "--out", path / "page.html")
    assert done.returncode == 0, done.stderr
    return path / "page.html"


RANGES = "[...document.querySelectorAll('.plot')].map((plot) => plot.layout.xaxis.range)"


def look(tab: Tab, path: Path, **how: Any) -> None:
    """Open a page, and wait until it is drawn."""
    tab.open(path, **how)
    wait(tab, "window.ready")


def wait(tab: Tab, condition: str) -> None:
    check = f"const check = () => {condition} ? done() : setTimeout(check, 20)"
    tab.value(f"new Promise((done) => {{ {check}; check(); }})")


def click(tab: Tab, selector: str) -> None:
    tab.value(f"document.querySelector({json.dumps(selector)}).click()")


def count(tab: Tab, selector: str) -> int:
    found: int = tab.value(f"document.querySelectorAll({json.dumps(selector)}).length")
    return found


def choose(tab: Tab, clock: str) -> None:
    """Another axis, drawn."""
    click(tab, f"#clocks button[value={clock}]")
    wait(tab, f"new Set({RANGES}.map(String)).size === 1")


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(1600, False), (800, True)])
def test_it_opens_without_a_complaint(tab: Tab, written: Path, width: int, dark: bool) -> None:
    look(tab, written, width=width, dark=dark)
    assert count(tab, ".plot") == 14 == count(tab, ".plot.js-plotly-plot")
    assert tab.value("getComputedStyle(document.body).backgroundColor") == (
        "rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)"
    )
    assert tab.value("document.documentElement.scrollWidth <= window.innerWidth"), "it scrolls sideways"
    titles = tab.value("[...new Set([...document.querySelectorAll('.modebar-btn')].map((each) => each.dataset.title))]")
    assert titles == ["Download plot as a PNG", "Zoom", "Pan", "Zoom in", "Zoom out", "Autoscale"]  # none that shares
    assert tab.problems == [] and tab.requests == []


@needs_chromium
@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_has_just_begun_opens_too(tab: Tab, tmp_path: Path, run_command: Any, steps: int) -> None:
    made = write_long_run(tmp_path / "run", steps=20, starts=1)
    metrics = made.run.segment(1) / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:steps]))
    done = run_command("fsdp_pretrain.cli", "report", made.run.path)
    assert done.returncode == 0, done.stderr
    look(tab, made.run.path / "report.html")
    for clock in ("trained", "date"):
        choose(tab, clock)
    assert tab.problems == [] and count(tab, ".plot .main-svg") > 0


@needs_chromium
def test_one_axis_is_shared_by_all_panels_on_every_clock(tab: Tab, made: LongRun, written: Path) -> None:
    look(tab, written, height=6000)
    box = "document.querySelectorAll('.plot')[1].querySelector('.nsewdrag').getBoundingClientRect()"
    left, top, width, height = tab.value(f"(() => {{ const b = {box}; return [b.left, b.top, b.width, b.height]; }})()")
    at = top + height / 2
    tab.drag((left + width * 0.25, at), (left + width * 0.5, at))
    wait(tab, f"{RANGES}.every((range) => range[0] > 1000)")
    (zoomed,) = {tuple(each) for each in tab.value(RANGES)}
    assert zoomed == pytest.approx((3_000, 6_000), abs=50)
    for clock in ("trained", "date", "step"):
        choose(tab, clock)
    wait(tab, f"{RANGES}.every((range) => range[0] === 0)")
    (start,) = (float(step.replace(",", "")) for _, step, kind, _ in Page(written).rows("all") if kind == "▲ rollback")
    tab.move(left + width * start / 12_000 - 9, at)
    tab.move(left + width * start / 12_000, at)
    wait(tab, "document.getElementById('where').textContent.includes('rollback')")
    said = tab.value("document.getElementById('where').textContent")
    assert "loss spike" in said and "left behind" in said and "tokens" in said
    boxes = "[...document.querySelectorAll('.hoverlayer')].filter((layer) => layer.textContent).length"
    assert tab.value(boxes) >= 10  # the cursor's values in every panel
    assert tab.problems == []


@needs_chromium
def test_a_person_can_choose_what_to_see(tab: Tab, written: Path) -> None:
    """A part of the axis fills a panel; a row of the table shows its event."""
    look(tab, written)
    top = "10 ** document.querySelectorAll('.plot')[1].layout.yaxis.range[1]"
    assert tab.value(top) > 9  # the spike
    box = "document.querySelectorAll('.plot')[1].querySelector('.nsewdrag').getBoundingClientRect()"
    left, upper, width, height = tab.value(
        f"(() => {{ const b = {box}; return [b.left, b.top, b.width, b.height]; }})()"
    )
    tab.drag((left + width * 0.2, upper + height * 0.4), (left + width * 0.6, upper + height * 0.95))
    wait(tab, f"{top} < 9")
    shown = "[...document.querySelectorAll('#events tbody tr')].filter((row) => !row.hidden)"
    assert "checkpoint" not in tab.value(f"{shown}.map((row) => row.cells[2].textContent)")
    tab.value("document.querySelector('#filter select').value = 'saves'")
    tab.value("document.querySelector('#filter').dispatchEvent(new Event('input'))")
    assert set(tab.value(f"{shown}.map((row) => row.cells[2].textContent)")) == {"checkpoint"}
    tab.value(f"{shown}.find((row) => row.cells[1].textContent === '6,000').querySelector('button').click()")
    wait(tab, f"{RANGES}.every(([low, high]) => low === 5700 && high === 6300)")
    assert tab.problems == []


@needs_chromium
def test_texts_of_the_record_stay_texts(tab: Tab, hostile: Path) -> None:
    look(tab, hostile, height=9000)
    assert tab.value("document.title") == f"b {HOSTILE} - training report"
    rows = tab.value("[...document.querySelectorAll('#events td')].map((cell) => cell.textContent)")
    assert f"{HOSTILE} ({HOSTILE})" in rows
    box = "document.querySelectorAll('.plot')[1].querySelector('.nsewdrag').getBoundingClientRect()"
    left, top, width = tab.value(f"(() => {{ const b = {box}; return [b.left, b.top + 30, b.width]; }})()")
    for x in (-9, 0):  # over the hostile note
        tab.move(left + width * 2_500 / 3_000 + x, top)
    wait(tab, "document.getElementById('where').textContent.includes('onerror')")
    assert count(tab, "img") == 0 and tab.value("document.title").startswith("b ")
    assert tab.problems == [] and tab.requests == []


@pytest.mark.quick
def test_curves_of_runs_are_drawn(tmp_path: Path, helpers: Any) -> None:
    """`scripts/plot_losses.py`, which drew the picture of docs/families.md."""
    run = unpack(tmp_path)
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/plot_losses.py", f"one={run}", f"another={run}"],
        env=helpers.environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (
        ElementTree.fromstring(done.stdout).findall("{*}path[@stroke-width='1.8']") and ">another</text>" in done.stdout
    )
