"""`finetune launch`: what it prints is read by the launchers' own parsers, and runs."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from finetune.cli.main import main
from finetune.errors import EnvironmentMismatch, FinetuneError
from finetune.files import read_lines
from finetune.launch import launcher
from finetune.launch.plan import LAUNCHERS, JobOptions, plan_launch
from finetune.launch.script import script
from finetune.launch.signals import GRACE_VARIABLE
from finetune.launch.slurm import slurm_ranks
from finetune.paths import RECIPES
from finetune.recipe.loader import load_recipe
from finetune.recipe.strategy_fit import refuse_recipe
from tests.support.runs.cells import free_ports
from tests.support.runs.soak_resume import write_resume_recipe

PUSHED = ["hub.push=true", "hub.repo_id=me/tuned"]
ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "llama3_fsdp.yaml"  # 4 GPUs of one machine
# Strategy, machines and GPUs of each: what fits, and how many ranks it makes.
FITTING = {
    ("ddp", 1, 4): 4,
    ("ddp", 2, 1): 2,
    ("fsdp2", 2, 8): 16,
    ("hsdp", 2, 8): 16,
    ("zero3", 1, 2): 2,
    ("zero3", 4, 8): 32,
    ("zero3", 2, 0): 2,
    ("zero2_offload", 1, 1): 1,
    ("single", 1, 1): 1,
    ("single", 1, 0): 1,
    ("ddp", 1, 0): 2,
    ("fsdp2", 3, 0): 3,
    ("cpu_2proc", 1, 0): 2,
}


def text_for(on: str, strategy: str, nodes: int, gpus: int, *overrides: str) -> str:
    words = [f"accelerate_config={strategy}", "training.global_batch_size=32", *overrides]  # a row for each of 32 ranks
    return script(plan_launch(RECIPE, words, launcher=on, nodes=nodes, gpus_per_node=gpus))


def said_by(text: str, tmp_path: Path, *arguments: str, **environment: str) -> list[str]:
    """The words that the file's last command gets, from bash itself; whoever would run says them instead."""
    for name in ("torchrun", "python", "srun", "scontrol"):
        tool = tmp_path / name
        tool.write_text('#!/bin/bash\nprintf "%s\\n" "${0##*/}" "$@"\n')
        tool.chmod(0o755)
    file = tmp_path / "file.sh"
    file.write_text(text)
    process = subprocess.run(
        ["bash", str(file), *arguments],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines()


def read_by(words: Sequence[str], monkeypatch: pytest.MonkeyPatch, ranks: int, nodes: int) -> launcher.Launch:
    """What the trainer makes of these words of its launcher."""
    monkeypatch.setattr(launcher, "arguments_of", lambda process: ["python", *words])
    variables = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": str(ranks), "GROUP_WORLD_SIZE": str(nodes), "RANK": "0"}
    return launcher.read_launch(variables)


@pytest.mark.parametrize(("strategy", "nodes", "gpus"), FITTING)
def test_torchrun_and_the_trainer_read_the_words(
    strategy: str, nodes: int, gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.run import get_args_parser

    ranks = FITTING[strategy, nodes, gpus]
    text = text_for("torchrun", strategy, nodes, gpus)
    words = said_by(text, tmp_path, *(["1", "10.0.0.1"] if nodes > 1 else []))
    if strategy == "single":
        assert words[:3] == ["python", "-m", "finetune.train"]
        return
    assert words[0] == "torchrun"
    read = get_args_parser().parse_args(words[1:])
    assert (read.module, read.training_script, read.training_script_args[0]) == (True, "finetune.train", str(RECIPE))
    assert int(read.nnodes.split(":")[-1]) * int(read.nproc_per_node) == ranks  # --standalone makes it 1:1
    assert read.standalone is (nodes == 1)
    if nodes > 1:
        assert (int(read.nnodes), read.node_rank, read.master_addr) == (nodes, 1, "10.0.0.1")
    launch = read_by(words, monkeypatch, ranks, nodes)
    assert launch.requested_processes == ranks
    assert launch.recipe == str(RECIPE)


@pytest.mark.parametrize(("strategy", "nodes", "gpus"), FITTING)
def test_slurm_gets_one_task_a_node(strategy: str, nodes: int, gpus: int, tmp_path: Path) -> None:
    text = text_for("slurm", strategy, nodes, gpus)
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    requested = dict(
        line.removeprefix("#SBATCH --").split("=", 1)
        for line in text.splitlines()
        if "#SBATCH" in line[:7] and "=" in line
    )
    assert (requested["nodes"], requested["ntasks-per-node"]) == (str(nodes), "1")
    assert requested.get("gpus-per-node") == (str(gpus) if gpus else None)
    assert requested["signal"] == "TERM@300", "to the ranks, not to the script"
    assert "#SBATCH --requeue\n" in text
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_CPUS_PER_TASK": "16"}
    words = said_by(text, tmp_path, **job)
    assert words[:3] == ["srun", "--kill-on-bad-exit=1", "--cpus-per-task=16"]
    started = {"single": ["python", "-m"]}.get(strategy, ["torchrun", "--standalone"])
    assert words[3:5] == (["bash", "-c"] if nodes > 1 else started)
    assert str(RECIPE) in words


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 0), (1, 4), (2, 4)])
def test_slurm_gets_partition_account_and_container(nodes: int, gpus: int, tmp_path: Path) -> None:
    """A node's task runs in the image, and so does the shell that reads the node's number there."""
    options = JobOptions(image="my images/finetune.sif", partition="a100,h100", account="lab@site")
    words = ["accelerate_config=ddp", "training.global_batch_size=32"]
    plan = plan_launch(RECIPE, words, launcher="slurm", nodes=nodes, gpus_per_node=gpus, options=options)
    text = script(plan)
    assert "\n#SBATCH --partition=a100,h100\n#SBATCH --account=lab@site\n" in text
    assert "--image 'my images/finetune.sif' --partition a100,h100 --account lab@site" in text.splitlines()[1]
    said = said_by(text, tmp_path, SLURM_JOB_ID="4711", SLURM_JOB_NODELIST="a[1-2]", SLURM_CPUS_PER_TASK="16")
    container = ["apptainer", "exec", *(["--nv"] if gpus else []), "my images/finetune.sif"]
    assert said[3 : 3 + len(container)] == container
    assert said[3 + len(container)] == ("torchrun" if nodes == 1 else "bash")


