"""Lean FSDP2 pre-training: the trainer, its checkpoints, its record and its operator commands.

`data` and `eval` are top-level packages of this project with common names, so importing `fsdp_pretrain` checks that
Python finds ours.
"""

from importlib.util import find_spec
from pathlib import Path

__version__ = "0.1.0"


def _check_siblings() -> None:
    """Raise ImportError if a foreign `data` or `eval` hides ours, such as a `data.py` in the working directory."""
    root = Path(__file__).resolve().parent.parent
    for package, module in (("data", "packing"), ("eval", "harness")):
        found = find_spec(package)
        # A plain folder `data` has no origin, and hides nothing. A foreign package or module does, even if an editable
        # installation still finds our `data.packing` under it.
        ours = found is not None and (found.origin is None or Path(found.origin).resolve().is_relative_to(root))
        if ours and find_spec(f"{package}.{module}") is not None:
            continue
        where = (found.origin or str(list(found.submodule_search_locations or []))) if found else "nothing"
        raise ImportError(
            f"fsdp_pretrain needs its own package {package!r} from {root / package}, but Python finds {where}. "
            f"Start from another directory, or set PYTHONSAFEPATH=1 so that the working directory is not searched."
        )


_check_siblings()
