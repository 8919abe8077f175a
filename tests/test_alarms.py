"""Alarms as people and Prometheus see them: commands, requests to the watchdog, metrics, alert rules."""

from __future__ import annotations

import ast
import json
import math
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from processes import ROOT
from prometheus_client.parser import text_string_to_metric_families
from records import step_record
from sight import until

from fsdp_pretrain.config.notify import NotifySection
from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.step_record import HealthFinding
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.watchdog.detectors.health import HealthDetector, is_written_by_trainer
from fsdp_pretrain.watchdog.detectors.nodes import NodeDetector
from fsdp_pretrain.watchdog.hang import peers
from fsdp_pretrain.watchdog.hang.peers import NodeFinding, NodeReport, PeerNodes
from fsdp_pretrain.watchdog.notify.alarms import Alarms, read_alarms
from fsdp_pretrain.watchdog.notify.metrics import METRICS, Exporter, Snapshot

pytestmark = pytest.mark.quick
INFO, WARN, CRIT = Severity
NAMES = {metric.name for metric in METRICS.values()}
Verb = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run/segments").mkdir(parents=True)
    return tmp_path / "run"


@pytest.fixture
def alarms(run: Path) -> Alarms:
    return Alarms(run / "watchdog/alarms.jsonl", on_change=lambda _: None)


@pytest.fixture
def verb(run_command: Any, run: Path) -> Verb:
    return lambda name, *more, **extra: run_command("fsdp_pretrain.cli", name, run, *more, **extra)


def test_listing(run: Path, alarms: Alarms, verb: Verb) -> None:
    quiet = verb("alarms")
    assert (quiet.returncode, quiet.stdout) == (0, "no open alarm\n")
    alarms.open("pace", WARN, "5% slower", step=1200, remedy="look at the switch")
    assert verb("alarms").returncode == 1
    alarms.open("hang", CRIT, "no progress")
    alarms.open("disk/run", WARN, "two fit")
    alarms.resolve("disk/run", "ten fit")
    shown = verb("alarms")
    assert shown.returncode == 2 and re.match(r"CRIT open +hang ", shown.stdout)
    assert "step 1_200" in shown.stdout and "to do: look at the switch" in shown.stdout and "disk" not in shown.stdout
    everything = [json.loads(line) for line in verb("alarms", "--all", "--json").stdout.splitlines()]
    assert [(row["key"], row["state"]) for row in everything] == [
        ("hang", "open"), ("pace", "open"), ("disk/run", "resolved"),
    ]  # fmt: skip


def test_alarms_that_cannot_be_read_are_not_none(run: Path, verb: Verb) -> None:
    (run / "watchdog/alarms.jsonl").mkdir(parents=True)
    listed, status = verb("alarms"), verb("status")
    assert listed.returncode == 78 and "alarms.jsonl" in listed.stderr and "no open alarm" not in listed.stdout
    assert status.returncode == 2 and "which alarms are open is not known" in status.stdout


def keys_in_code() -> tuple[set[str], set[str]]:
    """Beginnings of all texts in the code of the watchdog and of health; those that are the key of an alarm."""
    texts, keys = set[str](), set[str]()

    def text(node: ast.expr) -> str:
        """A literal, or what an f-string begins with."""
        begin = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
        return begin.value if isinstance(begin, ast.Constant) and isinstance(begin.value, str) else ""

    for package in ("watchdog", "health"):
        for path in (ROOT / "fsdp_pretrain" / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.expr):
                    texts.add(text(node))
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
                    ("alarms.open", "self.open", "Incident")
                ):
                    keys |= {text(argument) for argument in node.args[:1]}
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("key"):
                    keys.add(text(node.value))
    return texts, keys - {""}


def test_alarms_are_those_of_the_documentation() -> None:
    texts, keys = keys_in_code()
    pages = {name: (ROOT / f"docs/{name}.md").read_text() for name in ("watchdog", "health", "alarms", "evaluation")}
    undocumented = {key for key in keys if not any(f"`{key}" in page for page in pages.values())}
    assert len(keys) > 35 and not undocumented
    rows = re.findall(r"^\| (`[a-z][^|]*) \| (?:INFO|WARN|CRIT|see)", pages["watchdog"], re.MULTILINE)
    documented = {key for row in rows for key in re.findall(r"`([a-z-]+(?:/[a-z]*)?)", row)}
    gone = {key for key in documented if not texts & {key, f"{key}-", f"{key.partition('/')[0]}/"}}
    assert len(documented) > 35 and not gone


