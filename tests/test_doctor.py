"""`finetune doctor`: what it finds, what it says of it, and that nothing private is in it."""

from __future__ import annotations

import argparse
import getpass
import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from finetune import doctor
from finetune.cli.main import main
from finetune.doctor import Finding, as_text, count_weights, examine_machine, free_bytes, need_of, scope
from finetune.errors import EnvironmentMismatch
from finetune.launch.launcher import read_launch
from finetune.recipe.loader import load_recipe
from finetune.redaction import redact, variables
from finetune.strategies.machine import OLDER_WHEELS
from finetune.wording import GIB
from tests.support.hub import running_hub
from tests.support.hub.server import TOKEN, WRITER
from tests.support.runs.launching import check_launch
from tests.support.stand_ins.pretend_cuda import pretended_cuda

ROOT = Path(__file__).resolve().parents[1]
PLANTED = "hf_" + "q7Wz" * 9


def states(findings: Any) -> list[tuple[str, str]]:
    return [(finding.name, finding.state) for finding in findings]


@pytest.fixture
def jane(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user jane on a machine called ganymede, with a home of her own and a token in the environment."""
    home = tmp_path / "home" / "jane"
    home.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_TOKEN", PLANTED)
    monkeypatch.setattr(getpass, "getuser", lambda: "jane")
    monkeypatch.setattr(socket, "gethostname", lambda: "ganymede")
    return home


def test_nothing_private_is_shown(jane: Path) -> None:
    values = {"seen": f"{jane}/runs on ganymede: {PLANTED} of jane", "more": ["/home/paul/x", 7, None]}
    assert redact(values) == {"seen": "~/runs on HOST: [hidden] of USER", "more": ["~/x", 7, None]}


def test_a_name_inside_of_another_word_stays(jane: Path) -> None:
    assert redact("janeway ganymede-2 jane") == "janeway ganymede-2 USER"


def test_of_variables_only_plain_words_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALPHA", "1")
    monkeypatch.setenv("NCCL_BETA", "/mnt/jane/x")
    monkeypatch.setenv("NCCL_GAMMA", PLANTED)
    values = variables(r"NCCL_(ALPHA|BETA|GAMMA|DELTA)")
    assert values == {"NCCL_ALPHA": "1", "NCCL_BETA": "set", "NCCL_GAMMA": "[hidden]"}


@pytest.mark.slow
def test_the_whole_report_as_a_user_gets_it(tmp_path: Path) -> None:
    home = tmp_path / "jane"
    config = home / ".cache" / "huggingface" / "accelerate" / "default_config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text("distributed_type: MULTI_GPU\nnum_processes: 4\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XDG_"))}
    environment |= {"HOME": str(home), "USER": "jane", "LOGNAME": "jane", "HF_TOKEN": PLANTED, "NCCL_DEBUG": "INFO"}
    process = subprocess.run(
        [sys.executable, "-m", "finetune.cli.main", "doctor", "--json"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    report = json.loads(process.stdout)
    assert process.returncode == (0 if report["ok"] else 4), process.stderr
    for private in ("jane", PLANTED, str(tmp_path), socket.gethostname()):
        assert private not in process.stdout + process.stderr
    by_name = {finding["name"]: finding for finding in report["findings"]}
    assert set(by_name) == {
        "python", "libraries", "extras", "devices", "wheels", "disk", "token", "accelerate", "variables",
    }  # fmt: skip
    assert f"torch {torch.__version__}" in by_name["libraries"]["seen"]
    assert "MULTI_GPU, 4 processes" in by_name["accelerate"]["seen"]
    assert by_name["accelerate"]["state"] == "look"
    assert "~/.cache/huggingface/accelerate/default_config.yaml" in by_name["accelerate"]["remedy"]
    assert "from HF_TOKEN" in by_name["token"]["seen"]
    assert "NCCL_DEBUG=INFO" in by_name["variables"]["seen"]


def test_a_library_out_of_range_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.51.0" if name == "transformers" else real(name))
    findings = list(doctor.check_libraries())
    assert ("libraries", "bad") in states(findings)
    assert [each.remedy for each in findings if each.state == "bad"] == ["pip install 'transformers>=5.17'"]


def test_the_installed_libraries_are_in_range() -> None:
    assert states(doctor.check_libraries()) == [("libraries", "ok")]


def test_an_extra_that_does_not_load_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    extras = {"json": ("json", "x", "a"), "gone": ("no_such_module", "x", "a"), "absent": ("y", "z", "ray")}
    monkeypatch.setattr(doctor, "EXTRAS", extras)
    monkeypatch.setattr(doctor, "installed_version", lambda name: None if name == "absent" else "1.0")
    findings = list(doctor.check_extras())
    assert states(findings) == [("extras", "ok"), ("extras", "bad"), ("extras", "look")]
    assert "ModuleNotFoundError: No module named 'no_such_module'" in findings[1].seen
    assert findings[2].remedy == "for z, in the checkout: pip install -e '.[ray]'"


@pytest.mark.parametrize(
    ("cuda", "driver", "state", "words"),
    [
        (None, "/usr/bin/nvidia-smi", "bad", "built for the CPU"),
        ("13.0", "/usr/bin/nvidia-smi", "bad", "built for CUDA 13.0, sees no GPU behind this driver"),
        ("13.0", None, "ok", "built for 13.0"),
    ],
)
def test_the_wheel_against_the_driver(
    cuda: str | None, driver: str | None, state: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("a driver is here")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(shutil, "which", lambda name: driver)
    wheels = [finding for finding in doctor.check_has_gpus() if finding.name == "wheels"]
    assert [finding.state for finding in wheels] == [state]
    assert words in wheels[0].seen


def test_a_gpu_that_torch_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_cuda(monkeypatch):
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
        monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
        found = [(each.name, each.state, each.seen) for each in doctor.check_has_gpus()][1:]
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_70"])
        old = list(doctor.check_has_gpus())[1]
    assert found == [
        ("devices", "ok", "GPU 0: Card 0, 80.0 of 80.0 GiB free, bf16 yes"),
        ("wheels", "ok", f"torch {torch.__version__}, built for 13.0"),
    ]
    assert (old.state, old.remedy) == ("bad", OLDER_WHEELS)


LLAMA = "model: {name_or_path: meta-llama/Llama-3.1-8B-Instruct}\ndata: {train: [{path: json, data_files: x.jsonl}]}\n"


def recipe_of(tmp_path: Path, text: str = LLAMA, *overrides: str) -> Any:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    return load_recipe(file, overrides).recipe


@pytest.mark.slow
def test_weights_are_counted_without_weights(tmp_path: Path) -> None:
    assert count_weights(recipe_of(tmp_path)) == (8_030_261_248 + 41_943_040, 41_943_040)
    assert count_weights(recipe_of(tmp_path, LLAMA, "lora=null")) == (8_030_261_248, 8_030_261_248)


BEST = ("training.load_best_model_at_end=true", "data.eval={fraction: 0.1}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "checkpoint", "export"),
    [
        ("lora=null", 12 * 8_030_261_248, 2 * 8_030_261_248),
        ("lora.r=16", 12 * 41_943_040, 4 * 41_943_040),
        ("training.pure_bf16=true", 6 * 41_943_040, 2 * 41_943_040),
        ("training.optim=paged_adamw_8bit", 6 * 41_943_040, 4 * 41_943_040),
    ],
)
def test_what_a_run_writes(override: str, checkpoint: int, export: int, tmp_path: Path) -> None:
    need = need_of(recipe_of(tmp_path, LLAMA, override, "save_total_limit=2"))
    assert (need.checkpoint, need.export) == (checkpoint, export)
    assert need.in_run_folder == 3 * checkpoint + export
    best = need_of(recipe_of(tmp_path, LLAMA, override, "save_total_limit=2", *BEST))
    assert best.in_run_folder == 4 * checkpoint + export
    assert need.download >= 2 * 8_030_261_248


@pytest.mark.slow
def test_the_need_is_what_a_real_run_writes(tiny_llama: Path, tmp_path: Path) -> None:
    from tests.support.models.tiny import write_chats

    write_chats(tmp_path / "chats.jsonl", [20] * 16)
    text = f"model: {{name_or_path: {tiny_llama}, dtype: float32}}\nlora: null\nsamples: {{count: 0}}\n"
    text += f"data: {{train: [{{path: json, data_files: {tmp_path}/chats.jsonl}}], max_length: 64}}\n"
    text += "training: {global_batch_size: 2, max_steps: 2, mixed_precision: 'no'}\nsave_steps: 2\n"
    text += f"output_dir: {tmp_path}/run\n"
    recipe = recipe_of(tmp_path, text)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "FINETUNE_CACHE": str(tmp_path / "cache")}
    words = [sys.executable, str(ROOT / "finetune" / "train.py"), str(tmp_path / "recipe.yaml")]
    process = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, process.stderr[-2000:]

    def size(folder: Path) -> int:
        return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))

    need = need_of(recipe)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert size(checkpoint) == pytest.approx(need.checkpoint, rel=0.02)
    assert size(tmp_path / "run" / "model") == pytest.approx(need.export, rel=0.02)
    assert need.download == 0


@pytest.mark.thorough
def test_too_little_disk_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_bytes", lambda folder: GIB)
    findings = list(doctor.check_disk(recipe_of(tmp_path, LLAMA, "save_total_limit=5")))
    assert states(findings) == [("disk", "ok"), ("disk", "bad"), ("disk", "bad")]
    assert "6 checkpoints of 0.5" in findings[1].seen
    assert free_bytes(tmp_path / "not" / "there" / "yet") > 0
    findings = list(doctor.check_disk(recipe_of(tmp_path, LLAMA, "save_total_limit=5", *BEST)))
    assert "7 checkpoints of 0.5" in findings[1].seen


def test_a_folder_that_cannot_be_written_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "may_write", lambda folder: folder != Path.cwd())
    bad = [finding for finding in doctor.check_disk(None) if finding.state == "bad"]
    assert [finding.seen for finding in bad] == ["the run folder cannot be written"]
    assert doctor.may_write(tmp_path / "new")


def test_an_unknown_model_is_to_look_at(tmp_path: Path) -> None:
    findings = list(doctor.check_disk(recipe_of(tmp_path, LLAMA.replace("Llama-3.1-8B-Instruct", "Llama-99"))))
    assert states(findings) == [("disk", "ok"), ("disk", "look")]


def test_what_the_hub_says_of_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with running_hub(users={TOKEN: WRITER}) as hub:
        assert scope(None, hub.url) == "write"
        assert scope("me/mine", hub.url) == "write, may write to hub.repo_id"
        with pytest.raises(EnvironmentMismatch) as caught:
            scope("stranger/theirs", hub.url)
        assert "stranger" not in str(caught.value)
        assert WRITER["name"] not in str(caught.value).replace("them", "").split()
        hub.fail("whoami", status=401)
        with pytest.raises(EnvironmentMismatch, match="401") as caught:
            scope(None, hub.url)
        assert TOKEN not in str(caught.value)


def test_no_network_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    assert "none; gated models" in next(doctor.check_token(None, online=True)).seen
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: PLANTED)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda *_, **__: pytest.fail("the Hub was asked"))
    finding = next(doctor.check_token(None, online=False))
    assert (finding.state, PLANTED in finding.seen) == ("ok", False)


def test_what_is_bad_ends_with_exit_code_4(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    well, ill = Finding("python", "ok", "3.14"), Finding("disk", "bad", "full", "free it")
    monkeypatch.setattr(doctor, "examine_machine", lambda *_, **__: iter([well, ill]))
    assert main(["doctor"]) == 4
    assert capsys.readouterr().out == f"{as_text(well)}\n{as_text(ill)}\n"
    assert as_text(ill).endswith("full\n                free it")
    assert main(["doctor", "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["ok"] is False
    monkeypatch.setattr(doctor, "examine_machine", lambda *_, **__: iter([well]))
    assert main(["doctor"]) == 0


def test_a_finding_is_shown_without_what_is_private(jane: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "check_libraries",
        "check_extras",
        "check_has_gpus",
        "check_accelerate",
        "check_variables",
    ):
        monkeypatch.setattr(doctor, name, lambda: iter([Finding("x", "bad", f"in {jane}", f"{PLANTED} jane")]))
    lines = [as_text(finding) for finding in examine_machine()]
    assert len(lines) >= 7
    assert not [line for line in lines if "jane" in line or PLANTED in line]


MADE_FOR_GPUS = LLAMA + (
    "budget: {gpus: 4, gpu_memory_gb: 24}\naccelerate_config: zero3\n"
    "quantization: {load_in_4bit: true, bnb_4bit_quant_storage: bfloat16}\nreport_to: [wandb]\n"
)


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """As if these packages were not installed."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in modules else real(name, *rest))


@pytest.mark.parametrize(
    ("text", "absent", "bad"),
    [
        (MADE_FOR_GPUS, ("wandb",), ["devices", "trackers", "model"]),
        (
            MADE_FOR_GPUS, ("wandb", "deepspeed", "bitsandbytes"),
            ["devices", "packages", "trackers", "model"],
        ),
        (LLAMA.replace("x.jsonl", "x.xlsx"), ("openpyxl",), ["packages", "model"]),
        (LLAMA + "training: {optim: adamw_8bit}\nlora: null\n", ("bitsandbytes",), ["packages", "model"]),
        (
            LLAMA + "budget: {gpus: 8, nodes: 2, gpu_memory_gb: 80}\naccelerate_config: fsdp2\n", (),
            ["ranks", "devices", "model"],
        ),
        (LLAMA, (), ["model"]),
    ],
)  # fmt: skip
def test_doctor_says_what_train_would_refuse(
    text: str, absent: tuple[str, ...], bad: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of train's refusals on this machine, which has no GPU, and not the first one alone."""
    without(monkeypatch, *absent)
    monkeypatch.setattr("finetune.launch.local_ranks.count_gpus", lambda: 0)  # asks another process
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    found = {each.name: each for each in doctor.check_start(load_recipe(file)) if each.state == "bad"}
    assert [*found] == bad
    assert ("made for 4 GPUs of 24 GB, this machine has none" in str(found.get("devices"))) == (text == MADE_FOR_GPUS)
    if "deepspeed" in absent:
        assert (
            "DeepSpeed 0.19.8 or newer (accelerate_config: zero3) and bitsandbytes (quantization) are not installed"
            in str(found)
        )
        assert "DS_BUILD_OPS=0 pip install -e '.[deepspeed,qlora]'" in found["packages"].remedy
    assert all(each.remedy for each in found.values())
    if bad[0] == "devices":
        with pytest.raises(EnvironmentMismatch) as caught:  # the trainer's own first refusal
            check_launch(load_recipe(file).recipe, replace(read_launch(), words=("python", "train.py", str(file))))
        assert str(caught.value) == "; ".join((found["devices"].seen, found["devices"].remedy))


def test_doctor_says_what_train_would_refuse_on_an_older_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every problem, where a start ends at the first: the card has no bfloat16 and no float8."""
    file = tmp_path / "recipe.yaml"
    file.write_text(LLAMA + "budget: {gpus: 1, gpu_memory_gb: 16}\n")
    recipe = load_recipe(file, ["model.load_in_fp8=true", "training.mixed_precision=bf16"])
    with pretended_cuda(monkeypatch, (7, 5)):
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75"])
        monkeypatch.setattr("finetune.launch.local_ranks.count_gpus", lambda: 1)
        findings = [finding for finding in doctor.check_start(recipe) if finding.name == "devices"]
        with pytest.raises(EnvironmentMismatch) as start:
            check_launch(recipe.recipe, read_launch())
        automatic = load_recipe(file)  # takes fp16 there
        assert [finding.seen for finding in doctor.check_start(automatic) if finding.name == "devices"] == []
    assert [finding.seen.partition(":")[0] for finding in findings] == [
        "model.load_in_fp8", "training.mixed_precision",
    ]  # fmt: skip
    assert str(start.value) == f"{findings[0].seen}; {findings[0].remedy}"


def test_a_token_for_a_gated_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    gated = recipe_of(tmp_path)
    assert states(doctor.check_token(gated, online=False)) == [("token", "bad")]
    assert "is gated" in next(doctor.check_token(gated, online=False)).seen
    asked: list[str] = []

    def answer(api: Any, name: str, token: Any = None) -> Any:
        asked.append(name)
        if name == "some/closed":
            raise ConnectionError("no route")
        return argparse.Namespace(gated={"some/manual": "manual", "some/open": False}[name])

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", answer)
    for name, online, state in (
        ("some/model", False, "look"), ("some/manual", True, "bad"), ("some/open", True, "ok"),
        ("some/closed", True, "bad"),
    ):  # fmt: skip
        recipe = recipe_of(tmp_path, LLAMA.replace("meta-llama/Llama-3.1-8B-Instruct", name))
        assert states(doctor.check_token(recipe, online=online)) == [("token", state)], name
    assert asked == ["some/manual", "some/open", "some/closed"]
    pushes = recipe_of(tmp_path, LLAMA, "hub.push=true", "hub.repo_id=a/b")
    assert [each.state for each in doctor.check_token(pushes, online=False)] == ["bad", "bad"]
    assert states(doctor.check_token(None, online=True)) == [("token", "ok")]
