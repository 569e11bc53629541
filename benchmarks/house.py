"""Measures of how the code reads, by package: `python benchmarks/house.py [PATH ...]`.

    private once   private functions and methods that are used exactly once, per 1,000 lines
    conditional    conditional expressions (`x if y else z`), per 1,000 lines
    comments       lines with a comment, per 100 lines that hold code
    names          mean letters of the distinct variable and argument names of each function
    of, relative   "of", and which / whose / that of / what, per 1,000 words: in docstrings, and in docs

Lines are all lines of a file. The tokenizer counts comments, so a `#` in a string does not count. docs/log.md and the
Korean pages are left out.

`--step` trains six steps of recipes/quickstart.yaml and prints our files that one optimizer step runs, and our frames
above `model(...)`. `--root` measures another checkout: git worktree add /tmp/then bb4c322.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ANNEXES = ("planner", "preflight", "finished_run", "importers", "new_recipe")
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
RELATIVE = re.compile(r"\b(which|whose|what|that of|those of)\b", re.IGNORECASE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Prose:
    """Words of text for readers."""

    words: int
    of: int
    relative: int

    @staticmethod
    def of_texts(texts: Sequence[str]) -> Prose:
        """Count words; code fences and `code` are left out."""
        text = "\n".join(re.sub(r"`[^`\n]*`", " ", FENCE.sub("", each)) for each in texts)
        words = [word.lower() for word in WORD.findall(text)]
        return Prose(len(words), words.count("of"), len(RELATIVE.findall(text)))

    def rates(self) -> tuple[float, float]:
        """`of` and relative words, per 1,000 words."""
        return 1000 * self.of / max(self.words, 1), 1000 * self.relative / max(self.words, 1)


@dataclass(frozen=True)
class Measures:
    """The measures of some Python files."""

    lines: int
    private_once: float
    conditional: float
    comments: float
    names: float
    of: float
    relative: float


def measure(files: Sequence[Path], users: Sequence[Path]) -> Measures:
    """Measure `files`; a private function's uses are counted in `users`."""
    texts = {file: file.read_text("utf-8") for file in files}
    trees = {file: ast.parse(text) for file, text in texts.items()}
    uses: Counter[str] = Counter()
    for file in users:
        uses.update(_used_names(ast.parse(file.read_text("utf-8"))))
    private = [name for tree in trees.values() for name in _private_functions(tree)]
    lines = sum(text.count("\n") for text in texts.values())
    coded, commented = 0, 0
    for text in texts.values():
        code_lines, comment_lines = _code_and_comments(text)
        coded, commented = coded + code_lines, commented + comment_lines
    names = [name for tree in trees.values() for name in _variables(tree)]
    prose = Prose.of_texts([words for tree in trees.values() for words in _docstrings(tree)])
    conditional = sum(isinstance(node, ast.IfExp) for tree in trees.values() for node in ast.walk(tree))
    return Measures(
        lines,
        1000 * sum(uses[name] == 1 for name in private) / lines,
        1000 * conditional / lines,
        100 * commented / max(coded, 1),
        sum(map(len, names)) / max(len(names), 1),
        *prose.rates(),
    )


STEP_PROBE = """
import sys, threading
from pathlib import Path
package = str(Path(sys.argv[1]) / "finetune") + "/"
import torch
from finetune.train import process_main
state = {"calls": 0, "files": set(), "frames": []}
forward = torch.nn.Module.__call__

def ours(code):
    return code.co_filename.startswith(package)

def profile(frame, event, argument):
    if event == "call" and ours(frame.f_code):
        state["files"].add(frame.f_code.co_filename.removeprefix(package))

def counted(self, *arguments, **named):
    if "shift_labels" in named and self.training and torch.is_grad_enabled():
        frames, frame = [], sys._getframe(1)
        while frame is not None:
            if ours(frame.f_code):
                frames.append(f"{frame.f_code.co_filename.removeprefix(package)}:{frame.f_code.co_name}")
            frame = frame.f_back
        if not any(name.startswith("training/loop.py") for name in frames):  # the probe, or the worst step
            return forward(self, *arguments, **named)
        state["calls"] += 1
        if state["calls"] == 3:
            state["frames"] = frames[::-1]
            state["files"] |= {name.partition(":")[0] for name in frames}
            sys.setprofile(profile)
        elif state["calls"] == 4:
            sys.setprofile(None)
    return forward(self, *arguments, **named)

torch.nn.Module.__call__ = counted
code = process_main(["recipes/quickstart.yaml", "training.max_steps=6", "training.mixed_precision=no",
    "model.dtype=float32", "samples={count: 1}", "samples.max_new_tokens=1", "output_dir=" + sys.argv[2]])
print("FILES", *sorted(state["files"]))
print("FRAMES", *state["frames"])
sys.exit(code)
"""


