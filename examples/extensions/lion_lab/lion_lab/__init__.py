"""The optimiser Lion, and an observer that writes a histogram of the gradients. No torch here."""

from typing import Literal

from fsdp_pretrain.config.base import Positive
from fsdp_pretrain.config.sections import ObserverSection, OptimizerSection
from fsdp_pretrain.extensions import Extension, Part


class LionSection(OptimizerSection):
    """The settings of any optimiser; `betas` are Lion's."""

    kind: Literal["lion_lab:lion"]  # type: ignore[assignment]
    """The optimiser."""


class HistogramSection(ObserverSection):
    """Histograms in `histograms.jsonl` of the run."""

    use: Literal["lion_lab:histogram"]
    """The observer."""
    every: Positive = 10
    """Steps between two histograms."""


extension = Extension(
    optimizers={"lion": Part(LionSection, code="lion_lab.parts:Lion")},
    observers={"histogram": Part(HistogramSection, code="lion_lab.parts:Histogram")},
)
