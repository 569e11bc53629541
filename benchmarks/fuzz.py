"""Changed files of strangers, through what a user's verb reads them with: no traceback, no hang, no raw letter.

    python benchmarks/fuzz.py INPUT --minutes 5 --seed 1        (an input, several with commas between, or all)
    python benchmarks/fuzz.py --again FOUND/config-1-17.yaml    (one finding again, or tests/corpus/models.yaml::NAME)

Inputs: recipe, rows, config, tokenizer, safetensors, index, manifests, metrics. A case is a valid file of this
repository with one to three changes (tests/support/fuzzing/), read in a child with 10 s of processor time and 2 GiB of
its own. Found is: an error that is none of the program's own, a limit that was reached, a control character or a
library's words in what is printed, a refusal without place or remedy. Each kind of finding is written once, as a file
in the form of the corpus, into --found. Printed are cases per second and how many ended in which way. Exit code 1 where
something was found.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
if __name__ == "__main__":  # before torch and tokenizers load: a process with threads cannot be forked safely
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    from finetune.output_stream import plain_output

    as_a_command = contextlib.ExitStack()  # libraries print to the stream that they are imported with
    as_a_command.enter_context(plain_output())

import yaml

from tests.support.fuzzing.inputs import INPUTS, case_of
from tests.support.fuzzing.judged import Verdict, judged_apart
from tests.support.models.tiny import save_tiny
from tests.support.rows.cases import case_named
from tests.support.rows.corpus_starts import make_starts

SHOWN = 25  # ways to end, of an input
TOGETHER = 20  # cases of one child


def main(words: Sequence[str] | None = None) -> int:
    """Fuzz, or run one finding again; 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="?", default="all", help=f"all, or of {', '.join(INPUTS)}")
    parser.add_argument("--minutes", type=float, default=5.0, help="for each input")
    parser.add_argument("--cases", type=int, default=10**9, help="for each input, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--found", type=Path, default=Path("found"), help="folder for what is found")
    parser.add_argument("--again", help="a file of it, or FILE::NAME of a file of cases")
    arguments = parser.parse_args(words)
    names = list(INPUTS) if arguments.inputs == "all" else arguments.inputs.split(",")
    if unknown := [name for name in names if name not in INPUTS]:
        parser.error(f"{unknown[0]}: name some of {', '.join(INPUTS)}, or all")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["FINETUNE_CACHE"] = str(folder / "cache")
        starts = make_starts(folder / "starts", save_tiny(folder / "model"))
        if arguments.again:
            return again(arguments.again, folder, starts)
        found = 0
        for each in names:
            import_before_forking(case_of(each, 0, number, starts) for number in range(12))
            found += fuzz(each, arguments, folder, starts)
    return int(found > 0)


def fuzz(name: str, arguments: argparse.Namespace, folder: Path, starts: Mapping[str, Path]) -> int:
    """The cases of one input until its time is over; how many kinds of findings there were."""
    ends: Counter[str] = Counter()
    began, number = time.monotonic(), 0
    while time.monotonic() - began < 60 * arguments.minutes and number < arguments.cases:
        count = min(TOGETHER, arguments.cases - number)
        cases = [case_of(name, arguments.seed, number + index, starts) for index in range(count)]
        for case, verdict in zip(cases, judged_apart(cases, folder / f"case-{number}", starts), strict=True):
            ends[verdict.shape] += 1
            if verdict.problem and ends[verdict.shape] == 1:
                title = f"{name}-{arguments.seed}-{number}"
                print(f"  {write_found(arguments.found, title, case, verdict)}", flush=True)
            number += 1
    seconds = time.monotonic() - began
    codes = Counter(shape.split()[0] for shape in ends.elements())
    kinds = [shape for shape in ends if shape.startswith("FOUND")]
    print(
        f"{name}, seed {arguments.seed}: {number:,} cases in {seconds:.0f} s, {number / seconds:.1f} a second; "
        f"accepted {codes.get('0', 0):,}, refused {sum(codes[code] for code in '234'):,} in "
        f"{sum(shape[0] in '234' for shape in ends)} ways, found {codes.get('FOUND', 0):,} of {len(kinds)} kinds"
    )
    for shape, count in [(shape, ends[shape]) for shape in kinds] + ends.most_common(SHOWN):
        print(f"{count:>8,}  {shape}", flush=True)
    return len(kinds)


def write_found(folder: Path, name: str, case: Mapping[str, Any], verdict: Verdict) -> str:
    """The case as a file that runs again, and what was wrong; returns a line of it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    page = {**case, "found": verdict.problem, "text": verdict.text[-1_500:]}
    path.write_text(yaml.safe_dump(page, sort_keys=False, allow_unicode=False, width=120), "utf-8")
    return f"{path}: {verdict.problem}"


def again(place: str, folder: Path, starts: Mapping[str, Path]) -> int:
    """One finding again; prints what came of it."""
    (verdict,) = judged_apart([case_named(place)], folder / "case", starts)
    print(f"exit code {verdict.code}: {verdict.problem or 'nothing is wrong'}\n{verdict.text}")
    return int(bool(verdict.problem))


def import_before_forking(cases: Any) -> None:
    """What cases import is imported here once; a forked child has it then. Found out in a child, by running them."""
    from tests.support.fuzzing.judged import judged

    with tempfile.TemporaryDirectory() as name:
        file, folder = Path(name, "modules"), Path(name)
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                starts = make_starts(folder / "starts", save_tiny(folder / "model"))
                for number, case in enumerate(cases):
                    if not any("pipe" in change or "link" in change for change in case["files"].values()):
                        judged(case, folder / f"case-{number}", starts)
            file.write_text(json.dumps([module for module in sys.modules if "__main__" not in module]))
            os._exit(0)
        os.waitpid(child, 0)
        for module in json.loads(file.read_text()):
            with contextlib.suppress(Exception):
                importlib.import_module(module)


if __name__ == "__main__":
    sys.exit(main())