def test_ranks_may_save_until_shortly_before_the_jobs_time_ends(tmp_path: Path) -> None:
    """Slurm signals 300 s before the end; torchrun, which passes the signal on, has to end before that too."""
    text = text_for("slurm", "ddp", 1, 2)
    printed = f"() {{ printenv TORCH_ELASTIC_SHUTDOWN_TIMEOUT {GRACE_VARIABLE}; }}"
    seconds, grace = said_by(text, tmp_path, **{"BASH_FUNC_srun%%": printed})
    assert 200 < int(seconds) < 300 == int(grace)


def test_slurm_and_a_plain_srun_choose_the_same_port() -> None:
    text = text_for("slurm", "ddp", 2, 1)
    line = next(line for line in text.splitlines() if line.startswith("MASTER_PORT="))
    for job in ("4711", "12345678"):
        shell = subprocess.run(
            ["bash", "-c", f"{line.partition('#')[0]}; echo $MASTER_PORT"],
            env={"SLURM_JOB_ID": job},
            capture_output=True,
            text=True,
        )
        step = {"SLURM_JOB_ID": job, "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
        place = {"SLURM_NODELIST": "a[1-2]", "SLURM_LOCALID": "0"}
        assert shell.stdout.strip() == slurm_ranks(step | place)["MASTER_PORT"]


@pytest.mark.parametrize("on", ["slurm", "torchrun"])
def test_words_with_blanks_quotes_and_dollars_arrive(on: str, tmp_path: Path) -> None:
    override = "output_dir=runs/a 'b' $HOME \"c\""
    text = text_for(on, "fsdp2", 2, 2, override, "training.resume=never")
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_CPUS_PER_TASK": "1"}
    words = said_by(text, tmp_path, "0", "h", **job)
    assert override in words
    assert words[-2:] == ["budget.nodes=2", "budget.gpus=2"], "the trainer holds the launch against the budget"
    again = said_by(text, tmp_path, "0", "h", **job, SLURM_RESTART_COUNT="1")
    assert ("training.resume=auto" in again) is (on == "slurm"), "a job that is queued again resumes"


def test_the_recipes_budget_is_the_default() -> None:
    plan = plan_launch(RECIPE, ["budget.nodes=2"], launcher="torchrun")
    assert (plan.nodes, plan.gpus, plan.world) == (2, 4, 8)
    assert [word for word in plan.words if "budget" in word] == ["budget.nodes=2"]
    assert (plan_launch(RECIPE, [], launcher="torchrun", gpus_per_node=8)).words[-1] == "budget.gpus=8"


@pytest.mark.parametrize(
    ("strategy", "nodes", "gpus", "word"),
    [
        ("hsdp", 1, 8, "1 x 8 GPUs make 1 such copy;"),
        ("hsdp", 2, 1, "2 x 1 GPU make 2 such copies"),
        ("single", 1, 2, "runs one process, 1 x 2 GPUs are 2"),
        ("single", 2, 0, "runs one process, 2 x 1 CPU process are 2"),
        ("fsdp2", 1, 1, "runs on several processes, 1 x 1 GPU are one"),
        ("zero3", 1, 1, "runs on several processes"),
        ("cpu_2proc", 1, 2, "runs on a CPU, not on 1 x 2 GPUs"),
        ("1f1b_ddp2", 1, 3, "two stages or more, all equally long; 3 processes cannot be divided so: launch 4"),
        ("gpipe_ddp2", 2, 1, "2 processes cannot be divided so: launch 4"),
        ("fsdp2", 16, 8, "8 rows a step leave 120 of 128 ranks without one"),
    ],
)
def test_what_does_not_fit_is_refused(
    strategy: str, nodes: int, gpus: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    places = ["--nodes", str(nodes), "--gpus-per-node", str(gpus)]
    assert main(["launch", str(RECIPE), "--on", "slurm", *places, f"accelerate_config={strategy}"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert len(output.err.splitlines()) == 1
    assert word in output.err
    assert "; " in output.err, "the remedy"


@pytest.mark.parametrize(
    "words",
    [
        ["training.optim=paged_adamw_8bit"],
        ["accelerate_config=zero3", "model.add_tokens=[<date>]"],
        ["accelerate_config=gpipe", "model.attention=sdpa"],
    ],
)
def test_a_setting_is_refused_before_a_job_waits_by_the_line_of_the_start(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(EnvironmentMismatch) as start:
        refuse_recipe(load_recipe(RECIPE, words).recipe)
    assert main(["launch", str(RECIPE), *words]) == 4
    assert capsys.readouterr().err == f"{start.value}\n"
    assert main(["check", str(RECIPE), *words]) == 2  # all mistakes at once, with places
    assert str(start.value) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["--on", "pbs"], "one of slurm, torchrun, kubeflow, hf-jobs, ray"),
        (["--image", "x"], "--image: x: torchrun takes none, only slurm and kubeflow and hf-jobs; leave it out"),
        (["--on", "slurm", "--partition", "a b"], "--partition: 'a b' is not a partition; write its name"),
        (["--on", "slurm", "--account", "a;id"], "--account: 'a;id' is not an account; write its name"),
        (["--on", "slurm", "--image", "-v"], "--image: '-v' is not an image; "),
        (
            ["--on", "slurm", "--image", "reg/x:1"],
            "--image: apptainer reads reg/x:1 as a file's name; write docker://reg/x",
        ),
        (["training.sed=1"], "training.sed"),
        (["--on", "accelerate"], "; take torchrun"),
    ],
)
def test_mistakes_of_the_command(words: list[str], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", str(RECIPE), *words]) == 2
    assert word in capsys.readouterr().err


def test_a_file_of_somebody_else_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.sh"
    for nodes in ("1", "2"):
        assert main(["launch", str(RECIPE), "--on", "slurm", "--nodes", nodes, "-o", str(file)]) == 0
        assert file.read_text() == capsys.readouterr().out
    file.write_text("mine\n")
    assert main(["launch", str(RECIPE), "--on", "slurm", "-o", str(file)]) == 2
    assert "was not made by finetune" in capsys.readouterr().err
    assert file.read_text() == "mine\n"
    assert main(["launch", str(RECIPE), "--on", "slurm", "--json", "-o", str(tmp_path / "b.sh")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["ok"], result["processes"], result["script"]) == (True, 4, (tmp_path / "b.sh").read_text())


def test_a_recipe_elsewhere_and_a_name_that_would_end_a_comment(tmp_path: Path) -> None:
    recipe = tmp_path / "my\nrecipe $(touch x).yaml"
    recipe.write_text(RECIPE.read_text())
    text = script(plan_launch(recipe, [], launcher="slurm"))
    assert "#SBATCH --job-name=my-recipe---touch-x-\n" in text
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a", "SLURM_CPUS_PER_TASK": "1"}
    assert str(recipe) in "\n".join(said_by(text, tmp_path, **job))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("on", ["slurm", "torchrun"])
def test_no_path_of_this_checkout_is_in_the_file(on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine has the package elsewhere. It is found there by its name."""
    monkeypatch.chdir(tmp_path)
    text = script(plan_launch(Path("llama3_fsdp"), [], launcher=on))
    assert str(ROOT) not in text


@pytest.mark.thorough
def test_it_loads_no_torch() -> None:
    words = ["launch", str(RECIPE), "--on", "slurm"]
    code = f"import sys; from finetune.cli.main import main; main({words!r}); print(sorted(sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert not {"torch", "accelerate", "transformers"} & set(eval(process.stdout.splitlines()[-1]))


SRUN = """#!/bin/bash
# Two nodes on this machine: a task for each, as Slurm starts them. Their processes are listed in $TASKS.
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST
tasks=() code=0
for node in 0 1; do
  SLURM_NODEID=$node SLURM_PROCID=$node "$@" &
  tasks+=($!)
done
echo "${tasks[@]}" > "$TASKS"
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit "$code"
"""
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then echo 127.0.0.1; else echo "$@" >> "$REQUEUED"; fi
"""


def started(file: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "PET_"))}
    tools = {"PATH": f"{file.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        ["bash", str(file), *arguments],
        cwd=ROOT,
        env=plain | tools | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(*processes: subprocess.Popen[str]) -> list[int]:
    """Exit codes; on failure what was said is the test's output."""
    for process in processes:
        try:
            print(process.communicate(timeout=400)[0][-3000:])
        finally:
            process.kill()
    return [process.returncode for process in processes]


def steps_of(run_dir: Path) -> int:
    lines = read_lines(run_dir / "metrics.jsonl") if (run_dir / "metrics.jsonl").exists() else []
    return max((line["step"] for line in lines), default=0)


def state_of(run_dir: Path) -> str:
    return str(json.loads((run_dir / "run_state.json").read_text())["state"])


@pytest.mark.slow
@pytest.mark.parametrize(("on", "nodes"), [("torchrun", 1), ("torchrun", 2)])
def test_the_file_runs(on: str, nodes: int, tmp_path: Path) -> None:
    recipe, run_dir, file = write_resume_recipe(tmp_path, steps=4, dropout=0.0), tmp_path / "run", tmp_path / "start.sh"
    words = [str(recipe), "--on", on, "--nodes", str(nodes), "-o", str(file)]
    assert main(["launch", *words, f"output_dir={run_dir}", "accelerate_config=fsdp2"]) == 0
    # Other tests of this machine may have the usual one.
    file.write_text(file.read_text().replace(" 29500 ", f" {free_ports(1)[0]} "))
    machines = [[str(number), "127.0.0.1"] for number in range(nodes)] if nodes > 1 else [[]]
    assert ended(*(started(file, *machine) for machine in machines)) == [0] * nodes
    assert (state_of(run_dir), steps_of(run_dir)) == ("finished", 4)
    receipt = json.loads((run_dir / "receipt.json").read_text())
    assert (receipt["strategy"], receipt["world_size"], receipt["nodes"]) == ("fsdp2", 2, nodes)


@pytest.mark.slow
def test_a_slurm_job_stops_before_its_time_queues_again_and_ends(tmp_path: Path) -> None:
    recipe, run_dir, file = write_resume_recipe(tmp_path, steps=60, dropout=0.0), tmp_path / "run", tmp_path / "job.sh"
    words = [str(recipe), "--on", "slurm", "--nodes", "2", "-o", str(file)]
    assert main(["launch", *words, f"output_dir={run_dir}", "accelerate_config=ddp", "eval_steps=60"]) == 0
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    tasks, requeued = tmp_path / "tasks", tmp_path / "requeued"
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_CPUS_PER_TASK": "1"}
    job |= {"TASKS": str(tasks), "REQUEUED": str(requeued)}
    first = started(file, **job)
    end = time.monotonic() + 300
    while steps_of(run_dir) < 2 and first.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    for task in tasks.read_text().split():  # what Slurm does 300 s before the time limit
        os.kill(int(task), signal.SIGTERM)
    assert ended(first) != [0]
    assert state_of(run_dir) == "stopped"
    assert 2 <= steps_of(run_dir) < 60
    assert shlex.split(requeued.read_text()) == ["requeue", job["SLURM_JOB_ID"]]
    assert ended(started(file, **job, SLURM_RESTART_COUNT="1")) == [0]
    assert (state_of(run_dir), steps_of(run_dir)) == ("finished", 60)
    assert len(requeued.read_text().splitlines()) == 1, "a finished run is not queued again"
    receipt = json.loads((run_dir / "receipt.json").read_text())
    assert (receipt["world_size"], receipt["nodes"]) == (2, 2)


@pytest.mark.parametrize(("on", "named"), [("kubernetes", True), ("K8s", True), ("docker", True), ("pbs", False)])
def test_containers_have_a_page(on: str, named: bool, tmp_path: Path) -> None:
    with pytest.raises(FinetuneError, match=r"is not one of slurm, torchrun") as caught:
        plan_launch(tmp_path / "unread.yaml", [], launcher=on)
    assert ("docs/launching.md" in str(caught.value)) == named


@pytest.mark.slow
@pytest.mark.parametrize("on", LAUNCHERS)
def test_every_recipe_has_a_file_or_one_line(on: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"kubeflow": ["--image", "x"], "hf-jobs": ["--image", "x", "--timeout", "8h", *PUSHED]}.get(on, [])
    files, lines = 0, 0
    for recipe in sorted(RECIPES.glob("*.yaml")):
        code = main(["launch", recipe.stem, "--on", on, *options])
        output = capsys.readouterr()
        if code == 0:
            assert "Made by: finetune launch " in output.out
            assert output.err == ""
            files += 1
        else:
            assert (code, output.out, len(output.err.splitlines())) == (2, "", 1)
            assert "; " in output.err, "the remedy"
            lines += 1
    assert files + lines == len(list(RECIPES.glob("*.yaml")))
    # Refused are NVMe, packages of this machine and, on HF Jobs, several machines.
    assert (lines == 0) is (on not in ("kubeflow", "hf-jobs"))
    assert files > 35
