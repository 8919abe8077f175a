"""Lean FSDP2 pre-training: the trainer, its checkpoints, its record and its operator commands.

`data` and `eval` are top-level packages of this project, with names that other projects use too. Importing
`fsdp_pretrain` therefore checks, once, that the ones Python would pick are ours.
"""

from importlib.util import find_spec
from pathlib import Path

__version__ = "0.1.0"


def _check_siblings() -> None:
    """Raise ImportError if a foreign `data` or `eval` hides ours (a `data.py` in the working directory, say)."""
    root = Path(__file__).resolve().parent.parent
    for module in ("data.packer", "eval.harness"):
        package = module.partition(".")[0]
        try:
            spec = find_spec(module)
        except ImportError:  # `data` is a module, not a package
            spec = None
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        if found is not None and found.is_relative_to(root):
            continue
        intruder = find_spec(package)
        where = (intruder.origin or str(list(intruder.submodule_search_locations or []))) if intruder else "nothing"
        raise ImportError(
            f"fsdp_pretrain needs its own package {package!r} from {root / package}, but Python finds {where}. "
            f"Start from another directory, or set PYTHONSAFEPATH=1 so that the working directory is not searched."
        )


_check_siblings()
