"""Which of the package's questions for a GPU the tests have answered both ways, on a machine that has none.

python benchmarks/gpu_branches.py        (ten minutes: the default tests that come to such a question)

A question is `device.type == "cuda"` and the like, `torch.cuda.is_available()` or `on_cpu`; a GPU's answer comes from
stand-ins (tests/support/pretend_cuda.py, the planner's pretended device). Those that remain are named with the reason.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parent.parent))

from benchmarks.common import write_result
from tests.support.gpu_branches import FILE, all_questions

TESTS = """strategies measure launch architecture/test_attention.py architecture/test_varlen_kernel.py
model/test_optimizer.py model/test_quantization.py probe/test_judge.py probe/test_remembered.py tokens/test_batches.py
preflight/test_doctor.py preflight/test_compare.py finished_run/test_evaluate.py training/test_worst_step.py
training/test_loop.py cli/test_train_verb.py proofs/test_pretended_gpu.py""".split()


def main() -> int:
    """Run the tests, and write and print which answers were heard."""
    heard: dict[str, set[bool]] = {name: set() for name in all_questions()}
    for tests in (TESTS, ["planner"]):
        for name, answer in answers_of(tests):
            heard[name].add(answer)
    only = {name: sorted(answers) for name, answers in heard.items() if len(answers) < 2}
    print(f"{len(heard)} questions, {len(heard) - len(only)} answered both ways; the others and their answers:")
    print("\n".join(f"{name}: {answers}" for name, answers in only.items()))
    print(write_result("gpu_branches", {"questions": list(heard), "answered_one_way": only}))
    return 0


def answers_of(tests: list[str]) -> list[tuple[str, bool]]:
    """What the questions of one pytest were answered, by its own process and by those that it started."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text("import tests.support.gpu_branches\n", "utf-8")
        file = Path(folder, "answers")
        environment = os.environ | {FILE: str(file), "PYTHONPATH": os.pathsep.join([folder, str(ROOT)])}
        environment |= {"FINETUNE_CACHE": str(Path(folder, "cache"))}  # what is remembered is not asked again
        words = [sys.executable, "-m", "pytest", "-n0", "-q", *(f"tests/{name}" for name in tests)]
        subprocess.run(words, cwd=ROOT, env=environment)
        return [tuple(json.loads(line)) for line in file.read_text("utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main())