def test_a_problem_of_another_node_is_its_own_alarm(tmp_path: Path) -> None:
    """This node, where the same is in order, does not resolve it."""
    alarms = Alarms(tmp_path / "alarms.jsonl", on_change=lambda _: None)
    here, there = PeerNodes(tmp_path, 0, 2, "x"), PeerNodes(tmp_path, 1, 2, "x")
    found = {"disk/tmp": "/tmp is full", "memory/n7": "n7: used up soon"}
    findings = {key: NodeFinding(severity=CRIT, summary=text) for key, text in found.items()}
    detector = NodeDetector(alarms, here)
    for beat in range(3):
        there.write(
            NodeReport(time=str(beat), attempt="x", host="n7", segment=1, findings=findings if beat < 2 else {})
        )
        here.read(all_=True, at_once=True)
        detector.tick(0.0)
        alarms.resolve("disk/tmp", "90 GiB free")
        told = {alarm.key: (alarm.count, alarm.summary) for alarm in alarms}
        expected = {"disk/tmp/n7": (1, "n7: /tmp is full"), "memory/n7": (1, "n7: used up soon")}
        assert told == (expected if beat < 2 else {})


@pytest.mark.parametrize("takes_part", [True, False])
def test_a_restarted_leader_ends_what_other_nodes_no_longer_report(tmp_path: Path, takes_part: bool) -> None:
    """Also if the node has left the job; only what nodes reported, and not before all may have reported."""

    def restarted(attempt: str, nodes: int) -> tuple[Alarms, PeerNodes, NodeDetector]:
        alarms, here = Alarms(tmp_path / "alarms.jsonl", lambda _: None), PeerNodes(tmp_path, 0, nodes, attempt)
        return alarms, here, NodeDetector(alarms, here)

    def report(findings: dict[str, NodeFinding], segment: int = 1) -> None:
        there = PeerNodes(tmp_path, 1, 2, "x")
        there.write(NodeReport(time=str(len(findings)), attempt="x", host="n7", segment=segment, findings=findings))

    full = NodeFinding(severity=CRIT, summary="/tmp is full", facts={"free": 0})
    alarms, here, detector = restarted("x", 2)
    alarms.open("disk/tmp", CRIT, "/tmp is full here too", facts={"free": 0})
    report({"disk/tmp": full, "memory/n7": NodeFinding(severity=WARN, summary="n7: used up soon")})
    here.read(all_=True, at_once=True)
    detector.tick(0.0)
    mine, theirs = ["disk/tmp"], ["disk/tmp/n7", "memory/n7"]
    assert alarms.open_keys() == [*mine, *theirs]

    alarms, here, detector = restarted("x" if takes_part else "y", 2 if takes_part else 1)
    if takes_part:
        detector.tick(0.0)
        report({}, segment=0)  # a start of which it knows nothing yet
        here.read(all_=True, at_once=True)
        detector.tick(0.0)
        assert alarms.open_keys() == [*mine, *theirs]
        report({"disk/tmp": full})
        here.read(all_=True, at_once=True)
        detector.tick(0.0)
        assert alarms.open_keys() == [*mine, "disk/tmp/n7"]
        report({})
        here.read(all_=True, at_once=True)
    detector.tick(0.0)
    assert alarms.open_keys() == mine


def test_a_node_that_may_not_report_yet_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the segment is known; later its alarm, by its number, ends with its first report."""
    clock = [0.0]
    monkeypatch.setattr(peers, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    alarms = Alarms(tmp_path / "alarms.jsonl", on_change=lambda _: None)
    here, there = PeerNodes(tmp_path, 0, 2, "x"), PeerNodes(tmp_path, 1, 2, "x")
    detector = NodeDetector(alarms, here)
    clock[0] = 100.0
    here.begin()
    detector.tick(0.0)
    assert alarms.open_keys() == []
    clock[0] = 200.0
    detector.tick(0.0)
    assert alarms.open_keys() == ["node/node-1"]
    there.write(NodeReport(time="1", attempt="x", host="n7", segment=1))
    here.read(all_=True, at_once=True)
    detector.tick(0.0)
    assert alarms.open_keys() == []


def test_acknowledging(run: Path, alarms: Alarms, verb: Verb) -> None:
    """Only the watchdog writes; it answers requests in its passes, also those from before it was started."""
    alarms.open("hang", CRIT, "no progress", step=7)
    wrong = verb("ack", "hnag")
    assert wrong.returncode == 78 and "these are: hang" in wrong.stderr
    assert verb("alarms", "ack").returncode == verb("alarms", "test", "hang").returncode == 78
    assert verb("alarms", "ack", "hang", USER="ada").returncode == 0
    assert [alarm.state for alarm in read_alarms(run / "watchdog/alarms.jsonl")] == ["open"]
    again = Alarms(run / "watchdog/alarms.jsonl", on_change=lambda _: None)
    again.serve(RunDir(run))
    (known,) = read_alarms(run / "watchdog/alarms.jsonl")
    assert known.state == "acknowledged" and known.facts == {"acknowledged_by": "ada"}
    assert verb("ack", "hang").returncode == 78


def test_findings_of_the_trainer_become_alarms(run: Path) -> None:
    """Their lines in the journal are the trainer's; the first record of a start repeats those that go on."""
    told: list[tuple[str, str, bool]] = []
    alarms = Alarms(
        run / "a.jsonl", lambda alarm: told.append((alarm.key, alarm.state, is_written_by_trainer(alarm, health.last)))
    )
    health = HealthDetector(alarms)
    collapse, spike = (HealthFinding(key=key, severity=WARN, summary="up") for key in ("scale/collapse", "loss/spike"))
    for findings in ([collapse, spike], [], [collapse.model_copy(update={"resolved": True})]):
        health.step(step_record(7, health=findings))
    assert told == [
        ("scale/collapse", "open", True), ("loss/spike", "open", True), ("scale/collapse", "resolved", True),
    ]  # fmt: skip
    health = HealthDetector(alarms)
    health.step(step_record(8))
    assert told[3:] == [("loss/spike", "resolved", False)]


