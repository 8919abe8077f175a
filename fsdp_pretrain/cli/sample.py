"""`fsdp-pretrain sample`: read what a model writes."""

from __future__ import annotations

import argparse
from pathlib import Path

from fsdp_pretrain.console import CODE, argument, not_negative, positive, verb
from fsdp_pretrain.run.arguments import import_extra

_TOKENS = 200


@verb(
    "sample",
    "runs/quickstart/run 'def ' --tokens 8",
    argument("run", type=Path, metavar="RUN_OR_CHECKPOINT", help="run, step-N directory in it, or exported folder"),
    argument("prompt", help="text to continue; '' begins a document"),
    argument("--step", type=int, help="step of the run's checkpoint to use (default: the newest)"),
    argument(
        "--tokens",
        type=positive,
        help="at most; the text ends with the document (default: 200, or half of what the model reads)",
    ),
    argument(
        "--temperature",
        type=not_negative,
        default=0.8,
        help="above 1 the text is more random, 0 is always the likeliest token (default: 0.8)",
    ),
    argument("--seed", type=int, default=0, help="of the random numbers (default: 0)"),
    argument("--device", help="cpu, cuda, ... (default: the run's eval.device, or cpu)"),
    CODE,
)
def sample(args: argparse.Namespace) -> int:
    """Continue a text with a checkpoint's model; the continuation appears as it is generated."""
    sampling = import_extra("fsdp_pretrain.eval.sampling", "text is generated")
    exported = import_extra("fsdp_pretrain.eval.exported", "text is generated")
    evaluated = exported.open_model(args.run, args.step)
    device = args.device or (evaluated.trained.eval.device if evaluated.trained is not None else "cpu")
    tokens = args.tokens or min(_TOKENS, evaluated.length // 2)
    pieces = sampling.continuation(
        evaluated, args.prompt, tokens=tokens, temperature=args.temperature, seed=args.seed, device=device
    )
    print(args.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0
