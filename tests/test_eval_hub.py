"""Data of public tasks: from a Hub that answers, from the cache, or not at all."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
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
ROWS = [{"text": "the run", "choices": ["writes", "reads"], "answer": n % 2} for n in range(4)]
VARIABLES = "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_ENDPOINT", "https_proxy", "HTTPS_PROXY"


class Hub:
    """As much of the Hugging Face Hub as one dataset needs.

    Attributes:
        requests: paths that were asked for.
    """

    commit = "c" * 40

    def __init__(self) -> None:
        rows = "".join(json.dumps(row) + "\n" for row in ROWS)
        self.files = {"README.md": b"# questions\n", "test.jsonl": rows.encode()}
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.requests.append(self.path)
                status, headers, body = hub.answer(self.path.partition("?")[0])
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body if self.command == "GET" else b"")

            do_HEAD = do_GET  # noqa: N815

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        if path.startswith("/datasets/somebody/questions/resolve/"):
            name = path.rpartition("/")[2]
            if name not in self.files:
                return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": self.commit}, b""
            return 200, {"X-Repo-Commit": self.commit, "ETag": f'"{name}"'}, self.files[name]
        if path.startswith("/api/datasets/somebody/questions/tree/"):
            rows = [{"type": "file", "path": name, "size": len(self.files[name]), "oid": name} for name in self.files]
            return 200, {}, json.dumps(rows).encode()
        if path.startswith("/api/datasets/somebody/questions"):
            facts = {"id": "somebody/questions", "sha": self.commit, "siblings": [{"rfilename": n} for n in self.files]}
            return 200, {}, json.dumps(facts).encode()
        return 404, {}, b""

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def public() -> Iterator[Hub]:
    found = Hub()
    yield found
    found.close()


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
    done = run_command("eval.cli", "watch", run, "--once", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert done.returncode == 78 and "Traceback" not in done.stderr
    assert "lm-eval cannot load public: " in done.stderr and "somebody/questions" in done.stderr
    assert "nothing is downloaded: HF_HUB_OFFLINE=1" in done.stderr and "HF_HOME" in done.stderr
    assert len(done.stderr.splitlines()) < 6
    (entry,) = helpers.journal(run, "eval-refused")
    assert "somebody/questions" in entry["text"]
    assert not helpers.journal(run, "eval-failed") and not list(run.glob("evals/**/*.json"))


def test_a_task_that_fails_names_its_line(run: Path, tmp_path: Path, run_command: Run) -> None:
    (tmp_path / "broken.yaml").write_text(
        TASK.replace("task: public", "task: broken\ncustom_dataset: !function b.load")
    )
    (tmp_path / "b.py").write_text("def load(**_):\n    return {}['test']\n")
    done = run_command("eval.cli", "run", run, "--include", tmp_path, "--tasks", "broken", "eval.offline=true")
    assert done.returncode == 78 and "Traceback" not in done.stderr
    assert f"cannot load broken: KeyError: 'test' ({tmp_path}/b.py, line 2)" in done.stderr
    assert "nothing is downloaded: eval.offline" in done.stderr


@pytest.mark.slow
def test_public_data_is_downloaded_once_and_then_in_the_cache(
    run: Path, public: Hub, tmp_path: Path, helpers: Any, module_lab: Any
) -> None:
    """Commands as a user starts them: the libraries read at their import whether they may use the network."""

    def evaluate(*more: str) -> subprocess.CompletedProcess[str]:
        environment = helpers.environment(HF_HOME=str(tmp_path), HF_ENDPOINT=public.url, HF_HUB_OFFLINE="0")
        line = [sys.executable, "-m", "eval.cli", "run", run, "--include", run.parent / "tasks", "--json", *more]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, cwd="/")
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
        return done

    first = evaluate()
    assert any(path.endswith("test.jsonl") for path in public.requests)
    scores = json.loads(first.stdout)["scores"]
    assert json.loads(first.stdout)["documents"] == {"public": 4}
    public.requests.clear()
    assert json.loads(evaluate("eval.offline=true").stdout)["scores"] == scores and not public.requests
    evaluate("--tasks", "separator_probe", "--heldout", str(module_lab.heldout))
    assert not public.requests  # nobody needs it
    public.close()
    done = evaluate()
    assert json.loads(done.stdout)["scores"] == scores
    assert f"{public.url} does not answer: the data of tasks is taken from the cache" in done.stderr


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
        (False, {}, "eval.offline"),
        (True, {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE=1"),
        (True, {"HF_DATASETS_OFFLINE": "yes"}, "HF_DATASETS_OFFLINE=yes"),
    ],
)
def test_the_hub_is_used_if_nobody_forbids_it(
    public: Hub, free: pytest.MonkeyPatch, wanted: bool, variables: dict[str, str], reason: str
) -> None:
    """An answer that is an error is an answer."""
    for name, value in {"HF_ENDPOINT": public.url, **variables}.items():
        free.setenv(name, value)
    assert hub.choose_network(wanted=wanted) == reason
    assert bool(public.requests) == (not reason)
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
