"""`fsdp-pretrain report`: what the page holds, against the record; and what a person sees of it, in Chromium."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Tab, browser, needs_chromium
from laboratory import Lab
from long_run import LongRun, write_long_run
from released import ARCHIVES, unpack
from sight import tree

from fsdp_pretrain.record.files import RunDir
from fsdp_pretrain.record.goodput import goodput
from fsdp_pretrain.record.metrics import read_metrics

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def page(path: Path) -> dict[str, Any]:
    """The data of a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def column(packed: dict[str, str]) -> Any:
    """A column of a page."""
    ((kind, text),) = packed.items()
    return np.frombuffer(base64.b64decode(text), dtype=f"<{kind}")


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


def test_extremes_survive_and_what_was_left_behind_is_there(made: LongRun, written: Path) -> None:
    (run,) = page(written)["runs"]
    truth = list(read_metrics(made.run))
    kept, steps = run["kept"], column(run["kept"]["clocks"]["step"])
    assert steps[-1] == 12_000 and (np.diff(steps) > 0).all() and 3_000 < len(steps) < 9_000
    for name, values in (
        ("loss", [record.loss.mean for record in truth]),
        ("grad_norm", [record.grad_norm for record in truth]),
        ("data", [record.seconds.data for record in truth]),
        ("loss/code", [record.sources["code"].mean for record in truth]),
    ):
        edges = np.concatenate([[0], steps.astype(int)])
        parts = [values[first:stop] for first, stop in pairwise(edges)]
        assert column(kept["most"][name]) == pytest.approx([max(part) for part in parts], rel=1e-6)
        assert column(kept["least"][name]) == pytest.approx([min(part) for part in parts], rel=1e-6)
    *rolled_back, unnoticed = made.spikes
    most = column(kept["most"]["loss"])
    assert most.max() == 9.0 and steps[most.argmax()] >= unnoticed > steps[most.argmax() - 1]
    left = [column((lane["most"] or lane["mean"])["loss"]).max() for lane in run["left"]]
    assert rolled_back and max(left) == 9.0
    assert column(kept["clocks"]["trained"])[-1] == truth[-1].tokens
    assert written.stat().st_size < 5e6


def test_account_checkpoints_evaluations_and_events_are_those_of_the_record(made: LongRun, written: Path) -> None:
    (run,) = page(written)["runs"]
    account = goodput(made.run)
    assert account is not None
    assert run["account"]["goodput"] == pytest.approx(account.goodput)
    for band in run["bands"]:  # over time, and over steps
        spent = {state: float(column(seconds).sum()) for state, seconds in band["seconds"].items()}
        assert spent == pytest.approx({s: t for s, t in account.states.items() if t}, rel=1e-3, abs=0.5)
    states = [save["state"] for save in run["saves"]]
    assert states[-1] == "verified" and set(states) == {"verified", "deleted"}
    (score,) = [each for each in run["evaluations"]["curves"] if each["task"] == "hellaswag"]
    assert score["better"] == "higher" and len(score["scores"]) == 50
    last = score["scores"][-1]
    assert (last["low"], last["high"]) == pytest.approx((0.686, 0.714)) and last["documents"] == 4096
    assert [verdict["ok"] for verdict in run["evaluations"]["verdicts"]].count(None) == 9
    kinds = [event["kind"] for event in run["events"]]
    assert kinds.count("rollback") == len(made.spikes) - 1 == kinds.count("note")
    assert kinds.count("interruption") == len([i for i in account.incidents if i.kind == "failure"])
    (hang,) = [event for event in run["events"] if event["text"].startswith("hang: ")]
    assert hang["severity"] == 2 and not hang["open"] and hang["until"]["written"] - hang["at"]["written"] == 20
    facts = {fact["name"]: fact["value"] for fact in run["summary"]["facts"]}
    assert facts["Step"] == "12,000" and facts["Verified checkpoint"] == "step 12,000" and facts["Open alarms"] == "0"


