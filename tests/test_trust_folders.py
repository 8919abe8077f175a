"""Hugging Face folders from others: what is wrong in one is named before anything is made of it. See docs/trust.md."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import CLI, Run
from safetensors.torch import load_file, save_file

from fsdp_pretrain import models
from fsdp_pretrain.config.config import load
from fsdp_pretrain.data.prepare.prepare import PrepareOptions
from fsdp_pretrain.data.prepare.train_tokenizer import train_tokenizer
from fsdp_pretrain.errors import UserError
from fsdp_pretrain.hf.layout import to_hf, weights
from fsdp_pretrain.hf.weights_import import import_folder
from fsdp_pretrain.run.files import RunDir

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(lab: Any) -> Path:
    """A valid folder that fits the configuration `imported.toml` of the laboratory, to be damaged."""
    config = load(lab.config("imported"))
    model = models.build(config.model).state_dict()
    tensors = {
        weight.theirs: torch.randn(model[name].shape)
        for weight in weights(config.model, list(model))
        for name in weight.ours
    }
    path: Path = lab.path / "theirs"
    shutil.copytree(lab.tokenizer, path)
    content = to_hf(config.model, sequence_length=32, eod=0, dtype="float32")
    (path / "config.json").write_text(json.dumps(content))
    save_file(tensors, path / "model.safetensors")
    return path


def take(lab: Any, folder: Path, *changes: str, accept: tuple[str, ...] = ()) -> str:
    """Import the folder; the message about its tokenizer."""
    config = load(lab.path / "imported.toml", changes)
    return import_folder(RunDir(config.run.dir), folder, config, accept).tokenizer


def edit(name: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    """Change the JSON in a file of the folder in place."""

    def act(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return act


def set_config(**values: Any) -> Callable[[Path], None]:
    return edit("config.json", lambda content: content.update(values))


def write(name: str, content: Any) -> Callable[[Path], object]:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda folder: (folder / name).write_bytes(text)


def set_header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change the header of the safetensors file in place."""

    def act(folder: Path) -> None:
        raw = (folder / "model.safetensors").read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        content = json.loads(raw[8:end])
        change(content)
        text = json.dumps(content).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])

    return act


def set_norm(**values: Any) -> Callable[[Path], None]:
    return set_header(lambda header: header["model.norm.weight"].update(values))


def set_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return act


def to_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def other_tokenizer(folder: Path) -> None:
    text = folder.parent / "text.jsonl"
    text.write_text(json.dumps({"text": " ".join(str(number) for number in range(3000))}) + "\n")
    train_tokenizer([str(text)], folder, kind="bpe", vocab_size=400, options=PrepareOptions(), max_bytes=10**6)


def split(folder: Path, *, stale: bool = False, twice: bool = False) -> None:
    """Spread the tensors over two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    half = len(tensors) // 2
    places = {name: f"part-{number // half}.safetensors" for number, name in enumerate(tensors)}
    for part in set(places.values()):
        here = {name: tensor for name, tensor in tensors.items() if places[name] == part}
        save_file(here | ({"model.norm.weight": torch.zeros(32)} if twice else {}), folder / part)
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    if not stale:
        (folder / "model.safetensors").unlink()


def spoil(value: float, kind: torch.dtype = torch.float32) -> Callable[[Path], None]:
    """Put a value into two tensors."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
            tensors[name] = tensors[name].to(kind)
            tensors[name].view(-1)[-1] = value

    return set_tensors(change)


