"""The documentation is true: its commands run, its files exist, its tables match the code."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import COMMANDS, ROOT, Run

from fsdp_pretrain.data.validate.findings import CATALOGUE
from fsdp_pretrain.errors import Exit
from fsdp_pretrain.severity import Severity
from fsdp_pretrain.watchdog.notify.alarms import Alarms

PAGES = [
    f"docs/{name}.md"
    for name in "data training storage launch evaluation plan trackers huggingface report models".split()
]


def blocks(page: str) -> list[str]:
    """The blocks of a page that are marked to run."""
    return re.findall(r"^```bash run\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


class Reader:
    """Runs the commands of page after page in one directory, as console scripts in a shell.

    A verb that was run before is forked: to import lm-eval again would show nothing new.
    """

    def __init__(self, path: Path, environment: dict[str, str], run_command: Run) -> None:
        self.path, self.environment, self._run_command, self._read = path, environment, run_command, 0
        self._known: set[tuple[str, ...]] = set()

    def read_up_to(self, page: str) -> None:
        """Run the pages up to this one that were not run yet."""
        for name in PAGES[self._read : PAGES.index(page) + 1]:
            self._read += 1
            for block in blocks(name):
                lines = block.replace("\\\n", " ").splitlines()
                if re.search(r"[|<>;&$]", block) or not all(line.startswith(tuple(COMMANDS)) for line in lines):
                    self._in_shell(name, block)
                    continue
                for line in lines:
                    command, *arguments = shlex.split(line, comments=True)
                    verb = (command, arguments[0], *(arguments[2:3] if arguments[0] == "checkpoints" else ()))
                    if verb in self._known:
                        self._run_command(COMMANDS[command], *arguments, cwd=self.path, expect=0)
                    else:
                        self._in_shell(name, line)
                    self._known.add(verb)

    def _in_shell(self, page: str, text: str) -> None:
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.path, env=self.environment, capture_output=True, text=True,
        )  # fmt: skip
        assert ran.returncode == 0, f"{page}:\n{text}\n{ran.stdout}\n{ran.stderr}"


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """No link and no place in a page is missing, and no block is torn apart."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"README"}
    assert {page.parent.name for page in tmp_path.glob("*/index.html")} == pages
    assert "```" not in "".join(page.read_text() for page in tmp_path.glob("*/index.html"))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory, helpers: Any, run_command: Run) -> Reader:
    path = tmp_path_factory.mktemp("reader")
    (path / "configs").symlink_to(ROOT / "configs")
    binaries = Path(sys.executable).parent
    if not (binaries / "fsdp-data").exists():
        pytest.skip("the project is not installed here; scripts/test.sh installs it")
    return Reader(path, helpers.environment(PATH=f"{binaries}{os.pathsep}{os.environ['PATH']}"), run_command)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("page", "made"),
    [
        ("docs/data.md", "runs/demo/corpus/manifest.json"),
        ("docs/training.md", "runs/demo/run/checkpoints/step-00000008/manifest.json"),
        ("docs/storage.md", "runs/demo/storage-run/checkpoints/step-00000008/manifest.json"),
        ("docs/launch.md", "runs/demo/run/status.json"),
        ("docs/evaluation.md", "runs/demo/run/evals/step-00000008"),
        ("docs/trackers.md", "runs/demo/run/tensorboard/kept"),
        ("docs/huggingface.md", "runs/demo/hf/config.json"),
        ("docs/report.md", "runs/demo/run/report.html"),
        ("docs/models.md", "runs/demo/annealed/overrides.toml"),
    ],
)
@pytest.mark.promise("documented")
def test_commands_of_the_documentation_run(reader: Reader, page: str, made: str) -> None:
    """As a user would: real console scripts and a real torchrun, page after page."""
    assert blocks(page)
    reader.read_up_to(page)
    assert (reader.path / made).exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_python_of_the_documentation_runs(reader: Reader) -> None:
    """As the cells of a notebook, one after the other, beside the run of docs/training.md."""
    reader.read_up_to("docs/training.md")
    cells = re.findall(r"^```python run\n(.*?)^```", (ROOT / "docs/python.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(cells) == 5
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(cells)],
        cwd=reader.path, env=reader.environment, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    step, loss, *_ = ran.stdout.split()
    assert int(step) >= 8 and 0 < float(loss) < 10


# ---------------------------------------------------------------- examples in --help

MAINS = {
    "fsdp_pretrain.bench": "fsdp_pretrain.bench.main",
    "fsdp_pretrain.cli": "fsdp_pretrain.cli.main",
    "fsdp_pretrain.train": "fsdp_pretrain.job.main",
}
"""Where the function of a command is, if not in its module."""
CODES = {
    "fsdp-pretrain status": 1,  # the open alarm
    "fsdp-pretrain alarms": 1,
    "fsdp-pretrain watch": 1,
    "fsdp-pretrain control": 78,  # no job is running
    "fsdp-pretrain profile": 78,
}
"""Exit codes other than 0, by how an example begins."""
NOT_RUN = {"--nnodes 16": "needs 16 nodes", "--tasks hellaswag": "needs the documents of that task"}
LONG = (
    *("fsdp-pretrain launch", "fsdp-pretrain doctor", "torchrun"),  # start several ranks
    *("fsdp-data quickstart-corpus", "fsdp-pretrain track"),
    *(f"python -m fsdp_pretrain.bench configs/bench/llama-tiny.toml --{way}" for way in ("peers", "sweep", "saves")),
)
QUICKSTART = """
include = ["{root}/configs/runs/quickstart.toml"]
model = {{ layers = 1, hidden = 32, heads = 2, kv_heads = 1, ffn = 64, vocab = 512, declared_params = 42_080 }}
data = {{ sequence_length = 16, lanes = 8 }}
train = {{ global_batch = "8 samples", micro_batch = 1 }}
eval = {{ limit = 2, launch = false, loss_every = "150 steps", loss_samples = 8 }}
record = {{ aim = false, statistics_every = "0 steps" }}
watchdog = {{ enabled = false, notify = {{ command = ["true"] }} }}
"""
TINIER = """
include = ["{root}/configs/bench/llama-tiny.toml"]
model = {{ layers = 1, hidden = 32, heads = 2, ffn = 64, vocab = 512 }}
data = {{ sequence_length = 32 }}
train = {{ global_batch = "2 samples", micro_batch = 2 }}
"""


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory, shared_corpus: Path, run_command: Any) -> Path:
    """A checkout after `scripts/quickstart.sh`, with a smaller corpus and model, and an open alarm."""
    path = tmp_path_factory.mktemp("quickstart")
    shutil.copytree(ROOT / "configs", path / "configs")
    (path / "configs/runs/quickstart.toml").write_text(QUICKSTART.format(root=ROOT))
    (path / "configs/bench/llama-tiny.toml").write_text(TINIER.format(root=ROOT))
    made = path / "runs/quickstart"
    shutil.copytree(shared_corpus / "tokenizer", made / "tokenizer")
    (made / "text").mkdir()
    for name in ("train.jsonl", "heldout.jsonl"):
        shutil.copyfile(shared_corpus / name, made / "text" / name)
    tokens = ["--tokenizer", "runs/quickstart/tokenizer"]
    for module, *arguments in (
        [
            "fsdp_pretrain.data.cli",
            "prepare",
            "runs/quickstart/text/train.jsonl",
            *tokens,
            "--out",
            "runs/quickstart/corpus",
        ],
        [
            "fsdp_pretrain.data.cli",
            "prepare",
            "runs/quickstart/text/heldout.jsonl",
            *tokens,
            "--out",
            "runs/quickstart/heldout",
        ],
        ["fsdp_pretrain.train", "configs/runs/quickstart.toml", "parallel.shard=1", "train.micro_batch=8"],
    ):
        run_command(module, *arguments, cwd=path, expect=0)
    alarms = Alarms(made / "run/watchdog/alarms.jsonl", on_change=lambda *_: None)
    alarms.open("disk/run", Severity.WARN, "two checkpoints fit")
    alarms.close()
    return path


