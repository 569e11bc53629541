"""A ledger of lines, and a few measures of how the code reads.

    python benchmarks/house.py                       lines of each package and of all Python
    python benchmarks/house.py --against /tmp/then   and those of another checkout: git worktree add /tmp/then bb4c322
    python benchmarks/house.py --step                files and frames of one optimizer step of recipes/quickstart.yaml

Lines are all lines of the Python files in a folder: code, comments, docstrings and blanks. Below them, for finetune/:

    private once   private functions and methods that are used exactly once, per 1,000 lines
    conditional    conditional expressions (`x if y else z`), per 1,000 lines
    comments       lines with a comment, per 100 lines that hold code
    of, relative   "of", and which / whose / that of / what, per 1,000 words of docstrings
    modules        our files that `import finetune.training.session` loads, packages not counted

`--root` takes another checkout instead of this one.
"""

from __future__ import annotations

import argparse
import ast
import io
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ANNEXES = ("planner", "rehearse", "compare", "doctor", "hand_over", "answers", "importers", "new_recipe")
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
RELATIVE = re.compile(r"\b(which|whose|what|that of|those of)\b", re.IGNORECASE)


def ledger(root: Path) -> dict[str, int]:
    """Lines of Python by place: packages of the core, the core, annexes, cli, finetune/, the other folders, all."""
    lines: Counter[str] = Counter()
    for file in python_files(root):
        parts = file.relative_to(root).parts
        count = file.read_text("utf-8").count("\n")
        lines["all Python"] += count
        if parts[0] != "finetune":
            lines[parts[0] if len(parts) > 1 else "top"] += count
            if parts[:2] == ("tests", "support"):
                lines["tests/support"] += count
            continue
        lines["finetune"] += count
        package = parts[1] if len(parts) > 2 else "own files"
        lines[f"finetune/{package}"] += count
        if package not in (*ANNEXES, "cli"):
            lines["core"] += count
    return dict(sorted(lines.items(), key=lambda item: (item[0] in ("core", "finetune", "all Python"), item[0])))


def python_files(root: Path) -> list[Path]:
    """Every Python file of a checkout or a folder in it that git does not ignore."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    names = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    return [root / name for name in names if (root / name).is_file()]


def measures(root: Path) -> dict[str, float]:
    """How finetune/ reads: the measures above."""
    texts = [file.read_text("utf-8") for file in python_files(root / "finetune")]
    trees = [ast.parse(text) for text in texts]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    lines = sum(text.count("\n") for text in texts)
    loaded = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Load)]
    uses = Counter(getattr(node, "id", getattr(node, "attr", "")) for node in loaded)
    functions = [node.name for node in nodes if isinstance(node, ast.FunctionDef)]
    once = sum(uses[name] == 1 for name in functions if name.startswith("_") and not name.startswith("__"))
    coded, commented = map(sum, zip(*map(code_and_comments, texts), strict=True))
    documented = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module))
    prose = re.sub(r"`[^`\n]*`", " ", "\n".join(ast.get_docstring(node) or "" for node in documented))
    words = [word.lower() for word in WORD.findall(prose)]
    return {
        "private once": 1000 * once / lines,
        "conditional": 1000 * sum(isinstance(node, ast.IfExp) for node in nodes) / lines,
        "comments": 100 * commented / coded,
        "of": 1000 * words.count("of") / len(words),
        "relative": 1000 * len(RELATIVE.findall(prose)) / len(words),
        "modules": len(imported(root)),
    }


def code_and_comments(text: str) -> tuple[int, int]:
    """Lines with code (docstrings among them), and lines with a comment."""
    coded, commented = set[int](), set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            commented.add(token.start[0])
        elif token.type not in (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER):
            coded.update(range(token.start[0], token.end[0] + 1))
    return len(coded | commented), len(commented)


IMPORTED = """
import sys
import finetune.training.session
for name, module in sorted(sys.modules.items()):
    if name.startswith("finetune.") and not hasattr(module, "__path__"):
        print(name)
"""


def imported(root: Path) -> list[str]:
    """Our modules that the training session imports."""
    environment = os.environ | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-c", IMPORTED]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True).stdout.split()


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout; default: this one")
    parser.add_argument("--against", type=Path, help="an earlier checkout")
    parser.add_argument("--step", action="store_true", help="list one step's files and frames")
    options = parser.parse_args()
    if options.step:
        files, frames = step_of(options.root.resolve())
        print(f"{len(files)} files:", *files, sep="\n  ")
        print(f"{len(frames)} frames above model(...):", *frames, sep="\n  ")
        return
    now = ledger(options.root.resolve())
    if options.against is None:
        for name, lines in now.items():
            print(f"{name:<24}{lines:>9,}")
        for name, value in measures(options.root.resolve()).items():
            print(f"{name:<24}{value:>9.1f}")
        return
    then = ledger(options.against.resolve())
    print(f"{'':<24}{'then':>9}{'now':>9}{'change':>9}")
    for name in then | now:
        before, after = then.get(name, 0), now.get(name, 0)
        print(f"{name:<24}{before:>9,}{after:>9,}{after - before:>+9,}")
    before_measures = measures(options.against.resolve())
    for name, value in measures(options.root.resolve()).items():
        print(f"{name:<24}{before_measures[name]:>9.1f}{value:>9.1f}{value - before_measures[name]:>+9.1f}")


if __name__ == "__main__":
    main()
