"""`fsdp-data VERB`: the commands that make corpora from raw text, and validate them.

Each command imports its modules only when it runs, see `fsdp_pretrain.console`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_pretrain.console import JSON, CommandLine, argument, as_json, byte_count, positive, row, verb
from fsdp_pretrain.errors import DataError
from fsdp_pretrain.remote import is_url
from fsdp_pretrain.units import Progress

if TYPE_CHECKING:
    from fsdp_pretrain.data.corpus.manifest import Vocabulary
    from fsdp_pretrain.data.prepare.jobs import Job
    from fsdp_pretrain.data.prepare.prepare import PrepareOptions
    from fsdp_pretrain.data.text.holdout import Holdout


def main() -> int:
    command = CommandLine("fsdp-data", "Tokenisers, token shards and their validation.")
    command.add(_split, _prepare, _import, _train_tokenizer, _validate, _inspect, _quickstart_corpus)
    return command.run()


def _tokens(text: str) -> int:
    try:
        if value := Progress.parse(f"{text} tokens").value:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens such as 20B")


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with 1 <= I <= N")
    return int(match[1]), int(match[2])


def _holdout(text: str) -> Holdout:
    from fsdp_pretrain.data.text.holdout import Holdout

    try:
        return Holdout.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _whole_number(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _path(text: str) -> Path:
    if is_url(text):  # the message leaves it out, since it may contain a secret
        raise argparse.ArgumentTypeError("a URL; these commands work on files: copy or mount it")
    return Path(text)


def _processors() -> int:
    """Number of processors available to this process."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


_INPUTS = (
    argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        type=_path,
        help="text or JSONL (.gz, .zst too), parquet, or directories of such files",
    ),
    argument("--text-field", default="text", help="JSONL field or parquet column (default: text)"),
    argument("--split", choices=("file", "lines"), default="file", help="a text file is one document, or each line is"),
    argument("--suffix", action="append", default=[], help="take files with this ending from directories (repeatable)"),
    argument("--only", metavar="SPLIT", help="take only this split from directories that hold several, such as train"),
    argument(
        "--max-bad",
        type=_whole_number,
        default=0,
        metavar="N",
        help="pass over and list up to N records without a text (default: 0)",
    ),
)
_ANSWER = argument(
    "--answer-field", help="field or column of the answer: each record is a prompt (its text) with an answer"
)
_HOLDOUT = argument(
    "--holdout",
    type=_holdout,
    metavar="SHARE",
    help="leave out the documents that `fsdp-data split` writes with this share, such as 0.1%%",
)
_EOD = argument("--eod", help="text of the separator token, if the tokenizer does not define one")
_CORPUS = argument("--out", type=_path, required=True, help="corpus directory")
_WORKERS = argument("--workers", type=positive, default=_processors(), help="processes (default: all processors)")
_OVERWRITE = argument("--overwrite", action="store_true", help="replace a corpus made from other inputs or options")
_QUIET = argument("--quiet", action="store_true", help="no progress bar")


@verb(
    "split",
    "runs/quickstart/text/train.jsonl --holdout 1% --out runs/quickstart/heldout-1",
    *_INPUTS,
    _ANSWER,
    argument("--holdout", type=_holdout, required=True, metavar="SHARE", help="share of the documents, such as 0.1%%"),
    argument("--out", type=_path, required=True, help="directory for heldout.jsonl"),
    _WORKERS,
    argument("--overwrite", action="store_true", help="replace what was split from other inputs or options"),
    JSON,
    _QUIET,
)
def _split(args: argparse.Namespace) -> int:
    """Write the documents that are held out by the hash of their text, which are the same whatever the files and
    their order. Interrupted runs continue where they stopped."""
    from fsdp_pretrain.data.prepare.split import split, summary

    report = split(args.inputs, _job(args), _options(args, answer_field=args.answer_field))
    print(as_json(vars(report)) if args.json else summary(report, args.out))
    return 0