def help_of(module: str, words: tuple[str, ...]) -> str:
    """What a command prints for `--help`."""
    main = importlib.import_module(MAINS.get(module, module)).main
    shown = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(shown), pytest.raises(SystemExit) as end:
        patch.setattr(sys, "argv", [module, *words, "--help"])
        main()
    assert end.value.code in (0, None)
    return shown.getvalue()


@pytest.fixture(scope="module")
def examples() -> list[str]:
    """All examples in `--help`, in the order of reading."""
    found: list[str] = []

    def read(module: str, *words: str) -> list[str]:
        """Collect the examples of one help text; the verbs it lists."""
        verbs, _, rest = help_of(module, words).replace("\\\n", " ").partition("\nexample:\n")
        lines = [line.strip() for line in rest.splitlines() if line.strip()]
        assert lines or not words, (module, words)
        assert all(f" {words[0]} " in f"{line} " for line in lines if words), lines
        found.extend(lines)
        return re.findall(r"^    (\S+)(?:  |$)" if words else r"^  ([a-z][a-z-]*)  ", verbs, re.MULTILINE)

    for _, module in sorted(COMMANDS.items()):  # `fsdp-pretrain` last: it goes back
        for verb in read(module):
            for action in read(module, verb):
                read(module, verb, "RUN", action)
    for module in ("fsdp_pretrain.train", "fsdp_pretrain.bench"):
        read(module)
    return [text for text in found if not any(part in text for part in NOT_RUN)]


