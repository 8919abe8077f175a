"""Data of public tasks: from a Hub that answers, from the cache, or not at all."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from processes import Run

pytest.importorskip("lm_eval")
from eval import hub

TASK = """
task: public
dataset_path: somebody/questions
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
metadata: {version: 1.0}
"""
VARIABLES = "HF_HUB_OFFLINE", "HF_ENDPOINT", "https_proxy", "HTTPS_PROXY"


class Answers(BaseHTTPRequestHandler):
    """Answers everything with an error, which is an answer."""

    def do_HEAD(self) -> None:
        self.send_error(404)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def public() -> Iterator[str]:
    """URL of a server that answers."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def run(module_lab: Any) -> Path:
    """A checkpoint at step 5, due for evaluation on the task `public`."""
    folder = module_lab.path / "tasks"
    folder.mkdir()
    (folder / "public.yaml").write_text(TASK)
    scheduled = {"every": "5 steps", "launch": False, "tasks": ["public"], "include": [str(folder)]}
    module_lab.train(module_lab.config(train={"duration": "5 steps"}, eval=scheduled))
    path: Path = module_lab.path / "run"
    return path


def test_a_task_whose_data_cannot_be_had_is_refused_and_uses_up_no_attempt(
    run: Path, tmp_path: Path, helpers: Any, run_command: Run
) -> None:
    """Where the Hub refuses connections: nothing waits for it."""
    hub = "http://127.0.0.1:9"
    done = run_command("eval.cli", "watch", run, "--once", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="", HF_ENDPOINT=hub)
    assert done.returncode == 78 and "Traceback" not in done.stderr
    assert "lm-eval cannot load public: " in done.stderr and "somebody/questions" in done.stderr
    assert f"nothing is downloaded: {hub} does not answer" in done.stderr and "HF_HOME" in done.stderr
    assert len(done.stderr.splitlines()) < 6
    (entry,) = helpers.journal(run, "eval-refused")
    assert "somebody/questions" in entry["text"]
    assert not helpers.journal(run, "eval-failed") and not list(run.glob("evals/**/*.json"))


def test_a_task_that_fails_names_its_line(run: Path, tmp_path: Path, run_command: Run) -> None:
    (tmp_path / "broken.yaml").write_text(
        TASK.replace("task: public", "task: broken\ncustom_dataset: !function b.load")
    )
    (tmp_path / "b.py").write_text("def load(**_):\n    return {}['test']\n")
    done = run_command("eval.cli", "run", run, "--include", tmp_path, "--tasks", "broken", HF_HUB_OFFLINE="1")
    assert done.returncode == 78 and "Traceback" not in done.stderr
    assert f"cannot load broken: KeyError: 'test' ({tmp_path}/b.py, line 2)" in done.stderr
    assert "nothing is downloaded: HF_HUB_OFFLINE=1" in done.stderr


# ---------------------------------------------------------------- whether to use the network


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that says nothing of the Hub."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what the function sets is undone
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.quick
@pytest.mark.parametrize(
    ("wanted", "variables", "reason"),
    [
        (True, {}, ""),
        (True, {"HF_HUB_OFFLINE": "0"}, ""),
        (False, {}, "no task needs it"),
        (True, {"HF_HUB_OFFLINE": "yes"}, "HF_HUB_OFFLINE=yes"),
    ],
)
def test_the_hub_is_used_if_nobody_forbids_it(
    public: str, free: pytest.MonkeyPatch, wanted: bool, variables: dict[str, str], reason: str
) -> None:
    for name, value in {"HF_ENDPOINT": public, **variables}.items():
        free.setenv(name, value)
    assert hub.choose_network(wanted=wanted) == reason
    assert (os.environ.get("HF_HUB_OFFLINE") == "1") == bool(reason)


@pytest.mark.quick
@pytest.mark.parametrize("through", ["HF_ENDPOINT", "https_proxy"])
@pytest.mark.parametrize("listens", [True, False])
def test_a_hub_that_does_not_answer_is_left_alone(
    free: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], through: str, listens: bool
) -> None:
    """A host or a proxy that refuses connections, or takes them and never says anything."""
    free.setattr(hub, "_SECONDS", 0.3)
    free.setenv("no_proxy", "")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:
            silent.listen()
        free.setenv(through, f"http://127.0.0.1:{silent.getsockname()[1]}")
        reason = hub.choose_network(wanted=True)
    assert reason.endswith("does not answer") and os.environ["HF_HUB_OFFLINE"] == "1"
    assert "taken from the cache" in capfd.readouterr().err
