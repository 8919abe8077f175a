"""A real corpus without a download, made of files that every Python installation has.

It contains standard-library sources (without tests), their docstrings as prose, and the pydoc topics. Training and
held-out documents are split by file, so that no text derived from a held-out file is trained on. (`fsdp-data split`
decides by text, and cannot know that two texts come from one file.)
"""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import xxhash
from tqdm import tqdm

from fsdp_pretrain.errors import DataError, naming
from fsdp_pretrain.files import replacing

_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "turtledemo"}
_HELDOUT_ONE_IN = 16
SPLITS = ("train", "heldout")


def build(out: Path) -> dict[str, list[int]]:
    """Write `train.jsonl` and `heldout.jsonl` (fields `text`, `source`) into `out`, each under its name only when it is
    complete. Returns the sizes of the texts of each split in UTF-8 bytes. Raises DataError if this Python has no
    standard-library sources (a stripped image)."""
    out.mkdir(parents=True, exist_ok=True)
    texts: dict[str, list[int]] = {split: [] for split in SPLITS}
    with ExitStack() as stack:
        files = {split: stack.enter_context(replacing(out / f"{split}.jsonl")) for split in SPLITS}
        stack.enter_context(naming(out))
        for source, text in _documents():
            held_out = xxhash.xxh3_64_intdigest(source.partition("#")[0].encode()) % _HELDOUT_ONE_IN == 0
            split = "heldout" if held_out else "train"
            files[split].write((json.dumps({"text": text, "source": source}) + "\n").encode())
            texts[split].append(len(text.encode()))
        if sum(texts["train"]) < 1_000_000:
            raise DataError(
                f"this Python installation holds only {sum(texts['train'])} bytes of standard-library sources",
                remedy="use a full Python installation, or `fsdp-data prepare` on text of your own",
            )
    return texts


def _documents() -> Iterator[tuple[str, str]]:
    """Yields (source, text), ordered by path. Prose taken from a file has the source `FILE#docstrings`."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = [path for path in sorted(root.rglob("*.py")) if not _SKIPPED & set(path.relative_to(root).parts)]
    seen: set[str] = set()
    for path in tqdm(sources, desc="quickstart corpus", unit="file", disable=None):
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError):
            continue  # a codec sample or a template, not a module
        digest = xxhash.xxh3_128_hexdigest(text.encode())
        if len(text) < 200 or digest in seen:
            continue
        seen.add(digest)
        name = str(path.relative_to(root))
        yield name, text
        prose = "\n\n".join(doc for node in ast.walk(tree) if (doc := _docstring(node)))
        if len(prose) > 500:
            yield f"{name}#docstrings", prose
    for topic, text in sorted(_topics().items()):
        digest = xxhash.xxh3_128_hexdigest(text.encode())
        if digest not in seen:  # some topics are listed under two names
            seen.add(digest)
            yield f"topics/{topic}", text


def _docstring(node: ast.AST) -> str | None:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return ast.get_docstring(node)
    return None


def _topics() -> dict[str, str]:
    """The language reference behind `help("topics")`; empty in images without it."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return {}
    return dict(topics)
