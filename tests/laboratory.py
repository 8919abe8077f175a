"""Small real corpora, run configurations and training jobs, and what tests read from a run."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tomli_w
from processes import Job, Zygotes, as_rank, free_port

WORDS = (
    *"the run writes every checkpoint before it reads a shard and the loss falls while the mesh of ranks sums".split(),
    *"its gradients over replicas def return import class self None True data = ( ) [ ] : . , 0 1 2 3 state".split(),
    "\n",
    "   ",
    "",
)


def make_text(seed: int, words: int) -> str:
    """Reproducible text with white space, code and a little non-ASCII."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(words)) + rng.choice(["\n", "", " é", " 文\n"])


def write_jsonl(path: Path, texts: list[str]) -> Path:
    """One `{"text": ...}` per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def write_tokens(path: Path, documents: list[list[int]], tokenizer: Any, dtype: str = "<u2", shards: int = 2) -> Path:
    """A corpus of the given token lists, unchanged, dealt over its shards in turn."""
    import numpy as np

    from fsdp_pretrain.data.corpus.shards import ShardWriter
    from fsdp_pretrain.data.corpus.writing import write_corpus

    (path / "shards").mkdir(parents=True)
    entries = []
    for number in range(shards):
        with ShardWriter(path / "shards" / f"s{number}", np.dtype(dtype)) as writer:
            for document in documents[number::shards]:
                writer.append(np.array(document, dtype=dtype))
            entries.append(writer.finish())
    write_corpus(path, tokenizer, entries, np.dtype(dtype), {})
    return path


def seal(corpus: Path) -> None:
    """Make the checksums of a corpus those of its shards as they are now; its fingerprint stays."""
    import numpy as np

    from fsdp_pretrain.data.corpus.manifest import read_manifest
    from fsdp_pretrain.data.corpus.writing import write_corpus
    from fsdp_pretrain.data.text.tokenizer import Tokenizer

    manifest = read_manifest(corpus)
    entries = [asdict(shard) for shard in manifest.shards]
    tokenizer = Tokenizer.load(corpus / manifest.tokenizer.file, eod=manifest.tokenizer.eod)
    write_corpus(corpus, tokenizer, entries, np.dtype(manifest.dtype), manifest.statistics, manifest.separators)


def moved(run: Path, to: Path) -> Path:
    """A copy of a run, as if it had been trained in another place."""
    shutil.copytree(run, to)
    for path in (to / "config.toml", *to.glob("segments/*/config.toml")):
        path.write_text(path.read_text().replace(str(run), str(to)))
    return to


def tiny(name: str, folder: Path, corpus: Path | str, **sections: dict[str, Any]) -> dict[str, Any]:
    """The values of a run configuration of a tiny Llama; keyword arguments replace values of its sections."""
    values: dict[str, Any] = {
        "run": {"name": name, "dir": str(folder)},
        "model": {"family": "llama", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 512},
        "data": {"sequence_length": 32, "lanes": 8, "sources": [{"name": "text", "path": str(corpus)}]},
        "train": {"duration": "20 steps", "global_batch": "8 samples", "micro_batch": 4},
        "optimizer": {"lr": 1e-2, "min_lr": 1e-3, "warmup": "4 steps"},
        "parallel": {"timeout": "60 s"},
        "checkpoint": {"every": "10 steps"},
        "record": {"console_every": 5},
        "watchdog": {"enabled": False},  # one process more per run: tests of the watchdog turn it on
    }
    for section, changes in sections.items():
        values[section] = {**values.get(section, {}), **changes}
        values[section] = {key: value for key, value in values[section].items() if value is not None}
    return values


class Lab:
    """A directory with a corpus and what is needed to train on it.

    Attributes:
        path: of the laboratory.
        corpus: a prepared corpus with a 512-token tokenizer.
        tokenizer: its tokenizer directory.
        heldout: held-out JSONL.
    """

    def __init__(self, path: Path, shared: Path, zygotes: Zygotes) -> None:
        self.path, self._zygotes = path, zygotes
        self.corpus, self.tokenizer, self.heldout = shared / "corpus", shared / "tokenizer", shared / "heldout.jsonl"
        self._jobs: list[Job] = []

    def config(self, name: str = "run", *, timeline: Sequence[dict[str, Any]] = (), **sections: dict[str, Any]) -> Path:
        """A run configuration of a tiny Llama; keyword arguments replace values of its sections."""
        values = tiny(name, self.path / name, self.corpus, **sections)
        values |= {"timeline": list(timeline)} if timeline else {}
        path = self.path / f"{name}.toml"
        path.write_text(tomli_w.dumps(values))
        return path

    def start(
        self,
        config: Path | str,
        *overrides: str,
        module: str = "fsdp_pretrain.train",
        ranks: int = 1,
        flags: tuple[str, ...] = (),
        nodes: int = 1,
        variables: dict[str, str] | None = None,
    ) -> Job:
        """Start a training job, or the ranks of another `module`, as if on `nodes` nodes (their host names:
        `hostname.py`), with `variables` in its environment."""
        log = self.path / f"log-{len(self._jobs)}"
        port, started = free_port(), []
        for rank in range(ranks):
            environment = as_rank(rank, ranks, ranks // nodes, port) | (variables or {})
            arguments = (config, *overrides, *flags)
            started.append(self._zygotes.start(module, *arguments, environment=environment, log=log))
        self._jobs.append(Job(started, log))
        return self._jobs[-1]

    def train(self, config: Path | str, *overrides: str, ranks: int = 1, expect: int = 0, **options: Any) -> str:
        """Run a training job to its end, with the options of `start`, and return its output. Fails the test on another
        exit code."""
        job = self.start(config, *overrides, ranks=ranks, **options)
        codes = job.wait()
        assert codes == [expect] * ranks, f"exit codes {codes}\n{job.output()}"
        return job.output()

    def close(self) -> None:
        for job in self._jobs:
            job.kill()