def step_of(root: Path) -> tuple[list[str], list[str]]:
    """Our files that run between two forwards of a run, and our frames above the model, outermost first."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", STEP_PROBE, str(root), f"{folder}/run"]
        process = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    found = {
        line.split()[0]: line.split()[1:]
        for line in process.stdout.splitlines()
        if line.startswith(("FILES", "FRAMES"))
    }
    if process.returncode or len(found) != 2:
        raise SystemExit(process.stdout[-2000:] + process.stderr[-2000:])
    return found["FILES"], found["FRAMES"]


def _private_functions(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_") and not node.name.startswith("__"):
            yield node.name


def _used_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr


def _code_and_comments(text: str) -> tuple[int, int]:
    """Lines with code (docstrings among them), and lines with a comment."""
    coded, commented = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            commented.add(token.start[0])
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            coded.update(range(token.start[0], token.end[0] + 1))
    return len(coded | commented), len(commented)


def _variables(tree: ast.Module) -> Iterator[str]:
    """Names of arguments and assigned variables, once for each function; `self`, `cls` and `_` are left out."""
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef | ast.Module):
            continue
        names = set()
        for node in _own_nodes(scope):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
        yield from names - {"self", "cls", "_"}


def _own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a scope without those of functions inside it."""
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.FunctionDef):
            waiting += ast.iter_child_nodes(node)


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module) and (words := ast.get_docstring(node)):
            yield words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="folders or files; default: each package of finetune/")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--step", action="store_true", help="count one step's files and frames")
    options = parser.parse_args()
    if options.step:
        files, frames = step_of(options.root.resolve())
        print(f"{len(files)} files:", *files, sep="\n  ")
        print(f"{len(frames)} frames above model(...):", *frames, sep="\n  ")
        return
    package = options.root / "finetune"
    users = sorted(package.rglob("*.py"))
    if options.paths:
        parts = {str(path): sorted(path.rglob("*.py")) if path.is_dir() else [path] for path in options.paths}
    else:
        core = [file for file in users if file.relative_to(package).parts[0] not in (*ANNEXES, "cli", "lectures")]
        whole = [file for file in users if file.relative_to(package).parts[0] != "lectures"]
        folders = sorted({file.relative_to(package).parts[0] for file in whole if file.parent != package})
        parts = {"finetune": whole, "core": core}
        parts |= {name: [file for file in whole if file.relative_to(package).parts[0] == name] for name in folders}
    measured = {name: measure(files, users) for name, files in parts.items()}
    docs = [page for page in sorted((options.root / "docs").rglob("*.md")) if "ko" not in page.parts]
    docs = [page for page in docs if page.name not in ("log.md",)] + [options.root / "README.md"]
    prose = Prose.of_texts([page.read_text("utf-8") for page in docs])
    if options.json:
        print(json.dumps({name: asdict(measures) for name, measures in measured.items()}, indent=2))
        return
    print(f"{'':<14}{'lines':>8}{'private':>9}{'cond.':>8}{'comments':>10}{'names':>8}{'of':>7}{'relative':>10}")
    for name, each in measured.items():
        print(
            f"{name[-14:]:<14}{each.lines:>8,}{each.private_once:>9.1f}{each.conditional:>8.1f}{each.comments:>10.1f}"
            f"{each.names:>8.1f}{each.of:>7.1f}{each.relative:>10.1f}"
        )
    rates = prose.rates()
    print(f"{'docs':<14}{prose.words:>8,} words{'':>32}{rates[0]:>10.1f}{rates[1]:>10.1f}")
    for page in docs:
        one = Prose.of_texts([page.read_text("utf-8")])
        print(f"  {page.name:<22}{one.words:>6,} words{'':>26}{one.rates()[0]:>10.1f}{one.rates()[1]:>10.1f}")


if __name__ == "__main__":
    main()