def test_it_writes_nothing_but_the_page_and_works_on_a_disk_that_is_read_only(
    tmp_path: Path, run_command: Any, small_disk: Any
) -> None:
    disk = small_disk("20m")
    run = unpack(ARCHIVES[-1], disk)
    before = tree(run)
    for options in (["--out", tmp_path / "one.html"], ["--out", tmp_path / "two.html"]):
        done = run_command("fsdp_pretrain.cli", "report", run, *options)
        assert done.returncode == 0, done.stderr
        assert tree(run) == before
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    refused = run_command("fsdp_pretrain.cli", "report", run)
    assert refused.returncode == 78 and "--out FILE" in refused.stderr
    one, two = page(tmp_path / "one.html"), page(tmp_path / "two.html")
    assert one["runs"][0]["kept"] == two["runs"][0]["kept"]
    (shown,) = one["runs"]
    records = list(read_metrics(RunDir(run)))
    assert column(shown["kept"]["mean"]["loss"]) == pytest.approx([r.loss.mean for r in records], rel=1e-6)
    assert column(shown["kept"]["clocks"]["step"]).tolist() == [record.step for record in records]
    assert [len(column(lane["clocks"]["step"])) for lane in shown["left"]] and shown["evaluations"]["curves"]


@pytest.mark.quick
def test_a_run_that_was_never_started_is_refused_with_a_remedy(tmp_path: Path, run_command: Any) -> None:
    (tmp_path / "run/segments/0001").mkdir(parents=True)
    done = run_command("fsdp_pretrain.cli", "report", tmp_path / "run")
    assert done.returncode == 78 and "never started" in done.stderr and "remedy: " in done.stderr
    assert not (tmp_path / "run/report.html").exists()


def test_damaged_lines_are_passed_over_and_counted(tmp_path: Path, run_command: Any) -> None:
    made = write_long_run(tmp_path / "run", steps=200, starts=2)
    shutil.rmtree(made.run.evals)
    metrics = made.run.segment(1) / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join([*lines[:50], b'{"step": 51, "loss"\n', b"\xff\xfe\n", *lines[52:], b'{"step": 1']))
    for damaged in (made.run.status, made.run.config):
        damaged.write_text("nonsense")
    with made.run.journal.open("ab") as file:
        file.write(b"torn")
    done = run_command("fsdp_pretrain.cli", "report", made.run.path)
    assert done.returncode == 0, done.stderr
    (run,) = page(made.run.path / "report.html")["runs"]
    assert any("damaged lines" in text and text.endswith(": 2") for _, text in run["summary"]["problems"])
    assert column(run["kept"]["clocks"]["step"])[-1] == 200
    (score,) = [each for each in run["evaluations"]["curves"] if each["task"] == "hellaswag"]  # as the journal has it
    last = score["scores"][-1]
    assert (last["low"], last["high"]) == pytest.approx((0.7 - 1.96 * 0.007, 0.7 + 1.96 * 0.007)) and not last["left"]


def test_a_run_without_a_step_yet_has_a_page(tmp_path: Path, run_command: Any) -> None:
    made = write_long_run(tmp_path / "run", steps=40, starts=2)
    for path in (*made.run.path.glob("segments/*/metrics.jsonl"), made.run.status):
        path.unlink()
    done = run_command("fsdp_pretrain.cli", "report", made.run.path)
    assert done.returncode == 0, done.stderr
    (run,) = page(made.run.path / "report.html")["runs"]
    assert len(column(run["kept"]["clocks"]["step"])) == 0 and run["events"] and run["bands"]


# --------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def compared(made: LongRun, tmp_path_factory: pytest.TempPathFactory, run_command: Any) -> Path:
    """A page of two runs, the second of which has a hostile name and note, and still runs."""
    path = tmp_path_factory.mktemp("compared")
    other = write_long_run(path / "run", steps=3_000, starts=5, seed=1, name=f"b {HOSTILE}")
    with other.run.journal.open("a") as file:
        entry = {"time": "2026-06-01T12:00:00.000Z", "kind": "note", "text": HOSTILE, "step": 2_500, "by": HOSTILE}
        file.write(json.dumps(entry) + "\n")
    done = run_command("fsdp_pretrain.cli", "report", made.run.path, other.run.path, "--out", path / "page.html")
    assert done.returncode == 0, done.stderr
    return path / "page.html"