@verb(
    "prepare",
    "runs/quickstart/text/train.jsonl --tokenizer runs/quickstart/tokenizer \\\n    --out runs/quickstart/corpus",
    *_INPUTS,
    argument(
        "--tokenizer",
        type=_path,
        required=True,
        help="tokenizer.json, sentencepiece .model, or a directory with one",
    ),
    _EOD,
    _ANSWER,
    _HOLDOUT,
    _CORPUS,
    _WORKERS,
    argument(
        "--shard-size", type=byte_count, help="text per shard, such as 512MB (default: 1/32 of the input, 8MB to 1GB)"
    ),
    argument(
        "--block-tokens", type=_tokens, metavar="N", help="tokens of a block, the unit of shuffling (default: 4M)"
    ),
    argument("--part", type=_part, default=(1, 1), metavar="I/N", help="make only part I of N, for job arrays"),
    _OVERWRITE,
    _QUIET,
)
def _prepare(args: argparse.Namespace) -> int:
    """Tokenise text into a corpus of token shards. Interrupted runs continue where they stopped."""
    from fsdp_pretrain.data.prepare.prepare import prepare, summary
    from fsdp_pretrain.data.text.tokenizer import Tokenizer

    fields = {"shard_bytes": args.shard_size, "answer_field": args.answer_field, "block_tokens": args.block_tokens}
    tokenizer = Tokenizer.load(args.tokenizer, args.eod)
    manifest = prepare(args.inputs, tokenizer, _job(args), _options(args, **fields), args.part)
    if manifest is None:
        print(f"part {args.part[0]}/{args.part[1]} is done; shards of other parts are still missing")
    else:
        print(summary(manifest, args.out))
    return 0


def _job(args: argparse.Namespace) -> Job:
    from fsdp_pretrain.data.prepare.jobs import Job

    return Job(args.out, args.workers, args.overwrite, args.quiet)


def _options(args: argparse.Namespace, **fields: Any) -> PrepareOptions:
    """The options that several commands share; `fields`: further ones, by the name of their field."""
    from fsdp_pretrain.data.prepare.prepare import PrepareOptions

    lines, suffixes = args.split == "lines", tuple(args.suffix)
    return PrepareOptions(
        args.text_field, lines, suffixes, args.only, holdout=args.holdout, max_bad=args.max_bad, **fields
    )


@verb(
    "import",
    "runs/quickstart/corpus/shards --tokenizer runs/quickstart/tokenizer --separators none \\\n"
    "    --out runs/quickstart/adopted",
    argument("sources", nargs="+", type=_path, metavar="SRC", help="token files, or directories of them"),
    argument("--format", choices=("megatron", "arrow", "npy"), help="format of the files (default: by their names)"),
    argument("--tokenizer", type=_path, required=True, help="the tokenizer that made the tokens"),
    _EOD,
    argument(
        "--separators",
        choices=("none", "trailing", "leading"),
        required=True,
        help="separator of every document; all are checked, and any other is refused",
    ),
    _CORPUS,
    _WORKERS,
    argument("--copy", action="store_true", help="copy Megatron shards instead of pointing to them"),
    _OVERWRITE,
    _QUIET,
)
def _import(args: argparse.Namespace) -> int:
    """Adopt token files made elsewhere, without tokenising again. Interrupted runs continue where they stopped."""
    from fsdp_pretrain.data.text.tokenizer import Tokenizer

    from .prepare import import_corpus

    options = import_corpus.ImportOptions(args.format, args.separators, args.copy)
    tokenizer = Tokenizer.load(args.tokenizer, args.eod)
    manifest = import_corpus.ingest(args.sources, tokenizer, _job(args), options)
    print(import_corpus.summary(manifest, args.out))
    return 0