NO_READING, NOT_FINITE = "cannot read", "NaN, or infinite in fp32"
DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "list": (write("config.json", []), "it is not a JSON object"),
    "rope-factor": (
        set_config(rope_scaling={"rope_type": "linear", "factor": "2"}),
        "factor = '2': Input should be a valid number",
    ),
    "heads": (set_config(num_attention_heads=0), "num_attention_heads = 0"),
    "enormous": (set_config(vocab_size=10**30), "rows of the embedding table"),
    "index-map": (write(INDEX, {"weight_map": ["model.safetensors"]}), "has no weight_map"),
    "index-outside": (write(INDEX, {"weight_map": {"a": "../model.safetensors"}}), "has no weight_map"),
    "index-stale": (lambda folder: split(folder, stale=True), "transformers would read the former"),
    "in-two-files": (lambda folder: split(folder, twice=True), "is in part-0.safetensors and in part-1.safetensors"),
    "outside": (set_norm(data_offsets=[10**9, 10**9 + 128]), NO_READING),
    "dtype-other": (set_norm(dtype="I32"), r"model.norm.weight is I32 \[32\]"),
    "nan": (spoil(float("nan")), f"(?s){NOT_FINITE}.*model.layers.1.mlp.up_proj.weight.*model.norm.weight"),
    "too-large": (spoil(1e300, torch.float64), NOT_FINITE),
    "no-tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "--accept tokenizer"),
    "another-tokenizer": (other_tokenizer, "differently from the tokenizer of the corpora"),
    "pickle": (to_pickle, "a pickle"),
    "no-weights": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
    "gemma": (set_config(model_type="gemma"), "model_type = 'gemma'"),
    "family": (set_config(model_type="mistral"), '(?s)family: "mistral" -> "llama".*sliding_window: 4096 -> absent'),
    "two-bases": (set_config(rope_theta=5e5), "500000.0 in config.json, 10000.0 in rope_parameters: which one counts"),
    "longrope": (set_config(rope_parameters={"rope_type": "longrope", "factor": 2.0}), "rope_type = 'longrope'"),
    "yarn": (
        set_config(rope_parameters={"rope_type": "yarn", "factor": 2.0, "beta_fast": 16, "attention_factor": 1.0}),
        "(?s)beta_fast = 16; ours is 32.*attention_factor = 1.0; ours is 1.069",
    ),
    "missing": (set_tensors(lambda t: t.pop("model.norm.weight")), "model.norm.weight is missing"),
    "size": (set_tensors(lambda t: t.update({"model.norm.weight": torch.zeros(3)})), r"model.norm.weight is F32 \[3\]"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_folder_that_is_wrong_is_refused(lab: Any, folder: Path, case: str) -> None:
    damage, expected = DAMAGED[case]
    damage(folder)
    with pytest.raises(UserError, match=expected) as refused:
        take(lab, folder)
    assert refused.value.exit == 78 and not (lab.path / "imported").exists()


def test_a_wrong_folder_is_one_message_of_the_command(lab: Any, folder: Path, run_command: Run) -> None:
    command = (CLI, "checkpoints", lab.path / "imported", "import", folder, "--config", lab.path / "imported.toml")
    spoil(float("nan"))(folder)
    (folder / "tokenizer.json").unlink()
    for more, expected in (((), "--accept tokenizer"), (("--accept", "tokenizer"), NOT_FINITE)):
        done = run_command(*command, *more)
        assert done.returncode == 78 and expected in done.stderr, done.stderr
        assert done.stderr.count("error:") == 1 and "Traceback" not in done.stderr
    assert "choose from" in run_command(*command, "--accept", "nan").stderr


def test_an_index_is_read(lab: Any, folder: Path) -> None:
    split(folder)
    assert "encodes as the tokenizer of the corpora" in take(lab, folder)


def test_an_output_matrix_that_a_tied_model_does_not_use_is_refused(lab: Any, folder: Path) -> None:
    set_config(tie_word_embeddings=True)(folder)
    with pytest.raises(UserError, match=r"lm_head\.weight is another"):
        take(lab, folder, "model.tied_head=true")


def test_a_table_that_is_stored_twice_needs_no_word(lab: Any, folder: Path) -> None:
    set_config(tie_word_embeddings=True)(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    assert "lm_head" not in take(lab, folder, "model.tied_head=true")
