"""Makes the plain `lm_eval` command know the model `fsdp_pretrain`.

lm-eval has no plug-ins. But it imports torch before it looks its model up, and torch calls what is installed under the
entry point `torch.backends` (see docs/decisions.md). A module beside the packages: every program of the environment
that imports torch imports it too, so it is small, and cannot be hidden by an `eval.py` of theirs.
"""

import sys


def register() -> None:
    """Name the model in lm-eval's registry, if this is a program that runs lm-eval; it is imported when it is used."""
    if "lm_eval" not in sys.modules:
        return
    from lm_eval.api import registry

    known = getattr(registry, "model_registry", None)  # since 0.4.10
    if known is not None and "fsdp_pretrain" not in known:
        import lm_eval.models  # noqa: F401  lm-eval adds its own models only to an empty registry

        known.register("fsdp_pretrain", target="eval.registered:RegisteredLM")
