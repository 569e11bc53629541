"""`finetune launch --on hf-jobs`: the Hub's own client reads the command, and its flavours exist."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from enum import EnumMeta
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from finetune.cli import main as verbs
from finetune.cli.main import main
from finetune.launch.hf_jobs import _FLAVOURS
from finetune.paths import RECIPES
from finetune.recipe.gpus import MODELS

IMAGE = ["--on", "hf-jobs", "--image", "registry.example/finetune:1.0"]
PUSHED = ["hub.push=true", "hub.repo_id=me/tuned"]
TOKEN = "hf_" + "a1B2" * 8
# Version 1.5 has neither a list of the flavours nor --dry-run; what it submits is the same.
CLIENT_SHOWS = isinstance(getattr(huggingface_hub, "JobHardware", None), EnumMeta)
only_newer_clients = pytest.mark.skipif(not CLIENT_SHOWS, reason="this client lists no flavours")


def submitted(file: Path, folder: Path) -> dict[str, str]:
    """What `hf jobs run --dry-run` would submit, as the file's own shell calls it: line by line, and every word."""
    tool = folder / "bin" / "hf"
    tool.parent.mkdir(exist_ok=True)
    client = f"{Path(sys.executable).parent}/hf jobs run --dry-run"
    tool.write_text(f'#!/bin/bash\nprintf \'%s\\0\' "$@" > {folder}/words\nexec {client} "${{@:3}}"\n')
    tool.chmod(0o755)
    process = subprocess.run(
        ["bash", str(file)],
        cwd=folder,
        env={"PATH": f"{tool.parent}:{os.environ['PATH']}", "HOME": str(folder), "HF_TOKEN": TOKEN, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr
    assert "Job not submitted" in process.stdout
    return dict(re.findall(r"^  (\w+) +(.*)$", process.stdout, re.MULTILINE))


def words_of(folder: Path) -> list[str]:
    return (folder / "words").read_bytes().decode().split("\0")[:-1]


@only_newer_clients
def test_every_flavour_exists_and_has_its_gpus() -> None:
    """By the client's own list, whose names end with the number of GPUs if there are several."""
    listed = {each.value for each in huggingface_hub.JobHardware}
    for count, flavours in _FLAVOURS.items():
        assert [flavour.memory_gb for flavour in flavours] == sorted(flavour.memory_gb for flavour in flavours)
        for flavour in flavours:
            assert flavour.name in listed
            number = re.search(r"x(\d+)$", flavour.name)
            assert count in (0, 1 if number is None else int(number[1]))
            assert flavour.name.replace("-", "").startswith(flavour.gpu.lower())
            assert not flavour.gpu or flavour.gpu in MODELS, "else no plan knows its time"
    assert set(_FLAVOURS) == {0, 1, 2, 4, 8}


@pytest.mark.parametrize(
    ("recipe", "overrides", "flavour"),
    [
        ("llama3_8b_lora_1x24gb", [], "l4x1"),
        ("llama3_8b_lora_1x80gb", [], "a100-large"),
        ("llama3_70b_int8_1x141gb", [], "h200"),
        ("llama3_fsdp", [], "l4x4"),
        ("smollm3_3b_full_apo_fsdp2_2x80gb", [], "rtx-pro-6000x2"),
        ("llama3_8b_full_fsdp2_grad_op_8x80gb", [], "a100x8"),
        ("llama3_8b_lora_1x80gb", ["model.load_in_fp8=true"], "rtx-pro-6000"),
        ("llama3_8b_lora_1x24gb", ["budget.gpus=0"], "cpu-upgrade"),
    ],
)
def test_the_budget_chooses_the_flavour(
    recipe: str, overrides: list[str], flavour: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", recipe, *IMAGE, "--timeout", "8h", *PUSHED, *overrides]) == 0
    assert f" --flavor {flavour} --timeout 8h --secrets HF_TOKEN \\\n" in capsys.readouterr().out


def test_wandbs_variables_go_along(capsys: pytest.CaptureFixture[str]) -> None:
    for tracked in ([], ["report_to=[wandb]"]):
        assert main(["launch", "llama3_ddp", *IMAGE, "--timeout", "90m", *PUSHED, *tracked]) == 0
        script = capsys.readouterr().out
        assert ("  --secrets WANDB_API_KEY --env WANDB_PROJECT \\\n" in script) == bool(tracked)


@pytest.mark.thorough
@only_newer_clients
def test_the_client_would_submit_it(tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    assert main(["launch", "llama3_ddp", *IMAGE, "--timeout", "90m", *PUSHED, "-o", str(file)]) == 0
    job = submitted(file, tmp_path)
    assert (job["image"], job["flavor"], job["timeout"]) == ("registry.example/finetune:1.0", "l4x4", "90m")
    assert job["command"] == "finetune train llama3_ddp hub.push=true hub.repo_id=me/tuned"
    assert job["secrets"].startswith("HF_TOKEN=")
    assert TOKEN not in file.read_text()
    assert "env" not in job


@pytest.mark.thorough
@only_newer_clients
def test_an_own_recipe_and_its_names_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The container's shell writes the recipe that this machine's shell sent."""
    monkeypatch.chdir(tmp_path)
    name, override = "my $(touch x) 'q' \"7\".yaml", "output_dir=runs/a 'b' $HOME \"c\" $(touch x)"
    text = (RECIPES / "llama3_ddp.yaml").read_text() + "# ü\n"
    Path(name).write_text(text)
    assert main(["launch", name, *IMAGE, "--timeout", "2h", *PUSHED, override, "-o", "job.sh"]) == 0
    submitted(tmp_path / "job.sh", tmp_path)
    words = words_of(tmp_path)
    recipe = words[words.index("--env") + 1].removeprefix("RECIPE=")
    assert base64.b64decode(recipe).decode() == text
    container = tmp_path / "container"
    container.mkdir()
    trainer = tmp_path / "bin" / "finetune"
    trainer.write_text('#!/bin/bash\nprintf "%s\\0" "$@" > ../trained\n')
    trainer.chmod(0o755)
    command = words[words.index("bash") :]
    subprocess.run(
        command, cwd=container, check=True, env={"PATH": f"{trainer.parent}:{os.environ['PATH']}", "RECIPE": recipe}
    )
    assert (container / name).read_text() == text
    trained = (tmp_path / "trained").read_bytes().decode().split("\0")[:-1]
    assert trained == ["train", f"./{name}", *PUSHED, override]
    assert not list(tmp_path.rglob("x"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["llama3_ddp"], "hub.push: is false, and a job's disk ends with it; "),
        (["llama3_70b_lora_hsdp_2x8x80gb", *PUSHED], "budget.nodes: 2 machines, and an HF job has one; "),
        (["llama3_zero3_nvme", *PUSHED], "accelerate_config: zero3_nvme writes to a fast disk, "),
        (["llama3_ddp", *PUSHED, "budget.gpus=3"], "budget: HF Jobs has no machine with 3 GPUs of 24 GB; "),
        (["llama3_ddp", *PUSHED, "budget.gpu_memory_gb=200"], "budget: HF Jobs has no machine with 4 GPUs of 200 GB; "),
        (
            ["llama3_ddp", *PUSHED, "data.train.0={path: json, data_files: rows.jsonl}"],
            "data: rows.jsonl is on this machine, ",
        ),
        (["llama3_ddp", *PUSHED, "--timeout", "8 hours"], "--timeout: '8 hours' is not a time; "),
        (["llama3_ddp", *PUSHED], "--timeout: is missing, and no plan knows how many steps the run has, "),
        (
            ["llama3_ddp", *PUSHED, "budget.gpus=0"],
            "--timeout: is missing, and no plan knows how fast cpu-upgrade is; ",
        ),
    ],
)
def test_what_hf_jobs_cannot_run_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *words, *IMAGE]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(message)
    assert (output.out, len(output.err.splitlines())) == ("", 1)


def test_the_plan_sets_the_timeout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice 600 steps of 12 s and half an hour are 270 minutes. What does not fit is not sent."""
    asked: list[Any] = []

    def plan(words: list[str], options: Any, *_: object) -> tuple[dict[str, Any], str]:
        asked.append((words, options.gpus))
        return {"ok": not words[-1].endswith("=9"), "run": {"seconds": 600 * 12.0}}, ""

    monkeypatch.setattr(verbs.planner, "plan_in_words", plan)
    steps = ["training.max_steps=600"]
    assert main(["launch", "llama3_ddp", *IMAGE, *PUSHED, *steps]) == 0
    assert " --timeout 270m " in capsys.readouterr().out
    assert asked == [(["llama3_ddp", *PUSHED, *steps], "4xL4")]
    assert main(["launch", "llama3_ddp", *IMAGE, *PUSHED, *steps, "training.per_device_batch_size=9"]) == 3
    assert "does not fit on l4x4; see finetune plan llama3_ddp" in capsys.readouterr().err
