"""Loss curves of runs as an SVG: `python scripts/plot_losses.py NAME=RUN... > curves.svg`.

Nothing but the record is read. Each point is the loss of ten steps: its sum over their targets by their number.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fsdp_pretrain.run.files import RunDir
from fsdp_pretrain.run.metrics import read_metrics

WIDTH, HEIGHT, LEFT, TOP = 640, 320, 40, 15
COLOURS = ("#1b6ca8", "#c1440e", "#3a7d44", "#7a4fa3")
STEPS_PER_POINT = 10


def points(run: Path) -> list[tuple[int, float]]:
    """Points (step, loss), one for ten steps of the kept line."""
    records = list(read_metrics(RunDir(run)))
    curve: list[tuple[int, float]] = []
    for start in range(0, len(records), STEPS_PER_POINT):
        part = records[start : start + STEPS_PER_POINT]
        losses = [(record.loss.sum, record.loss.count) for record in part if record.loss.sum is not None]
        if losses:
            total, count = map(sum, zip(*losses, strict=True))
            curve.append((part[-1].step, total / count))
    return curve


def draw(curves: dict[str, list[tuple[int, float]]]) -> str:
    """All curves on one pair of axes."""
    last = max(step for curve in curves.values() for step, _ in curve)
    losses = [loss for curve in curves.values() for _, loss in curve]
    low, high = int(min(losses)), int(max(losses)) + 1

    def x(step: float) -> float:
        return LEFT + step / last * (WIDTH - LEFT - 60)

    def y(loss: float) -> float:
        return TOP + (high - loss) / (high - low) * (HEIGHT - TOP - 30)

    def text(at: tuple[float, float], words: object, more: str = "") -> str:
        return f'<text x="{at[0]:.0f}" y="{at[1]:.0f}"{more}>{words}</text>'

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"',
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for loss in range(low, high + 1):
        lines.append(f'<path d="M{LEFT} {y(loss):.0f}H{x(last):.0f}" stroke="#ddd"/>')
        lines.append(text((LEFT - 8, y(loss) + 4), loss, ' text-anchor="end"'))
    lines += [text((x(last * n / 6), HEIGHT - 12), last * n // 6, ' text-anchor="middle"') for n in range(7)]
    for colour, (name, curve) in zip(COLOURS, curves.items(), strict=False):
        path = "L".join(f"{x(step):.1f} {y(loss):.1f}" for step, loss in curve)
        lines.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        lines.append(text((x(curve[-1][0]) + 5, y(curve[-1][1]) + 4), name, f' fill="{colour}"'))
    return "\n".join([*lines, "</svg>"])


if __name__ == "__main__":
    arguments = [argument.partition("=") for argument in sys.argv[1:]]
    if not arguments or not all(run for *_, run in arguments):
        sys.exit(__doc__)
    print(draw({name: points(Path(run)) for name, _, run in arguments}))