CHARTS = "Report.charts.length"
RANGES = "Report.charts.map((chart) => [chart.scales.x.min, chart.scales.x.max])"


def click(tab: Tab, selector: str) -> None:
    tab.value(f"document.querySelector({json.dumps(selector)}).click()")


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(1600, False), (1600, True), (400, False), (400, True)])
def test_it_opens_without_a_complaint(tab: Tab, written: Path, width: int, dark: bool) -> None:
    tab.open(written, width=width, dark=dark)
    assert tab.value(CHARTS) == 16
    assert tab.value("getComputedStyle(document.body).backgroundColor") == (
        "rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)"
    )
    assert tab.value("document.documentElement.scrollWidth <= window.innerWidth"), "it scrolls sideways"
    widths = tab.value("Report.charts.map((chart) => [chart.width, chart.root.parentElement.clientWidth])")
    assert all(chart <= host for chart, host in widths)
    assert tab.problems == [] and tab.requests == []


@needs_chromium
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_run_that_has_just_begun_opens_too(tab: Tab, tmp_path: Path, run_command: Any, steps: int) -> None:
    made = write_long_run(tmp_path / "run", steps=20, starts=1)
    metrics = made.run.segment(1) / "metrics.jsonl"
    metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:steps]))
    done = run_command("fsdp_pretrain.cli", "report", made.run.path)
    assert done.returncode == 0, done.stderr
    tab.open(made.run.path / "report.html")
    for clock in ("elapsed", "trained"):
        click(tab, f"#clocks button[value={clock}]")
    assert tab.problems == [] and tab.value(CHARTS) > 0


@needs_chromium
def test_one_axis_is_shared_by_all_panels_on_every_clock(tab: Tab, made: LongRun, written: Path) -> None:
    tab.open(written)
    left, top, width, height = tab.value(
        "(() => { const box = Report.charts[1].over.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]; })()"
    )
    at = top + height / 2
    tab.drag((left + width * 0.25, at), (left + width * 0.5, at))
    (zoomed,) = {tuple(each) for each in tab.value(RANGES)}
    assert zoomed == pytest.approx((3_000, 6_000), abs=50)
    for clock in ("consumed", "trained", "elapsed", "written", "step"):
        click(tab, f"#clocks button[value={clock}]")
        assert len({tuple(each) for each in tab.value(RANGES)}) == 1
    (again,) = {tuple(each) for each in tab.value(RANGES)}
    assert again == pytest.approx(zoomed, abs=100)  # the same part of the run
    click(tab, "#zoom button:last-child")
    rolled_back = tab.value("Report.events.find((event) => event.kind === 'rollback').at.step")
    x = tab.value(f"Report.charts[1].valToPos({rolled_back}, 'x')")
    tab.move(left + x, at)
    tip = tab.value("document.getElementById('tip').textContent")
    assert "rollback" in tip and "loss spike" in tip and "left behind" in tip
    shown = tab.value("[...document.querySelectorAll('.panel .live b')].filter((value) => value.textContent).length")
    assert shown >= 10  # the cursor's values in every panel
    assert "tokens" in tab.value("document.getElementById('where').textContent")
    assert tab.problems == []


@pytest.mark.shows("B7")
@needs_chromium
def test_texts_of_the_record_stay_texts_and_runs_are_compared(tab: Tab, compared: Path) -> None:
    tab.open(compared)
    assert tab.value("document.title") == f"long, b {HOSTILE} - training report"
    assert tab.value("document.querySelectorAll('img').length") == 0
    rows = tab.value("[...document.querySelectorAll('#table td')].map((cell) => cell.textContent)")
    assert f"{HOSTILE} ({HOSTILE})" in rows and f"b {HOSTILE}: note" in rows
    loss = "[...document.querySelectorAll('.panel')].find((panel) => panel.getAttribute('aria-label') === 'Loss')"
    assert tab.value(f"{loss}.querySelectorAll('.key').length") == 4  # training and held-out, of each
    click(tab, "#clocks button[value=elapsed]")
    assert min(low for low, _ in tab.value(RANGES)) == 0  # both from their launch
    assert tab.value("document.querySelectorAll('.account').length") == 2
    assert tab.problems == [] and tab.requests == []


