"""Hugging Face folders: what transformers computes from an export, and training on an import.

transformers is the reference here; the program itself imports it only for `bench --peers`.
"""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import Run, python
from records import flip
from safetensors.torch import load_file
from torch import Tensor

from fsdp_pretrain.checkpoint.store import Store
from fsdp_pretrain.checkpoint.tokenizer import export_tokenizer, samples
from fsdp_pretrain.config.config import load
from fsdp_pretrain.data.packing.opening import open_packer
from fsdp_pretrain.data.prepare.prepare import PrepareOptions
from fsdp_pretrain.data.prepare.train_tokenizer import train_tokenizer
from fsdp_pretrain.data.text.tokenizer import Tokenizer
from fsdp_pretrain.errors import ConfigError, StorageError, UserError
from fsdp_pretrain.eval.checkpoints import read_checkpoint
from fsdp_pretrain.hf import export as hf
from fsdp_pretrain.hf.layout import read_model, to_hf
from fsdp_pretrain.hf.weights_import import import_folder
from fsdp_pretrain.run.files import RunDir

pytestmark = pytest.mark.slow  # the default suite has no room for it

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

ROPE = {"kind": "llama3", "factor": 8.0, "original_length": 16}
GPT: dict[str, Any] = {"family": "gpt", "kv_heads": None, "ffn": None, "positions": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_base": 500_000.0, "rope_scaling": ROPE, "vocab": 520, "vocab_multiple": 64, "init_std": 0.15},
    "gpt": {**GPT, "scores": "layer_scaled", "dropout": 0.1},
}


@pytest.fixture(scope="module")
def trained(module_lab: Any) -> Callable[[str], RunDir]:
    """`trained("gpt")`: four steps on a mesh of 2 x 2, saved at the end."""

    def train(family: str) -> RunDir:
        run = RunDir(module_lab.path / family)
        if not run.checkpoints.exists():
            config = module_lab.config(
                family,
                model=MODELS[family],
                train={"duration": "4 steps", "micro_batch": 2},
                optimizer={"warmup": "1 steps"},
            )
            module_lab.train(config, "parallel.shard=2", ranks=4)
        return run

    return train


def our_logits(run: RunDir, step: int, tokens: Tensor) -> Tensor:
    model, _ = read_checkpoint(Store(run.checkpoints).find(step), "cpu")
    with torch.no_grad():
        return model.eval()(tokens)


def their_logits(folder: Path, tokens: Tensor) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return model.eval()(tokens).logits