@verb(
    "train-tokenizer",
    "runs/quickstart/text/train.jsonl --kind bpe --vocab-size 1024 \\\n    --out runs/quickstart/tokenizer-1k",
    *_INPUTS,
    argument("--kind", choices=("bpe", "sentencepiece"), required=True),
    argument("--vocab-size", type=positive, required=True),
    _HOLDOUT,
    argument("--max-bytes", type=byte_count, default=2 * 10**9, help="text to train on, sampled evenly (default: 2GB)"),
    argument("--out", type=_path, required=True, help="directory for tokenizer.json or tokenizer.model"),
)
def _train_tokenizer(args: argparse.Namespace) -> int:
    """Train a byte-level BPE (tokenizers) or a sentencepiece tokenizer."""
    from fsdp_pretrain.data.prepare.train_tokenizer import train_tokenizer

    tokenizer = train_tokenizer(
        args.inputs,
        args.out,
        kind=args.kind,
        vocab_size=args.vocab_size,
        options=_options(args),
        max_bytes=args.max_bytes,
    )
    separator = f"{tokenizer.decode([tokenizer.eod])!r} = {tokenizer.eod}"
    print(f"{tokenizer.path}: {tokenizer.vocab_size} tokens, separator {separator}")
    return 0


@verb(
    "validate",
    "runs/quickstart/corpus --json",
    argument("directories", nargs="+", type=_path, metavar="DIR", help="corpora, or token files without a manifest"),
    argument(
        "--format", choices=("megatron", "arrow", "npy"), help="of files without a manifest (default: by their names)"
    ),
    argument("--tokenizer", type=_path, help="compare with this tokenizer"),
    argument("--vocab-size", type=positive, help="for shards without a manifest: vocabulary size"),
    argument("--eod", help="id of the separator of shards without a manifest; with --tokenizer its text, or id"),
    argument("--bos", type=int, help="for shards without a manifest: id of the beginning-of-sequence token"),
    argument(
        "--separators",
        choices=("none", "trailing", "leading", "auto"),
        help="for shards without a manifest: what their documents carry (default: auto, what most of them do)",
    ),
    argument(
        "--against",
        metavar="CONFIG",
        help="run configuration: its model and other sources must fit, and what it is evaluated on must not be in it",
    ),
    argument(
        "--protect",
        action="append",
        default=[],
        type=_path,
        metavar="FILE",
        help="more texts that must not be in it, such as `fsdp-eval texts` writes (repeatable)",
    ),
    argument(
        "--contamination", type=_path, metavar="LIST", help="write the documents that hold such texts, for data.exclude"
    ),
    _WORKERS,
    JSON,
    _QUIET,
)
def _validate(args: argparse.Namespace) -> int:
    """Measure what corpora really hold. Exit 0 clean, 1 warnings, 2 errors."""
    from fsdp_pretrain.config.config import load
    from fsdp_pretrain.data.text.tokenizer import Tokenizer
    from fsdp_pretrain.data.validate import against
    from fsdp_pretrain.data.validate.report import render
    from fsdp_pretrain.data.validate.validate import validate

    eod = int(args.eod) if args.eod and args.eod.isdecimal() else args.eod
    tokenizer = Tokenizer.load(args.tokenizer, eod) if args.tokenizer else None
    of_tokenizer = tokenizer is not None and args.vocab_size is None and args.bos is None
    vocabulary = None if of_tokenizer else _vocabulary(args, eod)
    missing = [
        str(path) for path in args.directories if not (path.exists() or path.with_name(path.name + ".idx").exists())
    ]
    if missing:
        raise DataError(f"there is no {', '.join(missing)}", remedy="look for a mistake in the path")
    run = load(args.against) if args.against else None
    if args.contamination:
        against.check_sources(run, args.directories)
        if not (folder := args.contamination.parent).is_dir():
            raise DataError(f"there is no {folder} for the list of --contamination", remedy=f"mkdir -p {folder}")
    quiet, code, reports = args.quiet or args.json, 0, []
    protection = against.protect_evaluation(run, args.protect, quiet=quiet) if run or args.protect else None
    for directory in args.directories:
        report = validate(
            directory,
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            separators=None if args.separators == "auto" else args.separators,
            format=args.format,
            workers=args.workers,
            held_out=against.heldout_hashes(run, directory) if run is not None else None,
            protection=protection if run is None or not against.is_held_out(run, directory) else None,
            excluded=against.excluded_documents(run, directory) if run is not None else frozenset(),
            quiet=quiet,
        )
        if run is not None:
            report.findings.merge(against.check_against(report, run))
        reports.append(report)
        code = max(code, report.findings.exit_code)
        if not args.json:
            render(report)
    if args.json:
        print(as_json({"exit": code, "corpora": [report.as_dict() for report in reports]}))
    if args.contamination and run is not None:
        against.write_exclusions(args.contamination, run, reports)
    return code


