"""The weights in a Hugging Face folder, under our names. The folder is untrusted: everything is checked."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fsdp_pretrain import models
from fsdp_pretrain.config.model import AnyModel
from fsdp_pretrain.errors import DataError, shortened

from .classes import HFTensor
from .layout import is_computed, read_json_object, weights, without_base

INDEX = "model.safetensors.index.json"
_WHOLE, _HEAD = "model.safetensors", "lm_head.weight"
_KINDS = ("F64", "F32", "F16", "BF16")


class Folder:
    """The safetensors of a folder under our names.

    Args:
        theirs, ours: the models of the folder and of the configuration, equal but for the rows of the embedding table.

    Attributes:
        parameters: fp32 tensors on the meta device, by our names.
        padded: number of rows of the embedding table that the folder lacks.

    Raises:
        DataError: tensors are missing, unknown, or of another shape or dtype; or a model with a tied output matrix has
            another one.
    """

    def __init__(self, folder: Path, theirs: AnyModel, ours: AnyModel) -> None:
        self.parameters: dict[str, Tensor] = models.build(ours).state_dict()
        self.padded = ours.rows - theirs.rows
        self._rows, self._heads, self._files = theirs.rows, ours.heads, _tensors(folder)
        files = self._files
        bare = {without_base(name): name for name in files}
        table = weights(ours, list(self.parameters))
        stored_as = {weight.theirs: bare.get(without_base(weight.theirs)) for weight in table}
        problems = [f"{name} is missing" for name, stored in stored_as.items() if stored is None]
        extra_head = ours.tied_head and _HEAD in files  # some writers store the table twice
        known = {*stored_as.values(), *([_HEAD] if extra_head else [])}
        problems += [f"{name} is unknown" for name in files if name not in known and not is_computed(name)]
        self._places: dict[str, tuple[Path, str, HFTensor, int]] = {}
        for weight in table:
            name = stored_as[weight.theirs]
            if name is None:
                continue
            path, shape, kind = files[name]
            wanted = self._wanted(weight)
            if shape != wanted or kind not in _KINDS:
                problems.append(f"{name} is {kind} {list(shape)}, it should be {list(wanted)} in F32, F16 or BF16")
            for number, parameter in enumerate(weight.ours):
                self._places[parameter] = (path, name, weight, number)
        if problems:
            raise DataError(f"the tensors of {folder} do not fit its config.json:\n    " + shortened(problems))
        if extra_head:
            self._refuse_another_head(folder)

    def _is_padded(self, name: str) -> bool:
        return self.padded > 0 and name in ("embedding.weight", "head.weight")

    def _wanted(self, weight: HFTensor) -> tuple[int, ...]:
        """The shape that a stored tensor must have."""
        shapes = [tuple(self.parameters[name].shape) for name in weight.ours]
        rows = self._rows if self._is_padded(weight.ours[0]) else sum(shape[0] for shape in shapes)
        shape = (rows, *shapes[0][1:])
        return shape[::-1] if weight.transposed else shape

    def read(self, name: str) -> Tensor:
        """Read a parameter into memory, in fp32, with the folder's number of rows. Raises DataError."""
        path, stored, weight, number = self._places[name]
        height = self.parameters[name].shape[0]
        part = slice(number * height, (number + 1) * height)
        try:
            with safe_open(path, "pt") as file:  # opened for each tensor, so that nothing stays mapped
                view = file.get_slice(stored)
                if weight.by_head:  # all of it is read for each part
                    tensor: Tensor = view[:].unflatten(0, (self._heads, len(weight.ours), -1))[:, number].flatten(0, 1)
                else:
                    tensor = view[:, part].T if weight.transposed else view[part]
        except (OSError, SafetensorError) as error:
            raise DataError(f"cannot read {stored} in {path}: {error}") from None
        return tensor.float().contiguous()

    def read_rows(self, name: str, rows: range, out: Tensor) -> None:
        """Read rows of a parameter into a tensor of any dtype. Raises DataError."""
        out.copy_(self.read(name)[rows.start : rows.stop])

    def source_name(self, name: str) -> str:
        """The folder's name of a parameter."""
        return self._places[name][1]

    def _refuse_another_head(self, folder: Path) -> None:
        """Raise DataError unless the stored output matrix of a tied model equals the embedding table."""
        table = self._places["embedding.weight"][:2]
        path = self._files[_HEAD][0]
        with safe_open(path, "pt") as one, safe_open(table[0], "pt") as other:
            head, rows = one.get_tensor(_HEAD), other.get_tensor(table[1])
        if head.dtype == rows.dtype and torch.equal(head, rows):
            return
        raise DataError(
            f"{folder}: config.json ties the output matrix to the embedding table, but lm_head.weight is another",
            effect="transformers 5 computes with it, transformers 4 without: one of two models",
            remedy='if lm_head.weight counts, set "tie_word_embeddings": false in config.json (and model.tied_head = '
            "false in a configuration); else remove it from the weights",
        )


def _tensors(folder: Path) -> dict[str, tuple[Path, tuple[int, ...], str]]:
    """Every tensor of a folder: its file, shape and dtype (`F32`, ...). Raises DataError."""
    paths = _files(folder)
    for path in paths:
        if not path.is_file():
            raise _no_weights(folder, path)
    tensors: dict[str, tuple[Path, tuple[int, ...], str]] = {}
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    view = file.get_slice(name)
                    if name in tensors:
                        raise DataError(f"{name} is in {tensors[name][0].name} and in {path.name} of {folder}")
                    tensors[name] = (path, tuple(view.get_shape()), view.get_dtype())
        except (OSError, SafetensorError) as error:
            raise DataError(f"cannot read the weights of {folder}: {path.name}: {error}") from None
    return tensors


def _files(folder: Path) -> list[Path]:
    """The files that hold the weights. Raises DataError if that is ambiguous."""
    if not (folder / INDEX).is_file():
        return [folder / _WHOLE]
    places = read_json_object(folder / INDEX).get("weight_map")
    named = list(places.values()) if isinstance(places, dict) else []
    if not named or not all(isinstance(name, str) and Path(name).name == name for name in named):
        raise DataError(f"{folder / INDEX} has no weight_map from tensors to files of the folder")
    names = set(named)
    if (folder / _WHOLE).is_file() and names != {_WHOLE}:
        raise DataError(
            f"{folder} holds {_WHOLE}, and {INDEX} names other files: {', '.join(sorted(names)[:3])}",
            effect="one of them is left over from something else; transformers would read the former",
            remedy="move what does not belong to the model out of the folder",
        )
    return [folder / name for name in sorted(names)]


def _no_weights(folder: Path, missing: Path) -> DataError:
    pickles = sorted(folder.glob("*.bin"))
    if pickles:
        return DataError(
            f"{folder} has its weights in {pickles[0].name}, a pickle",
            effect="opening it can run any program",
            remedy="convert it where you trust it: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR, safe_serialization=True)",
        )
    return DataError(f"{missing} is missing")
