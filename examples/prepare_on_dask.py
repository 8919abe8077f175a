"""All parts of `fsdp-data prepare` on the workers of a Dask cluster. See README.md beside this file.

    python examples/prepare_on_dask.py --parts 64 --scheduler tcp://head:8786 -- \\
        's3://bucket/text/*.jsonl.zst' --tokenizer tokenizers/web --out s3://bucket/corpora/web
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from distributed import Client, LocalCluster, as_completed

_TEMPORARY = 75
"""Exit code of what may go well when it is repeated: the storage was busy, say."""


class PartError(Exception):
    """A part ended with another exit code than 0."""


def prepare(arguments: list[str], part: int, parts: int) -> tuple[int, str]:
    """On a worker: make a part; its exit code and what it said. Raises PartError for what is worth a retry."""
    command = [sys.executable, "-m", "data.cli", "prepare", *arguments, "--part", f"{part}/{parts}", "--quiet"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode == _TEMPORARY or done.returncode < 0:  # or killed
        raise PartError(f"part {part}/{parts} ended with {done.returncode}: {done.stderr}")
    return done.returncode, (done.stdout + done.stderr).strip()


def main() -> int:
    """Returns 0, or the exit code of a part that failed; finished shards stay, and the same command goes on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, required=True, help="a few for each worker, so that none waits long")
    parser.add_argument("--scheduler", help="address of a Dask scheduler (default: a cluster on this machine)")
    parser.add_argument("--retries", type=int, default=5, help="of a part whose worker or storage fails (default: 5)")
    parser.add_argument("arguments", nargs="+", help="those of `fsdp-data prepare`, behind --")
    args = parser.parse_args()
    code = 0
    with Client(args.scheduler or LocalCluster(threads_per_worker=1, dashboard_address=None)) as client:
        parts = [
            client.submit(prepare, args.arguments, part, args.parts, retries=args.retries, pure=False)
            for part in range(1, args.parts + 1)
        ]
        for number, future in enumerate(as_completed(parts), 1):
            try:
                ended, text = future.result()
            except PartError as error:
                ended, text = _TEMPORARY, str(error)
            code = code or ended
            print(f"{number} of {args.parts}: {text}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
