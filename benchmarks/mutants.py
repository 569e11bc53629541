"""Mutates given files at random, by seed, runs their tests, and reports which mutants the tests did not notice.

    python benchmarks/mutants.py finetune/training/update.py --tests tests/training/test_update.py --count 20 --seed 1

cosmic-ray makes the mutants (pip install -e '.[mutants]'): another operator, another number, a loop that does not
run, and so on. mutmut was tried too: it rewrites a whole package and runs all tests in its own process, which does not
suit tests that start ranks. A copy of the checkout is mutated, never the checkout itself. Each mutant's tests run in a
fork of this process, which has imported the libraries once.

A mutant that survives is a missing test, or a change without effect. Only a reader can tell.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
COPIED = (
    "finetune",
    "tests",
    "benchmarks",
    "lectures",
    "recipes",
    "accelerate_configs",
    "data",
    "docs",
    "pyproject.toml",
)
# Plugins of pytest that a library has imported already.
WARNINGS = ("-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
LIBRARIES = ("torch", "transformers", "accelerate", "peft")  # imported before the first fork


class Mutant(NamedTuple):
    """One change of one file, by cosmic-ray's names."""

    file: Path  # in the checkout
    operator: str
    occurrence: int


def mutants_of(file: Path) -> list[Mutant]:
    """Every mutant that cosmic-ray can make of this file."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    nodes = list(ast_nodes(get_ast((ROOT / file).read_text("utf-8"))))
    found = []
    for name in operator_names():
        kind = get_operator(name)
        if kind.arguments() or "BitOr" in name:  # those that want variables' names; `|` stands in annotations
            continue
        operator = kind()
        count = sum(1 for node in nodes for _ in operator.mutation_positions(node))
        found += [Mutant(file, name, occurrence) for occurrence in range(count)]
    return found


def drawn(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """So many of them, equally likely for each operator, so that numbers do not crowd out the rest."""
    generator = random.Random(seed)
    by_operator: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_operator.setdefault(mutant.operator, []).append(mutant)
    for group in by_operator.values():
        generator.shuffle(group)
    result: list[Mutant] = []
    while len(result) < count and by_operator:
        name = generator.choice(sorted(by_operator))
        result.append(by_operator[name].pop())
        if not by_operator[name]:
            del by_operator[name]
    return result


def passes(tests: list[str], select: str, timeout: float) -> bool:
    """Whether these tests pass, in a fork of this process."""
    child = os.fork()
    if child == 0:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        code = 1
        try:
            code = pytest.main(["-n", "0", "-x", "-q", "-m", select, *WARNINGS, *tests])
        finally:
            os._exit(code)
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def main(words: list[str] | None = None) -> int:
    """Prints one line per mutant; returns 1 if any survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="files of finetune/, from the checkout's top")
    parser.add_argument("--tests", nargs="+", required=True, help="test files or node ids")
    parser.add_argument("--select", default="not slow", help="pytest's -m: which tests of these; all but the slow")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for the tests of one mutant")
    options = parser.parse_args(words)
    from cosmic_ray.mutating import use_mutation
    from cosmic_ray.plugins import get_operator

    os.environ["OMP_NUM_THREADS"] = "1"
    for library in LIBRARIES:
        importlib.import_module(library)
    possible = [mutant for file in options.files for mutant in mutants_of(file)]
    survived = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, copy / name)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(copy), os.environ.get("PYTHONPATH"))))
        sys.path.insert(0, str(copy))
        if not passes(options.tests, options.select, 10 * options.timeout):
            raise SystemExit("the tests fail without a mutant")
        chosen = drawn(possible, options.count, options.seed)
        for number, mutant in enumerate(chosen, 1):
            compiled = Path(importlib.util.cache_from_source(str(copy / mutant.file)))
            with use_mutation(mutant.file, get_operator(mutant.operator)(), mutant.occurrence) as (before, after):
                compiled.unlink(missing_ok=True)
                noticed = not passes(options.tests, options.select, options.timeout)
            compiled.unlink(missing_ok=True)
            survived += not noticed
            word = "noticed" if noticed else "SURVIVED"
            print(f"{number}/{len(chosen)} {word}: {mutant.file} {mutant.operator} {mutant.occurrence}", flush=True)
            if not noticed:
                changed = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
                print("\n".join(f"    {line}" for line in changed if not line.startswith(("+++", "---", "@@"))))
    print(f"{len(possible)} possible, {len(chosen)} drawn with seed {options.seed}, {survived} survived")
    return int(survived > 0)


if __name__ == "__main__":
    sys.exit(main())