@pytest.mark.promise("documented")
def test_examples_of_help_run(quickstart: Path, examples: list[str], run_command: Any) -> None:
    """One after the other in one directory, as a reader would try them."""
    short = [text for text in examples if not text.startswith(LONG)]
    wrong = []
    for text in short:
        command, *arguments = shlex.split(text.removeprefix("python -m "))
        done = run_command(COMMANDS.get(command, command), *arguments, cwd=quickstart)
        if done.returncode != next((code for begin, code in CODES.items() if text.startswith(begin)), 0):
            wrong.append(f"{text}\nexit {done.returncode}\n{done.stderr}")
    assert not wrong, "\n".join(wrong)
    assert {text.partition(" ")[0] for text in short} == {*COMMANDS, "python"}


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_long_examples_of_help_run(quickstart: Path, examples: list[str], helpers: Any) -> None:
    long = [text for text in examples if text.startswith(LONG)]
    environment = helpers.environment(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for text in (re.sub(r"--rounds \d+", "--rounds 1", each) for each in long):
        ran = subprocess.run(["bash", "-c", text], cwd=quickstart, env=environment, capture_output=True, text=True)
        slowed = ran.returncode == 1 and "slower than the median" in ran.stdout  # the doctor of a busy machine is right
        assert ran.returncode == 0 or slowed, f"{text}\n{ran.stdout}\n{ran.stderr}"
    assert all(any(text.startswith(begin) for text in long) for begin in LONG)


@pytest.mark.quick
def test_files_named_in_the_documentation_exist() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = re.sub(r"https?://\S+", "", page.read_text())
        for name in re.findall(r"(?:scripts|configs|docs)/[\w./-]+\.(?:sh|sbatch|toml|md)", text):
            if "my-run" not in name:
                assert (ROOT / name).exists(), f"{page} names {name}"
        for target in re.findall(r"\]\(([\w./-]+\.md)\)", text):
            assert (page.parent / target).exists(), f"{page} links to {target}"


@pytest.mark.quick
def test_tables_match_the_code() -> None:
    data, training = (ROOT / "docs/data.md").read_text(), (ROOT / "docs/training.md").read_text()
    for code in CATALOGUE:
        assert f"`{code}`" in data or f"`-{code.partition('-')[2]}`" in data, code
    for code in (Exit.COMPLETE, Exit.RESUME, Exit.REFUSED, Exit.NEEDS_PERSON, Exit.UNEXPECTED):
        assert f"| {int(code)} |" in training


@pytest.mark.quick
def test_scripts_are_sound_shell() -> None:
    for path in [*(ROOT / "scripts").glob("*.sh"), *(ROOT / "scripts").glob("slurm/*"), ROOT / ".ci/run"]:
        subprocess.run(["bash", "-n", path], check=True)
        assert path.name == "environment.sh" or os.access(path, os.X_OK), f"{path} is not executable"