@needs_chromium
def test_it_prints_light_and_no_wider_than_paper(tab: Tab, written: Path, tmp_path: Path) -> None:
    tab.open(written, dark=True)
    pdf = tab.pdf()
    assert pdf.startswith(b"%PDF") and 3 < pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") < 40
    assert tab.value("document.documentElement.dataset.theme") == "dark"  # and afterwards it is as before
    assert tab.problems == []


@pytest.mark.slow
@needs_chromium
def test_a_hundred_thousand_steps_and_forty_starts_fit(tab: Tab, tmp_path: Path, run_command: Any) -> None:
    made = write_long_run(tmp_path / "run")
    done = run_command("fsdp_pretrain.cli", "report", made.run.path)
    out = made.run.path / "report.html"
    assert done.returncode == 0 and out.stat().st_size < 5e6 and made.starts == 40
    (run,) = page(out)["runs"]
    steps, most = column(run["kept"]["clocks"]["step"]), column(run["kept"]["most"]["loss"])
    assert (most == 9.0).sum() == 1 and steps[most.argmax()] >= made.spikes[-1] > steps[most.argmax() - 1]
    left = np.concatenate([column(lane["most"]["loss"]) for lane in run["left"]])
    assert (left == 9.0).sum() == len(made.spikes) - 1
    tab.open(out)
    assert tab.value(CHARTS) == 16 and tab.problems == []


@pytest.mark.slow
@needs_chromium
def test_a_trained_run_with_a_rollback_a_fork_and_evaluations_tells_its_story(
    lab: Lab, tab: Tab, tmp_path: Path, run_command: Any, helpers: Any
) -> None:
    evaluated = {"every": "10 steps", "launch": False, "tasks": ["heldout_bpb", "separator_probe"], "limit": 4}
    watched = {"enabled": True, "interval": "0.2 s"}
    config = lab.config(
        "run", eval={**evaluated, "heldout": str(lab.heldout), "loss_every": "5 steps"}, watchdog=watched
    )
    run, other = lab.path / "run", lab.path / "cooler"
    lab.train(config)
    for line in (
        ("eval.cli", "watch", run, "--once"),
        ("fsdp_pretrain.cli", "rollback", run, "--to", 10, "--set", "optimizer.lr=5e-3", "--reason", "too hot"),
        ("fsdp_pretrain.cli", "fork", run, "--at", 10, other, "--set", "optimizer.lr=1e-3"),
        ("fsdp_pretrain.cli", "note", run, "cooler from here"),
    ):
        done = run_command(*line)
        assert done.returncode == 0, done.stderr
    lab.train(config)
    lab.train(other / "config.toml")
    out = tmp_path / "page.html"
    done = run_command("fsdp_pretrain.cli", "report", run, other, "--out", out)
    assert done.returncode == 0, done.stderr
    for shown, path in zip(page(out)["runs"], (run, other), strict=True):
        records = helpers.metrics(path)
        assert column(shown["kept"]["clocks"]["step"]).tolist() == [record["step"] for record in records]
        means = [record["loss"]["sum"] / record["loss"]["count"] for record in records]
        assert column(shown["kept"]["mean"]["loss"]) == pytest.approx(means, rel=1e-6)
    first, second = page(out)["runs"]
    assert [column(lane["clocks"]["step"]).tolist() for lane in first["left"]] == [list(range(11, 21))]
    assert {"rollback", "note", "stop"} <= {event["kind"] for event in first["events"]}
    assert "fork" in {event["kind"] for event in second["events"]} and second["left"] == []
    bits = next(each for each in first["evaluations"]["curves"] if each["metric"] == "bits_per_byte")
    assert [(score["at"]["step"], score["left"]) for score in bits["scores"]] == [(10, False), (20, True)]
    assert [save["state"] for save in first["saves"]] == ["verified", "left", "verified"]
    tab.open(out)
    assert tab.problems == []
