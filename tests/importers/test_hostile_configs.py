"""`finetune import` of what grows, loops or divides by zero: one line with its place, exit code 2, within seconds."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune.cli.main import main
from tests.support.rows.others_configs import (
    AXOLOTL_LORA_8B,
    EXAMPLES,
    FACTORY_LLAMA,
    TRL_SHORT,
    Values,
)

AXOLOTL = yaml.safe_dump(AXOLOTL_LORA_8B)
SECONDS = 10


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """A case that hangs or takes memory without end fails, and leaves the machine usable."""

    def give_up(*_: object) -> None:
        raise TimeoutError

    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + 2**30, before[1]))
    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)
    resource.setrlimit(resource.RLIMIT_AS, before)


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * os.sysconf("SC_PAGE_SIZE")


def refused(file: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line about a file that is not taken."""
    assert main(["import", str(file), *words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    lines = output.err.splitlines()
    assert len(lines) == 1, output.err
    assert len(lines[0]) < 600
    return lines[0]


GROWING = {
    "aliases that double": (
        AXOLOTL + "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    ),
    "an alias inside of itself": AXOLOTL + "a: &a [*a, *a]\n",
    "lists in lists": AXOLOTL + f"a: {'[' * 5000}{']' * 5000}\n",
    "sections in sections": AXOLOTL + f"a: {'{a: ' * 300}1{'}' * 300}\n",
}  # fmt: skip


@pytest.mark.parametrize("name", GROWING)
def test_values_that_grow(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "theirs.yaml").write_text(GROWING[name])
    assert refused(file, capsys).startswith(f"{file}:")


def test_a_reference_is_text(tmp_path: Path) -> None:
    """A dollar and a brace in a template of axolotl's are text."""
    from finetune.importers import convert

    jinja = "{% for m in messages %}${a}{{ m['content'] }}{% endfor %}"
    (file := tmp_path / "theirs.yaml").write_text(yaml.safe_dump(AXOLOTL_LORA_8B | {
        "datasets": [{"path": "org/x", "type": "chat_template"}], "chat_template_jinja": jinja, "a": "${a}${a}",
    }))  # fmt: skip
    assert convert(file).carried["data.chat_template"][0] == jinja


STRANGE: list[Any] = [
    0, -1, float("inf"), float("nan"), 10**400, "x", [[]], -0.5, 2.5, 1e308, float("-inf"), True, [], {"a": 1}, "1e999",
    "-", "\\",
]  # fmt: skip


def numbers(values: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if isinstance(values, dict | list):
        for key, inner in values.items() if isinstance(values, dict) else enumerate(values):
            yield from numbers(inner, (*path, key))
    elif isinstance(values, int | float) and not isinstance(values, bool):
        yield path


ADDED: dict[str, Values] = {
    "axolotl": {"batch_size": 8, "context_parallel_size": 2, "tensor_parallel_size": 1, "max_steps": 5,
                "early_stopping_patience": 2, "cosine_min_lr_ratio": 0.1, "warmup_steps": 3},
    "llamafactory": {"val_size": 0.1, "max_steps": 3, "eval_steps": 5, "quantization_bit": 4, "warmup_steps": 2},
    "trl": {"max_steps": 3, "warmup_steps": 2, "lora_r": 8, "use_peft": True, "weight_decay": 0.1,
            "dataset_mixture": {"datasets": [{"path": "a/b", "weight": 0.5}], "test_split_size": 0.1},
            "per_device_train_batch_size": 2, "lr_scheduler_kwargs": {"num_cycles": 0.5}},
}  # fmt: skip
BASES: dict[str, Values] = {
    "axolotl": AXOLOTL_LORA_8B, "llamafactory": FACTORY_LLAMA, "trl": TRL_SHORT
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("tool", BASES)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_numeric_key_of_every_tool(
    tool: str, every: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default each key gets one of the values, in turn."""
    signal.alarm(300)
    values = BASES[tool] | ADDED[tool]
    paths, refusals = list(numbers(values)), 0
    assert len(paths) >= 9
    cases = [(path, STRANGE[index % len(STRANGE)]) for index, path in enumerate(paths)]
    if every:
        cases = [(path, strange) for path in paths for strange in STRANGE]
    for path, strange in cases:
        changed = json.loads(json.dumps(values))
        holder = changed
        for part in path[:-1]:
            holder = holder[part]
        holder[path[-1]] = strange
        (file := tmp_path / "theirs.yaml").write_text(yaml.safe_dump(changed))
        code = main(["import", str(file), "--gpus", "4x80GB", "--tool", tool])
        output = capsys.readouterr()
        assert code in (0, 2), (path, output.err)
        if code == 2:
            refusals += 1
            assert output.err.startswith(f"{file}"), (path, output.err)
            assert all(str(file) in line or line.endswith(" mistakes") for line in output.err.splitlines()), output.err
    assert refusals >= len(paths) // 2


@pytest.mark.parametrize("stage", ["1e999", "9" * 400, "4", "-1", "1.5", "true", '"three"', "[3]", '{"a": 3}', "NaN"])
@pytest.mark.parametrize("inline", [False, True])
def test_stages_that_no_engine_has(
    stage: str, inline: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f'{{"zero_optimization": {{"stage": {stage}}}}}'
    (tmp_path / "ds.json").write_text(text)
    (file := tmp_path / "theirs.yaml").write_text(
        yaml.safe_dump(TRL_SHORT) + f"deepspeed: {text if inline else 'ds.json'}\n"
    )
    line = refused(file, capsys, "--gpus", "2x24GB")
    assert "deepspeed: zero_optimization.stage is " in line
    assert line.endswith("write 0, 1, 2 or 3")


FILES = {
    "nested deep": "[" * 100_000, "nested deep, closed": "[" * 5000 + "]" * 5000,
    "sections in sections": '{"a":' * 3000 + "1" + "}" * 3000, "a list": "[1]", "no JSON": "mine: yes",
    "cut off": '{"mine": {', "not UTF-8": "\udcff", "a number of 5,000 digits": '{"mine": ' + "9" * 5000 + "}",
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", ["data/dataset_info.json", "ds.json", "fsdp.json"])
def test_files_that_a_configuration_names(
    name: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / place).write_bytes(FILES[name].encode("utf-8", "surrogateescape"))
    keys = {"ds.json": {"deepspeed": "ds.json"}, "fsdp.json": {"fsdp": "full_shard", "fsdp_config": "fsdp.json"}}
    (file := tmp_path / "theirs.yaml").write_text(yaml.safe_dump(FACTORY_LLAMA | keys.get(place, {})))
    line = refused(file, capsys, "--gpus", "2x24GB")
    assert str(tmp_path / place) in line
    assert line.endswith("; correct the file, or take it away")


@pytest.mark.parametrize("place", ["data/dataset_info.json", "ds.json"])
def test_a_pipe_is_not_waited_for(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    os.mkfifo(tmp_path / place)
    (file := tmp_path / "theirs.yaml").write_text(yaml.safe_dump(FACTORY_LLAMA | {"deepspeed": "ds.json"}))
    assert "pipe" in refused(file, capsys)


ENTRIES: dict[str, Any] = {
    "a text": "rows.json", "a list": ["rows.json"], "columns in a list": {"columns": ["a"]}, "columns of lists":
    {"columns": {"prompt": ["a"]}}, "tags in a text": {"tags": "role"}, "a name that is a number": {"file_name": 7},
    "a repository in a list": {"hf_hub_url": ["a/b"]}, "no rows": {"num_samples": 0},
    "rows by half": {"num_samples": 1.5},
    "rows without end": {"num_samples": float("inf")}, "rows in words": {"num_samples": "many"},
    "a split in a list": {"split": ["train"]},
}  # fmt: skip


@pytest.mark.parametrize("name", ENTRIES)
def test_entries_of_dataset_info(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps({"mine": ENTRIES[name]}))
    (file := tmp_path / "theirs.yaml").write_text(yaml.safe_dump(FACTORY_LLAMA | {"dataset": "mine"}))
    assert "dataset_info.json: " in refused(file, capsys)


@pytest.mark.sample(8)
@pytest.mark.parametrize("key", ["deepspeed", "dataset_dir", "fsdp_config", "output_dir", "model_name_or_path"])
@pytest.mark.parametrize("text", ["x" * 300, "x" * 5000, "../" * 2000, "/dev/zero", "/dev/null", "."])
def test_long_and_strange_paths(key: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file := tmp_path / "theirs.yaml").write_text(yaml.safe_dump(FACTORY_LLAMA | {key: text}))
    assert main(["import", str(file), "--gpus", "2x24GB"]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err


def test_what_no_converter_expects_names_its_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = EXAMPLES["axolotl lora-8b"].values | {"lora_target_modules": {"a": {"b": 1}}, "lora_target_linear": None}
    (file := tmp_path / "theirs.yaml").write_text(yaml.safe_dump(values))
    assert "lora_target_modules: " in refused(file, capsys)
