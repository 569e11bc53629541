"""`finetune launch --on ray`: a real local Ray runs the file."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

from finetune.cli.main import main
from finetune.errors import RankLost
from finetune.files import read_lines
from finetune.launch.ray_train import trainers_message
from tests.support.runs.soak_resume import write_resume_recipe

ROOT = Path(__file__).resolve().parents[2]


def settings_of(text: str) -> dict[str, object]:
    (settings,) = (
        ast.literal_eval(each.value)
        for each in ast.parse(text).body
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "SETTINGS"
    )
    return settings  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("recipe", "scaling"),
    [
        ("llama3_fsdp", "num_workers=4, use_gpu=True, placement_strategy='STRICT_PACK'"),
        ("llama3_70b_lora_hsdp_2x8x80gb", "num_workers=16, use_gpu=True, placement_strategy='PACK'"),
        ("llama3_8b_lora_1x24gb", "num_workers=1, use_gpu=True, placement_strategy='STRICT_PACK'"),
    ],
)
def test_the_file_asks_ray_for_the_budgets_workers(
    recipe: str, scaling: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", recipe, "--on", "ray"]) == 0
    text = capsys.readouterr().out
    assert f"ScalingConfig({scaling})" in ast.unparse(ast.parse(text))
    assert settings_of(text)["words"] == ["-m", "finetune.train", recipe]


def test_names_arrive(capsys: pytest.CaptureFixture[str]) -> None:
    override = "output_dir=runs/a 'b' $HOME \"c\" {d} \\n"
    assert main(["launch", "llama3_fsdp", "--on", "ray", override]) == 0
    assert settings_of(capsys.readouterr().out)["words"] == ["-m", "finetune.train", "llama3_fsdp", override]


def test_the_trainers_message_is_found_in_rays() -> None:
    """Ray 2.60 wrote the text below, but for its second rank."""
    try:
        raise RankLost("rank 0 ended with exit code 2:\nrecipe.yaml:3: no such thing; name one")
    except RankLost:
        snippets = [f"[Rank {rank} Error Snippet]:\n{traceback.format_exc()}" for rank in range(2)]
    error = Exception("\n".join(["Training failed due to worker errors:", *snippets]))
    assert trainers_message(error) == "rank 0 ended with exit code 2:\nrecipe.yaml:3: no such thing; name one"
    assert trainers_message(Exception("no machine")) == "no machine"


def run(file: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "PET_"))}
    variables = {"PYTHONPATH": f"{ROOT}:{plain.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    variables |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, str(file)], cwd=folder, env=plain | variables, capture_output=True, text=True, timeout=580
    )


@pytest.mark.slow
def test_two_workers_train_the_one_curve_and_a_failing_one_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray.train")
    monkeypatch.chdir(tmp_path)
    recipe = str(write_resume_recipe(Path(), steps=4, dropout=0.0))
    words = ["accelerate_config=ddp", "output_dir=runs/two"]
    assert main(["launch", recipe, "--on", "ray", "-o", "train.py", *words]) == 0
    trained = run(Path("train.py"), tmp_path)
    print(trained.stdout[-3000:], trained.stderr[-5000:])
    assert trained.returncode == 0
    receipt = json.loads(Path("runs/two/receipt.json").read_text())
    assert (receipt["strategy"], receipt["world_size"], receipt["nodes"]) == ("ddp", 2, 1)
    assert main(["train", recipe, "output_dir=runs/one", "accelerate_config=single"]) == 0
    one, two = (
        [line["loss"] for line in read_lines(Path("runs", name, "metrics.jsonl")) if "loss" in line]
        for name in ("one", "two")
    )
    assert len(one) == 4
    assert two == pytest.approx(one, rel=1e-5)

    # The base is gone, after the file was made.
    Path("base/model.safetensors").unlink()
    text = Path("train.py").read_text()
    Path("train.py").write_text(text.replace("runs/two", "runs/three"))
    failed = run(Path("train.py"), tmp_path)
    assert failed.returncode == 1
    message = failed.stderr[failed.stderr.rindex("\nrank 0 ended with exit code ") :]
    assert message.startswith("\nrank 0 ended with exit code 2:\n")
    assert "base" in message
    assert "Traceback" not in message
