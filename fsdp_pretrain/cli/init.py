"""`fsdp-pretrain init`: copies the starting set, `fsdp_pretrain/starter`, which holds links to directories of the
repository; a wheel has the files themselves. Or an example of an extension, under another name."""

from __future__ import annotations

import argparse
import shlex
import sys
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path

from fsdp_pretrain.console import argument, verb
from fsdp_pretrain.errors import ConfigError, shortened

STARTER = Path(__file__).resolve().parent.parent / "starter"

_NEXT = """\
{count} files in {directory}: configurations (configs/), Slurm scripts (scripts/slurm/). They are yours to change.

Try it: a small model on two processes, a few minutes on any machine, nothing is downloaded:
  cd {directory}
  in=runs/quickstart
  fsdp-data quickstart-corpus --out $in/text
  fsdp-data train-tokenizer $in/text/train.jsonl --kind bpe --vocab-size 2048 --out $in/tokenizer
  fsdp-data prepare $in/text/train.jsonl --tokenizer $in/tokenizer --out $in/corpus
  fsdp-data prepare $in/text/heldout.jsonl --tokenizer $in/tokenizer --out $in/heldout
  fsdp-pretrain launch --nproc-per-node 2 configs/runs/quickstart.toml

Your own: change configs/runs/llama-7b-hsdp.toml, then:
  fsdp-pretrain plan configs/runs/llama-7b-hsdp.toml --world-size 8
  sbatch --nodes 1 scripts/slurm/train.sbatch configs/runs/llama-7b-hsdp.toml
"""


_MINIMAL = "configs/runs/minimal.toml"
_EXTENSION = "parallel_block"
"""The example that becomes an extension."""
_NEXT_EXTENSION = """\
{count} files in {directory}: the package {name}, a family whose blocks compute both branches at once, and its test.

Try it:
  pytest {directory}/test_{name}.py
In a configuration: code.packages = ["{name}"], model.family = "{name}:llama", and PYTHONPATH={directory} in the
environment of all ranks (or install the package). docs/extend.md leads on.
"""


@verb(
    "init",
    "my-project",
    argument("directory", type=Path, metavar="DIR", help="may exist; made if it does not"),
    argument("--extension", metavar="NAME", help="write a package with parts of your own instead, see docs/extend.md"),
    argument("--minimal", action="store_true", help="write only one commented configuration, DIR/run.toml, instead"),
)
def init(args: argparse.Namespace) -> int:
    """Copy a starting set into a directory: configurations of models and runs, alert rules, Slurm scripts, a JobSet.
    Files that were copied before and changed are never overwritten."""
    from fsdp_pretrain.files import create_file

    directory: Path = args.directory
    if args.extension is not None:
        if args.minimal:
            raise ConfigError("--extension and --minimal write different things", effect="nothing was written")
        return _write_extension(directory, args.extension)
    if args.minimal:
        directory.mkdir(parents=True, exist_ok=True)
        if (target := directory / "run.toml").exists():
            raise ConfigError(f"{target} exists", effect="nothing was written")
        create_file(target, (STARTER / _MINIMAL).read_bytes())
        print(f"{target}: change it, then: fsdp-pretrain plan {shlex.quote(str(target))} --world-size 8")
        return 0
    if not starting_set():
        raise ConfigError(f"{STARTER} is empty: the installation is incomplete", remedy="install the project again")
    files = {directory / path.relative_to(STARTER): path for path in starting_set()}
    changed = [str(target) for target, source in files.items() if target.exists() and not _same(target, source)]
    if changed:
        raise ConfigError(
            f"these files exist and are not those of this version:\n{shortened(changed)}",
            effect="nothing was copied",
            remedy="name another directory, and take over from there what you want",
        )
    for target, source in files.items():
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            create_file(target, source.read_bytes())
            target.chmod(source.stat().st_mode)
    print(_NEXT.format(count=len(files), directory=shlex.quote(str(directory))), end="")
    return 0


def _write_extension(directory: Path, name: str) -> int:
    """Write a package called `name`, and its test. Raises ConfigError if the name is none, or a file exists."""
    from fsdp_pretrain.files import create_file

    if not name.isidentifier() or iskeyword(name):
        raise ConfigError(f"--extension {name}: not a name of a Python package", remedy="letters, digits and _")
    found = None if name in sys.modules else find_spec(name)
    if name in sys.modules or (found is not None and found.origin is not None):
        raise ConfigError(
            f"--extension {name}: there is a package of this name already",
            effect="yours would be imported in its place",
            remedy="choose another name",
        )
    template = STARTER / "extension"
    sources = sorted(template.rglob("*.py"))
    files = {directory / str(path.relative_to(template)).replace(_EXTENSION, name): path for path in sources}
    if existing := [str(target) for target in files if target.exists()]:
        raise ConfigError(f"these files exist:\n{shortened(existing)}", effect="nothing was written")
    for target, source in files.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        create_file(target, source.read_text(encoding="utf-8").replace(_EXTENSION, name).encode())
    print(_NEXT_EXTENSION.format(count=len(files), directory=shlex.quote(str(directory)), name=name), end="")
    return 0


def starting_set() -> list[Path]:
    """All files of the starting set, in `STARTER`."""
    folders = sorted(path for kind in ("configs", "scripts") for path in STARTER.glob(f"{kind}/*") if path.is_dir())
    return sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())


def _same(target: Path, source: Path) -> bool:
    return target.is_file() and target.read_bytes() == source.read_bytes()
