"""Wheels for a GPU machine without a network: what it lacks, for CPython 3.12 on x86-64, within a limit of size.

    python benchmarks/gpu_wheels.py DIR                    (downloads into DIR; prints what is there and what is not)
    python benchmarks/gpu_wheels.py DIR --limit-mib 62     (of the wheels and this checkout's own files together)

There:  python3 -m pip install --no-index --no-deps --target SITE DIR/*.whl; PYTHONPATH=SITE python3 benchmarks/gpu.py

A set is taken whole or left out: first pydantic with what it needs, without which no recipe is read, then the rival's
kernels (Liger, 1 MB), then bitsandbytes, if it still fits. torch, transformers, accelerate, peft and what they need are
taken to be there. Exit code: 0 all sets are there; 1 pydantic's is not; 3 a later one was left out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
LIMIT_MIB = 62.0
PYTHON = (3, 12)
GLIBC = 39  # minor version of the newest 2.x that wheels may be built for: Ubuntu 24.04's
# By name; `needs`: whether what it needs comes along, else it is there (bitsandbytes: torch, numpy, packaging; Liger:
# torch, triton).
SETS: Mapping[str, bool] = {"pydantic": True, "liger-kernel": False, "bitsandbytes": False}
NOT_TAKEN = 3


@dataclass(frozen=True)
class WheelSet:
    """What one package needs to be installed there."""

    name: str
    sizes: Mapping[str, int]  # bytes by file name

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())


def platforms() -> list[str]:
    """The platforms whose wheels run there, newest first."""
    return [f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)] + [
        *("manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64")
    ]


def tags() -> frozenset[Tag]:
    """What a wheel's name may say, to be installed there."""
    interpreter = f"cp{PYTHON[0]}{PYTHON[1]}"
    return frozenset([*cpython_tags(PYTHON, platforms=platforms()), *compatible_tags(PYTHON, interpreter, platforms())])


def plan(sets: Iterable[WheelSet], *, tree: int, limit: float) -> tuple[list[WheelSet], dict[str, str]]:
    """The sets that are taken, and why each other one is not.

    Args:
        tree: Bytes of the files that travel along.
        limit: Bytes of all together.
    """
    taken: list[WheelSet] = []
    left_out: dict[str, str] = {}
    fits = tags()
    for each in sets:
        names = {file: parse_wheel_filename(file) for file in each.sizes}
        foreign = [file for file, (*_, its_tags) in names.items() if not its_tags & fits]
        here = {canonicalize_name(parse_wheel_filename(file)[0]): file for one in taken for file in one.sizes}
        twice = [file for file, (name, *_) in names.items() if here.get(name, file) != file]
        total = tree + sum(one.bytes for one in taken) + each.bytes
        if not each.sizes:
            left_out[each.name] = "no wheels of it were found"
        elif foreign:
            left_out[each.name] = f"{foreign[0]} is not for CPython {PYTHON[0]}.{PYTHON[1]} on x86-64"
        elif twice:
            left_out[each.name] = f"{twice[0]} would be a second version of a package"
        elif total > limit:
            left_out[each.name] = f"{total / MIB:.1f} MiB with it, {limit / MIB:.1f} may travel"
        else:
            taken.append(each)
    return taken, left_out


def download(name: str, folder: Path, *, needs: bool) -> WheelSet:
    """The wheels of one package in `folder`, those of what it needs too; none where pip finds none, and says why."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:", "--dest", str(folder)]
    command += ["--python-version", f"{PYTHON[0]}.{PYTHON[1]}", "--implementation", "cp"]
    command += [word for platform in platforms() for word in ("--platform", platform)]
    command += [] if needs else ["--no-deps"]
    done = subprocess.run([*command, name])
    files = sorted(folder.glob("*.whl")) if done.returncode == 0 else []
    return WheelSet(name, {file.name: file.stat().st_size for file in files})


def tree_bytes(root: Path = ROOT) -> int:
    """Bytes of a checkout's files that travel: tracked ones, and others that git does not ignore."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=root, capture_output=True, check=True).stdout
    files = {root / name.decode() for name in listed.split(b"\0") if name}
    return sum(file.stat().st_size for file in files if file.is_file())


def main(words: Sequence[str] | None = None, fetch: Callable[..., WheelSet] = download) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--limit-mib", type=float, default=LIMIT_MIB)
    asked = parser.parse_args(words)
    folder: Path = asked.folder
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    tree = tree_bytes()
    with tempfile.TemporaryDirectory() as name:
        places = {package: Path(name, package) for package in SETS}
        sets = [fetch(package, places[package], needs=needs) for package, needs in SETS.items()]
        taken, left_out = plan(sets, tree=tree, limit=asked.limit_mib * MIB)
        for each in taken:
            for file in each.sizes:
                (folder / file).write_bytes((places[each.name] / file).read_bytes())
    for each in taken:
        print(f"{each.name}: {each.bytes / MIB:.1f} MiB: {', '.join(each.sizes)}")
    for package, why in left_out.items():
        print(f"{package}: not taken: {why}")
    total = tree + sum(each.bytes for each in taken)
    print(f"{total / MIB:.1f} MiB with this checkout's own {tree / MIB:.1f}; {asked.limit_mib:g} may travel")
    first = next(iter(SETS))
    return 1 if first in left_out else NOT_TAKEN if left_out else 0


if __name__ == "__main__":
    sys.exit(main())