def _vocabulary(args: argparse.Namespace, eod: str | int | None) -> Vocabulary | None:
    """The vocabulary given by --vocab-size, --eod and --bos, if any. Raises DataError."""
    from fsdp_pretrain.data.corpus.manifest import MAX_VOCABULARY, Vocabulary

    if isinstance(eod, str):
        raise DataError(f"--eod {eod}: without --tokenizer it is an id, a number")
    size, ids = args.vocab_size, {"--eod": eod, "--bos": args.bos}
    if size is None and not any(number is not None for number in ids.values()):
        return None
    if size is None or eod is None:
        raise DataError("--vocab-size and --eod describe the ids together: give both")
    if size > MAX_VOCABULARY:
        raise DataError(f"--vocab-size {size} is more than {MAX_VOCABULARY}")
    for option, number in ids.items():
        if number is not None and not 0 <= number < size:
            raise DataError(f"{option} {number} is not an id of a vocabulary of {size}")
    return Vocabulary(size, eod, frozenset(number for number in ids.values() if number is not None))


@verb(
    "inspect",
    "runs/quickstart/corpus --doc 7",
    argument("directory", type=_path, metavar="DIR", help="corpus"),
    argument("--doc", type=int, help="number of the document to show, counted over all shards"),
    JSON,
)
def _inspect(args: argparse.Namespace) -> int:
    """Show what a corpus holds, or one of its documents."""
    from fsdp_pretrain.data.corpus.corpus import Corpus
    from fsdp_pretrain.data.validate.texts import document

    corpus = Corpus(args.directory)
    if args.doc is not None:
        place, text = document(corpus, args.doc)
        print(place, file=sys.stderr)
        print(text)
        return 0
    manifest = corpus.manifest
    if args.json:
        print(manifest.model_dump_json(indent=1))
        return 0
    entry = manifest.tokenizer
    print(f"{args.directory}: {manifest.documents:_} documents, {manifest.tokens:_} tokens of {manifest.dtype}")
    identity = f"separator id {entry.eod}, {entry.fingerprint[:12]}"
    print(row("tokenizer", f"{entry.kind}, {entry.vocab_size} tokens, {identity}"))
    print(row("separators", f"stored with each document: {manifest.separators}"))
    if manifest.pairs:
        print(row("documents", "in pairs: a prompt, then its answer"))
    if holdout := manifest.statistics.get("holdout"):
        print(row("held out", f"{manifest.statistics['held_out']:_} documents ({holdout})"))
    print(row("fingerprint", manifest.fingerprint))
    for shard in manifest.shards:
        where = f" ({shard.path})" if shard.path else ""
        print(f"  {shard.name}: {shard.documents:_} documents, {shard.tokens:_} tokens{where}")
    return 0


@verb(
    "quickstart-corpus",
    "--out runs/quickstart/text",
    argument("--out", type=Path, required=True, help="directory for train.jsonl and heldout.jsonl"),
)
def _quickstart_corpus(args: argparse.Namespace) -> int:
    """Write a real corpus from what every Python installation carries (no download). If it is there already, it
    stays."""
    from .prepare import quickstart

    if all((args.out / f"{split}.jsonl").exists() for split in quickstart.SPLITS):
        print(f"{args.out}: already there, unchanged")
        return 0
    for split, sizes in quickstart.build(args.out).items():
        print(f"{args.out / (split + '.jsonl')}: {len(sizes)} documents, {sum(sizes) / 1e6:.2f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