def full() -> Snapshot:
    """A snapshot with every value known."""
    known = {"step_seconds": 0.4, "disk_full_in": math.inf, "loss": math.nan, "heartbeat_ages": {0: 0.1, 1: 0.2}}
    return {**dict.fromkeys(METRICS, 7), **known, "run": 'a "run"', "open": {"INFO": 0, "WARN": 2, "CRIT": 0}}


def get(port: int | None, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_metrics_by_http() -> None:
    shown = Exporter("127.0.0.1:0")
    assert get(shown.port, "/metrics") == (200, "")
    shown.update(full())
    code, text = get(shown.port, "/metrics")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = {(each.name, *each.labels.items()): each.value for family in families.values() for each in family.samples}
    run = ("run", 'a "run"')
    assert code == 200 and samples["train_step_seconds", run] == 0.4
    assert samples["incidents_open", run, ("severity", "WARN")] == 2
    assert samples["incidents_open", run, ("severity", "CRIT")] == 0
    assert samples["rank_heartbeat_age_seconds", ("rank", "1"), run] == 0.2
    assert samples["disk_seconds_to_full", run] == math.inf
    assert {name for name, *_ in samples} == NAMES
    kinds = {line.split()[2]: line.split()[3] for line in text.splitlines() if line.startswith("# TYPE")}
    assert {name for name, kind in kinds.items() if kind == "counter"} == {n for n in NAMES if n.endswith("_total")}
    shown.update({"run": "blind"})
    age = re.compile(r"^watchdog_pass_age_seconds.* (\S+)$", re.MULTILINE)
    until(lambda: float(age.findall(get(shown.port, "/metrics")[1])[0]) > 0.1)  # it grows while no pass is made
    assert "train_step{" not in get(shown.port, "/metrics")[1]  # unknown is not zero
    second = Exporter(f"127.0.0.1:{shown.port}")  # a port that is taken is told, and harms nothing
    second.update(full())
    assert "Address already in use" in second.problem and second.port is None
    shown.close()
    with pytest.raises(urllib.error.URLError):
        get(shown.port, "/metrics")


def test_metrics_in_a_file(tmp_path: Path) -> None:
    """For node_exporter; a folder that is missing is told, and harms nothing."""
    path = tmp_path / "node/run.prom"
    shown = Exporter(str(path))
    shown.update(full())
    assert "No such file" in shown.problem
    path.parent.mkdir()
    shown.update(full())
    assert shown.problem == "" and {f.name for f in text_string_to_metric_families(path.read_text())} >= {"train_step"}
    assert "watchdog_pass_age_seconds" not in path.read_text()
    assert NotifySection(metrics=str(path)).metrics == str(path)
    shown.close()
    assert not path.exists()  # its values would be those of a run that stands


def test_alert_rules_name_metrics_that_exist() -> None:
    rules = ROOT / "configs/alerts/prometheus-rules.yml"
    groups = yaml.safe_load(rules.read_text())["groups"]
    names = set()
    for rule in (rule for group in groups for rule in group["rules"]):
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert "{{ $labels.run }}" in rule["annotations"]["summary"]
        words = re.sub(r"\{[^}]*\}|\[[^]]*\]", "", rule["expr"])
        names |= set(re.findall(r"[a-z][a-z_]*_[a-z_]+|\bloss\b", words))
    assert names and names <= NAMES
    if promtool := shutil.which("promtool"):
        subprocess.run([promtool, "check", "rules", str(rules)], check=True, capture_output=True)


def test_documentation_names_every_metric() -> None:
    page = (ROOT / "docs/alarms.md").read_text()
    assert not [name for name in NAMES if f"`{name}" not in page]
