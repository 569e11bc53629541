"""Which of the package's questions for a GPU the tests have answered both ways, on a machine that has none.

python benchmarks/gpu_branches.py [TEST ...]        (ten minutes: the default tests that come to such a question)

A question is `device.type == "cuda"` and the like, `torch.cuda.is_available()` or `on_cpu`; a GPU's answer comes from
stand-ins (tests/support/stand_ins/pretend_cuda.py, the planner's pretended device). What the default tests leave open
has its reason in REASONS. With tests named, as paths under tests/, only these run, and their answers are added to the
record's answers for questions that have not changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(ROOT := Path(__file__).resolve().parent.parent))

from benchmarks.common import write_result
from tests.support.stand_ins.gpu_branches import FILE, all_questions

TESTS = """strategies measure launch architecture/test_attention.py architecture/test_varlen_kernel.py
architecture/test_loss.py architecture/test_float8_linear.py model/test_optimizer.py model/test_quantization.py
probe/test_judge.py probe/test_remembered.py tokens/test_batches.py preflight/test_doctor.py
preflight/test_gpu_proofs.py preflight/test_compare.py
finished_run/test_evaluate.py training/test_worst_step.py training/test_loop.py
training/test_train.py training/test_update.py training/test_late_reads.py training/test_compile.py
architecture/test_compiled.py cli/test_train_verb.py proofs/test_pretended_gpu.py""".split()
SLOW_TESTS = ["proofs/test_recipes_on_gpu.py"]
NAME = "gpu_branches"
# Of each question that the default tests answer one way or not at all: why, and where its other answer is seen.
REASONS: dict[str, str] = {
    "finetune/finished_run/sample.py _in_formats: torch.cuda.is_available()": (
        "a GPU's number format and name in the file of sampled answers; no stand-in generates answers"
    ),
    "finetune/finished_run/sample.py _way: by.device.type == 'cpu'": (
        "a GPU's number format and name in the file of sampled answers; no stand-in generates answers"
    ),
    "finetune/finished_run/sample.py _way: by.device.type == 'cuda'": (
        "a GPU's number format and name in the file of sampled answers; no stand-in generates answers"
    ),
    "finetune/architecture/compiled/document_operator.py document_operator.gradients: slope.device.type == 'cuda'": (
        "asked inside an operator that a GPU alone runs; tests/support/threaded_device.py has a device like it"
    ),
    "finetune/architecture/rotary.py _frequencies: device.type == 'cuda'": (
        "asked where the positions are on another device than the CPU; stand-ins compute on the host"
    ),
    "finetune/planner/trace/pinned_memory.py pinned_memory.around: torch.device(to).type == 'cpu'": (
        "asked of non-blocking copies off the pretended GPU, which the trainer makes to the host alone"
    ),
    "finetune/finished_run/by_ranks.py _as_evaluated: torch.cuda.is_available()": (
        "a GPU's answer leaves the recipe's budget as it is, for ranks on GPUs"
    ),
    "finetune/finished_run/evaluation.py HeldOutLoss.ask: by.device.type == 'cpu'": (
        "a GPU's answer lets Accelerator find the GPU, as a training does in strategies/accelerator.py"
    ),
    "finetune/launch/local_ranks.py _environments: on_cpu": (
        "a GPU's answer is given in a process whose path is the test's: launch/test_local_ranks.py, ranks_on_gpus"
    ),
    "finetune/training/session.py try_worst_step: device.type != 'cuda'": (
        "a GPU's answer needs less host memory for the state that the worst step keeps; slow tests on stand-ins ask it"
    ),
    "finetune/probe/probe.py probe: device.type == 'cpu'": (
        "asked where the probe is offline, which rehearse, check and plan alone ask for, and those compute on the CPU"
    ),
}


def main(tests: Sequence[str]) -> int:
    """Run the tests, and write and print which answers were heard."""
    heard = known() if tests else {name: set() for name in all_questions()}
    runs = [(tests, False)] if tests else [(TESTS, False), (["planner"], False), (SLOW_TESTS, True)]
    for together, slow in runs:
        for name, answer in answers_of(together, slow):
            heard[name].add(answer)
    only = {name: sorted(answers) for name, answers in heard.items() if len(answers) < 2}
    print(f"{len(heard)} questions, {len(heard) - len(only)} answered both ways; the others, their answers and why:")
    print("\n".join(f"{name}: {answers} {REASONS.get(name, 'NO REASON')}" for name, answers in only.items()))
    open_ = {name: {"answers": answers, "reason": REASONS.get(name)} for name, answers in only.items()}
    print(write_result(NAME, {"questions": list(heard), "answered_one_way": open_}))
    return int(not REASONS.keys() >= only.keys())


def known() -> dict[str, set[bool]]:
    """What the record has heard of each question that there is now."""
    record: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{NAME}.json").read_text("utf-8"))
    one_way = {name: set(row["answers"]) for name, row in record["answered_one_way"].items()}
    both = {name: one_way.get(name, {False, True}) for name in record["questions"]}
    return {name: both.get(name, set()) for name in all_questions()}


def answers_of(tests: Sequence[str], slow: bool) -> list[tuple[str, bool]]:
    """Each question that one pytest asked, with its answer; the processes that it started count too."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text("import tests.support.stand_ins.gpu_branches\n", "utf-8")
        file = Path(folder, "answers")
        environment = os.environ | {FILE: str(file), "PYTHONPATH": os.pathsep.join([folder, str(ROOT)])}
        environment |= {"FINETUNE_CACHE": str(Path(folder, "cache"))}  # what is remembered is not asked again
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-n0",
            "-q",
            "-m",
            "slow or not slow" if slow else "not slow",
            *(f"tests/{name}" for name in tests),
        ]
        subprocess.run(words, cwd=ROOT, env=environment)
        return [tuple(json.loads(line)) for line in file.read_text("utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
