"""`fsdp-data VERB`: from raw text to a corpus that can be trusted. Runs without torch."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from fsdp_pretrain import config
from fsdp_pretrain.console import Command, byte_count, positive
from fsdp_pretrain.errors import DataError
from fsdp_pretrain.units import Progress

from . import adopt, bench, quickstart, simulate
from .corpus import MAX_VOCABULARY, Corpus, Vocabulary
from .jobs import default_workers
from .prepare import Options, prepare, summary
from .report import decode_any, render
from .tokenizer import Tokenizer
from .train_tokenizer import train_tokenizer
from .validate import check_against, validate


def main() -> int:
    """Entry point of the console script."""
    command = Command("fsdp-data", "Tokenisers, token shards and their validation.")
    _add_prepare(command)
    _add_import(command)
    _add_train_tokenizer(command)
    _add_validate(command)
    _add_inspect(command)
    _add_bench(command)
    parser = command.verb(
        "quickstart-corpus",
        _quickstart_corpus,
        "Write a real corpus from what every Python installation carries (no download).",
        "fsdp-data quickstart-corpus --out runs/quickstart/text",
    )
    parser.add_argument("--out", type=Path, required=True, help="directory for train.jsonl and heldout.jsonl")
    return command.run()


def _add_input_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="text, JSONL or parquet files (.gz, .zst too), or directories",
    )
    parser.add_argument("--text-field", default="text", help="JSONL field or parquet column (default: text)")
    parser.add_argument(
        "--split",
        choices=("file", "lines"),
        default="file",
        help="a text file is one document, or each line is",
    )
    parser.add_argument(
        "--suffix", action="append", default=[], help="take files ending so from directories (repeatable)"
    )


def _add_prepare(command: Command) -> None:
    parser = command.verb(
        "prepare",
        _prepare,
        "Tokenise text into a corpus of token shards. Interrupted runs continue where they stopped.",
        "fsdp-data prepare runs/quickstart/text/train.jsonl --tokenizer runs/quickstart/tokenizer \\\n"
        "    --out runs/quickstart/corpus",
    )
    _add_input_arguments(parser)
    parser.add_argument(
        "--tokenizer", required=True, help="tokenizer.json, sentencepiece .model, or a directory with one"
    )
    parser.add_argument("--eod", help="document separator, if the tokenizer does not say (text of the token)")
    parser.add_argument(
        "--answer-field", help="field or column of the answer: each record is a prompt (its text) with an answer"
    )
    parser.add_argument("--out", type=Path, required=True, help="corpus directory")
    parser.add_argument(
        "--workers", type=positive, default=default_workers(), help="processes (default: all processors)"
    )
    parser.add_argument(
        "--shard-size",
        type=byte_count,
        help="text per shard, such as 512MB (default: 1/32 of the input, 8MB to 1GB)",
    )
    parser.add_argument(
        "--part", type=_part, default=(1, 1), metavar="I/N", help="make only part I of N, for job arrays"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a corpus made from other inputs or options")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _add_import(command: Command) -> None:
    parser = command.verb(
        "import",
        _import,
        "Adopt token files made elsewhere, without tokenising again. Interrupted runs continue where they stopped.",
        "fsdp-data import runs/quickstart/corpus/shards --tokenizer runs/quickstart/tokenizer --separators none \\\n"
        "    --out runs/quickstart/adopted",
    )
    parser.add_argument("sources", nargs="+", type=Path, metavar="SRC", help="token files, or directories of them")
    parser.add_argument(
        "--format", choices=("megatron", "arrow", "npy", "bin"), help="format of the files (default: by their names)"
    )
    parser.add_argument("--tokenizer", required=True, help="the tokenizer that made the tokens")
    parser.add_argument("--eod", help="document separator, if the tokenizer does not say (text of the token)")
    parser.add_argument(
        "--separators",
        choices=("none", "trailing", "leading"),
        required=True,
        help="what each document carries; measured, and refused if one carries anything else",
    )
    parser.add_argument("--out", type=Path, required=True, help="corpus directory")
    parser.add_argument(
        "--workers", type=positive, default=default_workers(), help="processes (default: all processors)"
    )
    parser.add_argument("--copy", action="store_true", help="copy Megatron shards instead of pointing to them")
    parser.add_argument("--dtype", help="integer type of bin files (default: uint16)")
    parser.add_argument("--overwrite", action="store_true", help="replace a corpus made from other files or options")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _add_train_tokenizer(command: Command) -> None:
    parser = command.verb(
        "train-tokenizer",
        _train_tokenizer,
        "Train a byte-level BPE (tokenizers) or a sentencepiece tokenizer.",
        "fsdp-data train-tokenizer runs/quickstart/text/train.jsonl --kind bpe --vocab-size 1024 \\\n"
        "    --out runs/quickstart/tokenizer-1k",
    )
    _add_input_arguments(parser)
    parser.add_argument("--kind", choices=("bpe", "sentencepiece"), required=True)
    parser.add_argument("--vocab-size", type=positive, required=True)
    parser.add_argument(
        "--max-bytes", type=byte_count, default=2 * 10**9, help="text to learn from, evenly chosen (default: 2GB)"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory for tokenizer.json or tokenizer.model")


def _add_validate(command: Command) -> None:
    parser = command.verb(
        "validate",
        _validate,
        "Measure what corpora really hold. Exit 0 clean, 1 warnings, 2 errors.",
        "fsdp-data validate runs/quickstart/corpus --json",
    )
    parser.add_argument(
        "directories", nargs="+", type=Path, metavar="DIR", help="corpora, or token files without a manifest"
    )
    parser.add_argument(
        "--format",
        choices=("megatron", "arrow", "npy", "bin", "text"),
        help="of files without a manifest (default: by their names)",
    )
    parser.add_argument("--dtype", help="integer type of bin files (default: uint16)")
    parser.add_argument("--tokenizer", help="compare with this tokenizer")
    parser.add_argument("--vocab-size", type=positive, help="for shards without a manifest: vocabulary size")
    parser.add_argument("--eod", type=int, help="for shards without a manifest: id of the separator")
    parser.add_argument("--bos", type=int, help="for shards without a manifest: id of the beginning-of-sequence token")
    parser.add_argument(
        "--separators",
        choices=("none", "trailing", "leading", "auto"),
        help="for shards without a manifest: what their documents carry (default: auto, what most of them do)",
    )
    parser.add_argument("--against", help="run configuration whose model and other sources must fit the corpus")
    parser.add_argument(
        "--workers", type=positive, default=default_workers(), help="processes (default: all processors)"
    )
    parser.add_argument("--no-checksums", dest="checksums", action="store_false", help="do not compare file checksums")
    parser.add_argument("--json", action="store_true", help="machine-readable report on standard output")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _add_inspect(command: Command) -> None:
    parser = command.verb(
        "inspect",
        _inspect,
        "Show what a corpus holds, or one of its documents.",
        "fsdp-data inspect runs/quickstart/corpus --doc 7",
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--doc", type=int, help="number of the document to show, counted over all shards")
    parser.add_argument("--json", action="store_true", help="the manifest as JSON")


def _add_bench(command: Command) -> None:
    parser = command.verb(
        "bench",
        _bench,
        "Time the packer on a corpus, or on a synthetic one.",
        "fsdp-data bench runs/quickstart/corpus --sequence-length 2048",
    )
    parser.add_argument("directory", type=Path, nargs="?", metavar="DIR", help="corpus (default: a synthetic one)")
    parser.add_argument("--tokens", type=_tokens, default=10**8, help="size of the synthetic corpus (default: 100M)")
    parser.add_argument("--sequence-length", type=positive, default=2048, help="tokens per sample (default: 2048)")
    parser.add_argument("--batch", type=positive, default=8, help="samples per call (default: 8)")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of each of three rounds (default: 1.5)")
    parser.add_argument("--cold", action="store_true", help="do not read the corpus into memory first")
    parser.add_argument(
        "--simulate",
        type=_tokens,
        metavar="TOKENS",
        help="instead, what a training process needs on a corpus of this size (2T), whose tokens are not stored",
    )
    parser.add_argument(
        "--shards", type=positive, default=20_000, help="shards of the simulated corpus (default: 20000)"
    )
    parser.add_argument(
        "--world", type=positive, default=1024, help="ranks that share the simulated corpus (default: 1024)"
    )
    parser.add_argument("--json", action="store_true", help="the figures as JSON")


def _prepare(args: argparse.Namespace) -> int:
    options = Options(
        args.text_field,
        args.split == "lines",
        tuple(args.suffix),
        args.shard_size,
        answer_field=args.answer_field,
    )
    manifest = prepare(
        args.inputs,
        Tokenizer.load(args.tokenizer, args.eod),
        args.out,
        options,
        workers=args.workers,
        part=args.part,
        overwrite=args.overwrite,
        quiet=args.quiet,
    )
    if manifest is None:
        print(f"part {args.part[0]}/{args.part[1]} is done; shards of other parts are still missing")
    else:
        print(summary(manifest, args.out))
    return 0


def _import(args: argparse.Namespace) -> int:
    manifest = adopt.adopt(
        args.sources,
        Tokenizer.load(args.tokenizer, args.eod),
        args.out,
        adopt.Options(args.format, args.separators, args.copy, args.dtype),
        workers=args.workers,
        overwrite=args.overwrite,
        quiet=args.quiet,
    )
    print(adopt.summary(manifest, args.out))
    return 0


def _train_tokenizer(args: argparse.Namespace) -> int:
    tokenizer = train_tokenizer(
        args.inputs,
        args.out,
        kind=args.kind,
        vocab_size=args.vocab_size,
        options=Options(args.text_field, args.split == "lines", tuple(args.suffix)),
        max_bytes=args.max_bytes,
    )
    print(
        f"{tokenizer.path}: {tokenizer.vocab_size} tokens, "
        f"separator {tokenizer.decode([tokenizer.eod])!r} = {tokenizer.eod}"
    )
    return 0


def _validate(args: argparse.Namespace) -> int:
    tokenizer = Tokenizer.load(args.tokenizer) if args.tokenizer else None
    vocabulary = _vocabulary(args)
    missing = [str(d) for d in args.directories if not (d.exists() or d.with_name(d.name + ".idx").exists())]
    if missing:
        raise DataError(f"there is no {', '.join(missing)}")
    run = config.load(args.against) if args.against else None
    code, reports = 0, []
    for directory in args.directories:
        report = validate(
            directory,
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            separators=None if args.separators == "auto" else args.separators,
            format=args.format,
            dtype=args.dtype,
            workers=args.workers,
            checksums=args.checksums,
            quiet=args.quiet or args.json,
        )
        if run is not None:
            report.findings.merge(check_against(report, run))
        reports.append(report)
        code = max(code, report.findings.exit_code)
        if not args.json:
            render(report)
    if args.json:
        json.dump({"exit": code, "corpora": [report.as_dict() for report in reports]}, sys.stdout, indent=1)
        print()
    return code


def _vocabulary(args: argparse.Namespace) -> Vocabulary | None:
    """What --vocab-size, --eod and --bos say, if anything. Raises DataError."""
    size, ids = args.vocab_size, {"--eod": args.eod, "--bos": args.bos}
    if size is None and not any(number is not None for number in ids.values()):
        return None
    if size is None or args.eod is None:
        raise DataError("--vocab-size and --eod describe the ids together: give both")
    if size > MAX_VOCABULARY:
        raise DataError(f"--vocab-size {size} is more than {MAX_VOCABULARY}")
    for option, number in ids.items():
        if number is not None and not 0 <= number < size:
            raise DataError(f"{option} {number} is not an id of a vocabulary of {size}")
    return Vocabulary(size, args.eod, frozenset(number for number in ids.values() if number is not None))


def _inspect(args: argparse.Namespace) -> int:
    corpus = Corpus(args.directory)
    manifest = corpus.manifest
    if args.json:
        print(manifest.model_dump_json(indent=1))
        return 0
    if args.doc is None:
        entry = manifest.tokenizer
        print(f"{args.directory}: {manifest.documents:_} documents, {manifest.tokens:_} tokens of {manifest.dtype}")
        print(
            f"  tokenizer   {entry.kind}, {entry.vocab_size} tokens, separator id {entry.eod}, {entry.fingerprint[:12]}"
        )
        print(f"  separators  stored with each document: {manifest.separators}")
        if manifest.pairs:
            print("  documents   in pairs: a prompt, then its answer")
        print(f"  fingerprint {manifest.fingerprint}")
        for shard in manifest.shards:
            where = f" ({shard.path})" if shard.path else ""
            print(f"  {shard.name}: {shard.documents:_} documents, {shard.tokens:_} tokens{where}")
        return 0
    number = args.doc
    for index, shard in enumerate(manifest.shards):
        if 0 <= number < shard.documents:
            tokens = corpus.shard(index).document(number)
            print(f"{shard.name}, document {number}: {len(tokens)} tokens", file=sys.stderr)
            print(decode_any(tokens.tolist(), corpus.tokenizer()))
            return 0
        number -= shard.documents
    raise DataError(f"there is no document {args.doc}: the corpus has {manifest.documents}")


def _bench(args: argparse.Namespace) -> int:
    if args.simulate:
        figures = simulate.simulate(args.simulate, args.shards, sequence_length=args.sequence_length, world=args.world)
        print(json.dumps(figures, indent=1) if args.json else bench.render(figures))
        return 0
    figures = bench.bench(
        args.directory,
        tokens=args.tokens,
        sequence_length=args.sequence_length,
        batch=args.batch,
        seconds=args.seconds,
        warm=not args.cold,
    )
    print(json.dumps(figures, indent=1) if args.json else bench.render(figures))
    return 0


def _quickstart_corpus(args: argparse.Namespace) -> int:
    counts = quickstart.build(args.out)
    for split in ("train", "heldout"):
        documents, size = counts[f"{split}_documents"], counts[f"{split}_bytes"]
        print(f"{args.out / (split + '.jsonl')}: {documents} documents, {size / 1e6:.2f} MB")
    return 0


def _tokens(text: str) -> int:
    try:
        return Progress.parse(f"{text} tokens").value
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens such as 20B") from None


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N with 1 <= I <= N")
    return int(match[1]), int(match[2])


if __name__ == "__main__":
    sys.exit(main())