def assert_equal_logits(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype == torch.float32 and ours.std() > 0.01
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5


def assert_other_logits(folder: Path, copy: Path, name: str) -> None:
    """A copy of an export without one part of its rotary positions gives other logits."""
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    for place in (config, config["rope_parameters"], config["rope_scaling"]):
        if name in place:
            place[name] = {"rope_theta": 10_000.0, "factor": 1.0}[name]
    (copy / "config.json").write_text(json.dumps(config))
    ours, theirs = their_logits(folder, some_tokens()), their_logits(copy, some_tokens())
    assert float((ours - theirs).abs().max() / theirs.abs().max()) > 1e-3


def learn(text: Path, out: Path, kind: str = "bpe") -> Tokenizer:
    return train_tokenizer([str(text)], out, kind=kind, vocab_size=400, options=PrepareOptions(), max_bytes=10**6)


def some_tokens(count: int = 512) -> Tensor:
    return torch.randint(count, (2, 32), generator=torch.Generator().manual_seed(7))


# ------------------------------------------------------------------------ out


@pytest.mark.shows("D25")
@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.promise("hugging-face")
def test_export_of_a_2x2_checkpoint_is_the_same_function_in_transformers(
    trained: Callable[[str], RunDir], family: str, tmp_path: Path
) -> None:
    run, out = trained(family), tmp_path / "deep/out"
    done = hf.export_checkpoint(run, 4, out, dtype="fp32", shard_bytes=10**9)
    assert {path.name for path in out.iterdir()} == {
        *("model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        "fsdp_pretrain.json",
    }
    assert_equal_logits(our_logits(run, 4, some_tokens()), their_logits(out, some_tokens()))
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert done.parameters == model.num_parameters() and done.bytes == 4 * done.parameters
    assert type(model).__name__ == ("GPT2LMHeadModel" if family == "gpt" else "LlamaForCausalLM")
    if family != "gpt":  # base and scaling matter in these logits
        for name in ("rope_theta", "factor"):
            assert_other_logits(out, tmp_path / name, name)
    ours = Tokenizer.load(run.tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    assert theirs(samples(ours))["input_ids"] == ours.encode(samples(ours))
    assert theirs.eos_token_id == ours.eod == model.config.eos_token_id == model.generation_config.eos_token_id
    made = model.generate(some_tokens()[:1, :4], max_new_tokens=3, do_sample=False, pad_token_id=ours.eod)
    assert made.shape[1] <= 7


def test_command_writes_files_of_a_size_with_an_index(
    trained: Callable[[str], RunDir], tmp_path: Path, run_command: Run
) -> None:
    run = trained("llama")
    command = ("checkpoints", run.path, "export", 4, tmp_path / "out", "--shard-size", "30KB", "--json")
    printed = json.loads(run_command("fsdp_pretrain.cli", *command, expect=0).stdout)
    files = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(files) == printed["files"] >= 3 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    merged: dict[str, Tensor] = {}
    for path in files:
        tensors = load_file(path)
        size = sum(tensor.numel() * 2 for tensor in tensors.values())
        assert size <= 30_000 or len(tensors) == 1  # the embedding table is larger than that
        assert {index["weight_map"][name] for name in tensors} == {path.name}
        merged |= tensors
    assert index["metadata"]["total_size"] == printed["bytes"] == sum(2 * t.numel() for t in merged.values())
    hf.export_checkpoint(run, 4, tmp_path / "whole", dtype="fp32", shard_bytes=10**9)
    whole = load_file(tmp_path / "whole/model.safetensors")
    assert merged.keys() == whole.keys() == index["weight_map"].keys()
    assert all(torch.equal(merged[name], whole[name].bfloat16()) for name in whole)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_exports_that_are_refused(trained: Callable[[str], RunDir], module_lab: Any, tmp_path: Path) -> None:
    run, out = trained("llama"), tmp_path / "out"
    out.mkdir()
    with pytest.raises(ConfigError, match="exists"):
        hf.export_checkpoint(run, 4, out, dtype="fp32", shard_bytes=10**9)
    with pytest.raises(UserError, match="no checkpoint of step 3"):
        hf.export_checkpoint(run, 3, tmp_path / "other", dtype="fp32", shard_bytes=10**9)
    damaged = RunDir(tmp_path / "damaged")
    shutil.copytree(run.path, damaged.path)
    flip(next((damaged.checkpoints / "step-00000004").glob("*.distcp")))
    with pytest.raises(UserError, match="not the ones that were written") as caught:
        hf.export_checkpoint(damaged, 4, tmp_path / "other", dtype="fp32", shard_bytes=10**9)
    assert caught.value.exit == 78
    assert not list(tmp_path.glob("*other*"))


@pytest.mark.parametrize(("disk", "expected"), [("128k", "needs 217 KiB in 11 files"), ("1m,nr_inodes=9", "room for")])
def test_an_export_that_does_not_fit_leaves_nothing(
    trained: Callable[[str], RunDir], small_disk: Any, disk: str, expected: str
) -> None:
    """Neither in bytes nor in files."""
    out = small_disk(disk) / "out"
    with pytest.raises(StorageError, match=f"the export .*{expected}"):
        hf.export_checkpoint(trained("llama"), 4, out, dtype="fp32", shard_bytes=10**9)
    assert not list(out.parent.iterdir())


@pytest.mark.shows("D25")
@pytest.mark.parametrize("odd", [{"positions": "alibi"}, {"embedding_norm": True}, {"family": "glm", "hidden": 48}])
def test_a_model_transformers_cannot_express_is_not_exported(module_lab: Any, odd: dict[str, Any]) -> None:
    model = {"kv_heads": None, **odd} if "family" in odd else {**GPT, **odd}
    config = load(module_lab.config("odd", model=model))
    with pytest.raises(ConfigError, match=rf"no class for model\.{next(iter(odd))}"):
        to_hf(config.model, sequence_length=32, eod=0, dtype="float32")


@pytest.mark.parametrize(("kind", "family"), [("bpe", "llama"), ("sentencepiece", "llama"), ("bpe", "qwen3")])
def test_tokenizers_encode_alike_in_transformers(shared_corpus: Path, kind: str, family: str, tmp_path: Path) -> None:
    ours = learn(shared_corpus / "train.jsonl", tmp_path / "tokenizer", kind)
    (tmp_path / "out").mkdir()
    printed = export_tokenizer(ours, tmp_path / "out", sequence_length=32)
    assert ("converted" in printed) == (kind == "sentencepiece")
    (tmp_path / "out/config.json").write_text(json.dumps({"model_type": family}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = [*samples(ours), *(json.loads(line)["text"] for line in (shared_corpus / "heldout.jsonl").open())]
    assert theirs(texts)["input_ids"] == ours.encode(texts)
    assert theirs.eos_token_id == ours.eod
    assert [theirs.decode(ids) for ids in ours.encode(texts[1:3])] == texts[1:3]


def test_settings_of_a_tokenizer_file_that_change_texts_are_not_exported(shared_corpus: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Model
    from tokenizers.processors import TemplateProcessing

    model = Model.from_file(str(shared_corpus / "tokenizer/tokenizer.json"))
    model.enable_truncation(5)
    model.enable_padding(length=9)
    model.post_processor = TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    model.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.load(tmp_path)
    (tmp_path / "out").mkdir()
    export_tokenizer(ours, tmp_path / "out", sequence_length=32)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs(samples(ours))["input_ids"] == ours.encode(samples(ours))


# ------------------------------------------------------------------------- in

TINY_LLAMA = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
TINY_GPT2 = {"vocab_size": 512, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 10000.0,
}
OLMO3 = {**TINY_LLAMA, "num_hidden_layers": 4, "sliding_window": 9, "eos_token_id": 0, "pad_token_id": None}
GEMMA3 = {**OLMO3, "num_hidden_layers": 6, "head_dim": 12, "query_pre_attn_scalar": 20, "bos_token_id": 0}
BLOOM = {"vocab_size": 512, "hidden_size": 32, "n_layer": 2, "n_head": 4}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8, "rope_theta": 5e5}
THEIRS: dict[str, dict[str, Any]] = {
    "llama": TINY_LLAMA,
    "llama-linear": {**TINY_LLAMA, "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0}},
    "llama-llama3": {**TINY_LLAMA, "rope_parameters": LLAMA3},
    "mistral-window": {**TINY_LLAMA, "sliding_window": 32, "tie_word_embeddings": True},
    "mistral-short-window": {**TINY_LLAMA, "sliding_window": 9},
    "mistral-nemo": {**TINY_LLAMA, "hidden_size": 36, "head_dim": 16, "sliding_window": None},
    "qwen2": {**TINY_LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen2-tied": {**TINY_LLAMA, "tie_word_embeddings": True, "num_key_value_heads": 1},
    "qwen3": {**TINY_LLAMA, "head_dim": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "olmo3": OLMO3,
    "olmo3-yarn": {
        **OLMO3,
        "rope_parameters": {"full_attention": YARN, "sliding_attention": {**PLAIN, "rope_theta": 5e5}},
    },
    "gemma3_text": GEMMA3,
    "gemma3_text-linear": {**GEMMA3, "rope_parameters": {"full_attention": LINEAR, "sliding_attention": PLAIN}},
    "bloom": BLOOM,
    "gpt2": TINY_GPT2,
    "gpt2-untied": {**TINY_GPT2, "tie_word_embeddings": False, "n_inner": 80},
}


def make_folder(path: Path, name: str, **save: Any) -> Path:
    """A folder written by transformers, of a model with weights far from their initial scale."""
    torch.manual_seed(3)
    config = transformers.AutoConfig.for_model(name.partition("-")[0], **THEIRS[name])
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(path, **save)
    return path


def configure(lab: Any, folder: Path, name: str = "imported", **model: Any) -> Path:
    """A configuration with the model of the folder."""
    shown = json.loads(read_model(folder).model_dump_json(exclude_none=True))
    unset = {"kv_heads": None, "ffn": None} if shown["family"] == "gpt" else {}
    config: Path = lab.config(name, model={**unset, **shown, **model})
    return config


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.promise("hugging-face")
def test_import_is_the_same_function_and_goes_out_again_bit_for_bit(lab: Any, name: str) -> None:
    folder = make_folder(lab.path / "theirs", name, max_shard_size="30KB" if name == "gpt2" else "1GB")
    config = load(configure(lab, folder))
    run = RunDir(config.run.dir)
    done = import_folder(run, folder, config, ["tokenizer"])
    assert done.padded == 0 and done.saved.checkpoint.verified
    assert ("window of 32 tokens is not in force" in done.tokenizer) == (name == "mistral-window")
    assert_equal_logits(our_logits(run, 0, some_tokens()), their_logits(folder, some_tokens()))
    hf.export_checkpoint(run, 0, lab.path / "again", dtype="fp32", shard_bytes=10**9)
    again = load_file(lab.path / "again/model.safetensors")
    there = {key: value for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}
    assert again.keys() == there.keys() and all(torch.equal(again[key], there[key]) for key in there)
    assert_equal_logits(their_logits(lab.path / "again", some_tokens()), their_logits(folder, some_tokens()))


def test_config_json_of_transformers_4_is_read(tmp_path: Path) -> None:
    old = {"model_type": "llama", **TINY_LLAMA, "rope_theta": 500000, "rope_scaling": {"type": "linear", "factor": 2}}
    (tmp_path / "config.json").write_text(json.dumps(old))
    model: Any = read_model(tmp_path)
    assert (model.rope_base, model.rope_scaling.kind, model.rope_scaling.factor) == (500_000.0, "linear", 2.0)
    assert model.norm_eps == 1e-6 and model.kv_heads == 2 and not model.tied_head


def test_training_continues_from_an_import(lab: Any, run_command: Run, helpers: Any) -> None:
    """The first loss is the one transformers computes for the same batch; the checkpoint saved then is complete."""
    folder = make_folder(lab.path / "theirs", "llama-llama3")
    shutil.copytree(lab.tokenizer, folder, dirs_exist_ok=True)
    shown = run_command("fsdp_pretrain.cli", "checkpoints", "/nowhere", "import", folder, "--show-model", expect=0)
    model = tomllib.loads(shown.stdout)["model"]
    path = lab.config(
        "run", model={**model, "norm_eps": 0.1}, train={"duration": "2 steps"}, optimizer={"warmup": "1 steps"}
    )
    eps = f"model.norm_eps={model['norm_eps']}"
    config = load(path, [eps])
    done = run_command(
        "fsdp_pretrain.cli", "checkpoints", config.run.dir, "import", folder, "--config", path, eps, expect=0
    )
    assert "encodes as the tokenizer of the corpora" in done.stdout
    (listed,) = json.loads(run_command("fsdp_pretrain.cli", "checkpoints", config.run.dir, "verify", "--json").stdout)
    assert (listed["step"], listed["state"], listed["optimizer"]) == (0, "verified", False)

    lab.train(path, "parallel.shard=1", eps, ranks=2)
    tokens = torch.from_numpy(open_packer(config).pack(0, 8).tokens.astype(np.int64))
    logits = their_logits(folder, tokens[:, :-1])
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    first = helpers.metrics(config.run.dir)[0]
    assert first["loss"]["sum"] / first["loss"]["count"] == pytest.approx(float(expected), rel=1e-6)
    (resumed,) = helpers.journal(config.run.dir, "resume")
    assert resumed["step"] == 0 and not resumed["optimizer"] and "the optimiser starts fresh" in resumed["text"]
    assert helpers.journal(config.run.dir, "import")[0]["folder"] == str(folder)
    saved = Store(config.run.dir / "checkpoints").find(2)
    assert saved.manifest().optimizer is True


@pytest.mark.parametrize("name", ["qwen3", "mistral-short-window", "olmo3-yarn", "gemma3_text-linear", "bloom"])
def test_import_trained_on_2x2_goes_out_and_comes_back(lab: Any, name: str) -> None:
    """Import, four steps of hybrid sharding, export: the same function in transformers; imported again: bit for bit."""
    folder = make_folder(lab.path / "theirs", name)
    path = configure(lab, folder)
    config = load(path, ["train.duration=4 steps", "optimizer.warmup=1 steps"])
    run = RunDir(config.run.dir)
    import_folder(run, folder, config, ["tokenizer"])
    lab.train(
        path, "train.duration=4 steps", "train.micro_batch=2", "optimizer.warmup=1 steps", "parallel.shard=2", ranks=4
    )
    trained = our_logits(run, 4, some_tokens())
    assert float((trained - our_logits(run, 0, some_tokens())).abs().max()) > 0.01  # it has learned
    hf.export_checkpoint(run, 4, lab.path / "again", dtype="fp32", shard_bytes=10**9)
    assert_equal_logits(trained, their_logits(lab.path / "again", some_tokens()))
    kinds = [json.loads((path / "config.json").read_text())["architectures"] for path in (folder, lab.path / "again")]
    assert kinds[0] == kinds[1] == [type(transformers.AutoModelForCausalLM.from_pretrained(folder)).__name__]
    back = load(path, [f"run.dir={lab.path / 'back'}"])
    import_folder(RunDir(back.run.dir), lab.path / "again", back)
    assert torch.equal(our_logits(RunDir(back.run.dir), 0, some_tokens()), trained)


def test_rows_that_the_folder_lacks_get_the_mean(lab: Any) -> None:
    folder = make_folder(lab.path / "theirs", "llama")
    config = load(configure(lab, folder, vocab=520, vocab_multiple=64))
    run = RunDir(config.run.dir)
    assert import_folder(run, folder, config, ["tokenizer"]).padded == 64
    hf.export_checkpoint(run, 0, lab.path / "again", dtype="fp32", shard_bytes=10**9)
    again, there = load_file(lab.path / "again/model.safetensors"), load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(again[name][:512], there[name])
        assert torch.equal(again[name][512:], there[name].mean(0).expand(64, -1))
    probabilities = our_logits(run, 0, some_tokens()).softmax(-1)
    assert float(probabilities[..., 512:].max()) <= 1 / 512  # a mean of logits never exceeds their log-mean-exp


def test_imports_into_the_wrong_run_are_refused(lab: Any) -> None:
    plain_folder = make_folder(lab.path / "theirs", "llama")
    config = load(configure(lab, plain_folder))
    with pytest.raises(ConfigError, match=r"is for run\.dir"):
        import_folder(RunDir(lab.path / "elsewhere"), plain_folder, config)
    run = RunDir(config.run.dir)
    import_folder(run, plain_folder, config, ["tokenizer"])
    with pytest.raises(ConfigError, match="a run that has begun"):
        import_folder(run, plain_folder, config, ["tokenizer"])


@pytest.mark.slow
def test_memory_is_that_of_a_file_not_of_the_model(lab: Any) -> None:
    """270 MB of weights are imported and exported in files of 40 MB; own memory (not the pages of mapped files) grows
    by a few times that."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "num_attention_heads": 16}
    config = transformers.LlamaConfig(**{**TINY_LLAMA, **sizes, "num_key_value_heads": 16})
    transformers.LlamaForCausalLM(config).save_pretrained(lab.path / "theirs")
    path = configure(lab, lab.path / "theirs")
    code = (
        "import json; from pathlib import Path\n"
        "from fsdp_pretrain.config.config import load; from fsdp_pretrain.hf import export as hf\n"
        "from fsdp_pretrain.hf.weights_import import import_folder\n"
        "from fsdp_pretrain.run.files import RunDir\n"
        "import threading, time; seen = [0]\n"
        "own = lambda: int(Path('/proc/self/status').read_text().partition('RssAnon:')[2].split()[0]) // 1024\n"
        "def watch():\n"
        "    while True: seen[0] = max(seen[0], own()); time.sleep(0.001)\n"
        "threading.Thread(target=watch, daemon=True).start()\n"
        "peak = lambda: max(seen[0], own())\n"
        f"config = load({str(path)!r}); run = RunDir(config.run.dir); marks = [peak()]\n"
        f"import_folder(run, Path({str(lab.path / 'theirs')!r}), config, ['tokenizer']); marks.append(peak())\n"
        f"hf.export_checkpoint(run, 0, Path({str(lab.path / 'out')!r}), dtype='fp32', shard_bytes=40 * 10**6)\n"
        "print(json.dumps([*marks, peak()]))"
    )
    start, imported, exported = json.loads(python("-c", code).stdout)
    assert sum(path.stat().st_size for path in (lab.path / "out").glob("*.safetensors")) > 265e6
    assert imported - start < 120 and exported - start < 120, (start, imported, exported)
