"""What benchmarks/gpu.py and its parts do without a GPU: in which order and time, and what they keep."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from benchmarks import gpu, gpu_checks, gpu_peer, gpu_profile, gpu_recipes
from benchmarks.gpu_proofs import ProofBench, ProofMachine, plan_proofs
from finetune.probe.compare import LossAndGradients
from finetune.recipe.loader import load_recipe
from finetune.recipe.schema import Recipe
from finetune.rehearse.shrink import sample_texts, train_tokenizer

H100 = 85.0  # GB
LORA, EAGER, FULL = "llama3_8b_lora_1x80gb", "llama3_8b_lora_1x80gb:eager", "llama3_8b_full_1x80gb"
OFFLOADED, QLORA = "llama3_8b_full_fsdp2_offload_1x24gb", "llama3_qlora"


def recipe_of(name: str) -> Recipe:
    return load_recipe(str(gpu.recipes()[name]), []).recipe


# ---- recipes and rows


@pytest.mark.slow
def test_the_recipes_are_those_for_one_gpu() -> None:
    actual = gpu.recipes()
    assert {"llama3_1b_lora_1x8gb", "llama3_8b_lora_1x24gb", QLORA, FULL} <= set(actual)
    assert not {"llama3_70b_int8_1x141gb", "llama3_fsdp", "quickstart"} & set(actual)
    for name in actual:
        assert recipe_of(name).budget.gpus == 1


@pytest.mark.sample(1, thorough=2)
@pytest.mark.parametrize("max_length", [1024, 4096])
def test_rows_fill_what_was_asked_and_none_is_too_long(max_length: int, tmp_path: Path) -> None:
    file = gpu_recipes.write_rows(tmp_path / "rows.jsonl", tokens=20 * max_length, max_length=max_length)
    chats = [json.loads(line)["messages"] for line in file.read_text("utf-8").splitlines()]
    own = "data.train=[{path: json, data_files: data/sample_chat.jsonl}]"
    recipe = load_recipe(str(gpu.recipes()["llama3_1b_lora_1x8gb"]), [own]).recipe
    tokenizer = train_tokenizer(sample_texts(recipe.data))
    tokenizer.model_max_length = max_length
    lengths = [len(tokenizer.apply_chat_template(chat)["input_ids"]) for chat in chats]
    assert max(lengths) <= max_length
    assert sum(lengths) >= 20 * max_length


def test_the_cheapest_and_most_telling_come_first_and_no_recipe_is_forgotten() -> None:
    every = gpu.steps()
    assert every[:3] == ["environment", LORA, FULL]
    assert set(every) - {EAGER, gpu_recipes.DPO} == {*gpu.CHECKS, *gpu.recipes()}
    assert {name for call in (1, 2, 3, 4, 5, 6) for name in gpu.CALLS[call]} >= set(gpu.CHECKS) - {"environment"}
    here = gpu_recipes.Machine(Path("/nowhere"), 150.0)
    reached = gpu.CHECKS["environment"] + sum(gpu_recipes.estimate(recipe_of(name), here) for name in (LORA, FULL))
    assert reached < 9 * 60
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("call", gpu.CALLS)
def test_a_call_fits_into_its_minutes(call: int) -> None:
    """The environment first; 8B's random model is made once a call, and counted in each of its recipes."""
    here = gpu_recipes.Machine(Path("/nowhere"), 150.0)
    seconds = gpu.CHECKS["environment"]
    for name in gpu.CALLS[call]:
        way = None if name in gpu.CHECKS else gpu_recipes.find_way(name)
        assert name in gpu.CHECKS or way is not None or call in (7, 8), f"{name} is no step"
        seconds += gpu.CHECKS.get(name, 0.0) + (gpu_recipes.estimate(way.recipe, here) * (1 + way.again) if way else 0)
    assert 60 * gpu.CALL_MINUTES > seconds >= 30


def test_a_call_runs_its_steps_and_names_a_recipe_that_is_not_here(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(gpu.CALLS, 7, (LORA, "no_such_recipe"))
    assert stage.run("--call", "7") == gpu.NOT_RUN
    assert stage.began == ["environment", LORA]
    assert stage.limits[LORA] == 300.0, "of nine minutes, 30 s are over: three times the estimate is less"
    reason = "there is no recipe no_such_recipe in this checkout"
    assert stage.written()["steps"]["no_such_recipe"] == {"state": "not run", "reason": reason}
    with pytest.raises(SystemExit):
        gpu.main(["no_such_recipe"])
    assert "no such step" in capsys.readouterr().err


@pytest.mark.thorough
def test_the_parent_of_all_imports_no_torch() -> None:
    """Else its CUDA context, or the time of the import, would stand beside what is measured."""
    asked = "import sys, benchmarks.gpu; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], cwd=gpu.ROOT).returncode == 0


@pytest.mark.parametrize(
    ("name", "changes", "profiles", "again"),
    [
        (LORA, (), False, False),
        (f"{LORA}:profile", (), True, False),
        (f"{LORA}:again", (), False, True),
        (f"{LORA}:rows=2", ("training.per_device_batch_size=2",), False, False),
        (f"{LORA}:eager:profile", ("training.compile=false",), True, False),
        (f"{LORA}:fp8", ("model.load_in_fp8=true",), False, False),
        (f"{LORA}:fa4", ("model.flash_attention=FA4",), False, False),
        (f"{LORA}:auto:fp8", (*gpu_recipes.SETTINGS["auto"], "model.load_in_fp8=true"), False, False),
        ("dpo:eager", (*gpu_recipes.DPO_CHANGES, "training.compile=false"), False, False),
    ],
)
def test_a_steps_name_says_how_its_recipe_is_run(name: str, changes: Any, profiles: bool, again: bool) -> None:
    way = gpu_recipes.find_way(name)
    assert way is not None
    assert (way.path.stem, way.changes, way.profiles, way.again) == (LORA, changes, profiles, again)


@pytest.mark.parametrize("name", [f"{LORA}:rows=", f"{LORA}:rows=x", f"{LORA}:twice", f"{LORA}:again:again", "ipo"])
def test_a_name_that_says_nothing_is_no_way(name: str) -> None:
    assert gpu_recipes.find_way(name) is None


def test_pairs_are_rows_of_dpo(tmp_path: Path) -> None:
    way = gpu_recipes.find_way("dpo")
    assert way is not None
    recipe, length = way.recipe, way.recipe.data.max_length
    tokens = recipe.training.global_batch_size * length
    file = gpu_recipes.write_rows(tmp_path / "rows.jsonl", tokens=tokens, max_length=length, pairs=True)
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    assert len(rows) >= recipe.training.global_batch_size
    read = load_recipe(str(way.path), [*way.changes, f"data.train=[{{path: json, data_files: {file}}}]"]).recipe
    texts = sample_texts(read.data)
    assert all(row["chosen"] != row["rejected"] for row in rows)
    assert any(rows[0]["rejected"][0]["content"] in text for text in texts)


# ---- a profile, from traces that are made here


def operation(at: float, length: float, name: str, number: int, dims: Any, thread: int = 1) -> dict[str, Any]:
    arguments = {"External id": number, "Input Dims": dims}
    return {"cat": "cpu_op", "name": name, "ts": at, "dur": length, "tid": thread, "args": arguments}


def kernel(at: float, length: float, name: str, number: int = 0, cat: str = "kernel") -> dict[str, Any]:
    arguments = {"External id": number, "correlation": int(at)}
    return {"cat": cat, "name": name, "ts": at, "dur": length, "args": arguments}


def launch(at: float, of: float) -> dict[str, Any]:
    return {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 1, "args": {"correlation": int(of)}}


def test_a_profile_has_each_class_and_the_idle_time() -> None:
    """In microseconds: kernels from 100 to 1100 in the light trace, of which 250 are idle; two of them overlap."""
    light = [kernel(100, 300, "a"), kernel(300, 200, "b"), kernel(750, 350, "c"), launch(5, 100), launch(6, 300)]
    shaped = [
        operation(0, 9, "aten::mm", 1, [[4000, 4096], [4096, 14336]]),
        operation(10, 9, "aten::addmm", 2, [[], [4000, 16], [16, 4096]]),
        operation(20, 9, "aten::mm", 3, [[512, 4096], [4096, 128256]]),
        operation(30, 9, "aten::add_", 4, [[4000, 4096], [4000, 4096]]),
        {"name": "gpu_profile: update", "cat": "user_annotation", "ts": 40, "dur": 10},
        launch(45, 900),
        kernel(200, 5000, "nvjet_tst_128x256", 1),
        kernel(300, 1000, "sm90_xmma_gemm", 2),
        kernel(400, 2000, "nvjet_tst_64x64", 3),
        kernel(500, 700, "flash_fwd_kernel", 0),
        kernel(600, 300, "triton_red_fused_mul", 0),
        kernel(700, 100, "Memcpy DtoD", 0, "gpu_memcpy"),
        kernel(800, 50, "Memset (Device)", 0, "gpu_memset"),
        kernel(900, 600, "triton_poi_fused_adam", 0),
        kernel(1000, 250, "vectorized_elementwise_kernel", 4),
    ]
    found = gpu_profile.summary({"traceEvents": light}, {"traceEvents": shaped}, vocabulary=128_256)
    milliseconds = {name: each["ms"] for name, each in found["classes"].items()}
    assert milliseconds == {
        "product": 5.0, "adapter product": 1.0, "attention": 0.7, "fused": 0.3, "head": 2.0, "copy": 0.1,
        "update": 0.6, "memset": 0.05, "idle": 0.25, "other": 0.25,
    }  # fmt: skip
    assert (found["idle_share"], found["span_ms"], found["launches"], found["kernels"]) == (0.25, 1.0, 2, 3)
    assert [each["name"] for each in found["longest"][:2]] == ["nvjet_tst_128x256", "nvjet_tst_64x64"]
    assert sum(each["share"] for each in found["classes"].values()) == pytest.approx(1, abs=1e-3)


def test_a_profile_of_a_cpu_counts_the_innermost_operations() -> None:
    """linear calls mm: one of them is counted. Another thread's operation is not inside."""
    trace = {
        "traceEvents": [
            operation(0, 100, "aten::linear", 1, [[8, 64], [256, 64]]),
            operation(10, 60, "aten::mm", 2, [[8, 64], [64, 256]]),
            operation(20, 30, "aten::tanh", 3, [[8, 64]], thread=2),
        ]
    }
    found = gpu_profile.summary(trace, trace, vocabulary=1000)
    assert (found["classes"]["adapter product"]["ms"], found["classes"]["other"]["ms"]) == (0.06, 0.03)
    assert found["kernels"] == 2


def test_the_rival_packs_whole_documents() -> None:
    documents = [[1] * 5, [2] * 4, [3] * 3, [4] * 12, [5]]
    rows = list(gpu_peer.packed(documents, 10))
    assert rows == [[1] * 5 + [2] * 4, [3] * 3, [4] * 12, [5]]


# ---- arithmetic


class Clock:
    """Seconds that go by when a step says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


MACHINE = {
    "name": "machine",
    "state": "ok",
    "seconds": 0.1,
    "seen": "one",
    "machine": {"device": "H100", "gpu_gb": H100},
}
VERSIONS = {
    "name": "versions",
    "state": "ok",
    "seconds": 0.1,
    "seen": "",
    "versions": {"torch": "2.11"},
    "packages": [],
}
PHASES = {"backward": {"measured_bytes": 2 << 30, "planned_bytes": 3 << 30}}
GOOD = {
    "ok": True, "tokens_per_second": 12_345.6, "step_seconds": 0.25, "peak_memory_gib": 2.0, "phases": PHASES,
    "receipt": {"compiled": {"layers": True}},
}  # fmt: skip


class Stage:
    """Steps that take `seconds` of a clock and end as `rows` and `states` say; `began` names those that ran."""

    def __init__(self, folder: Path, patches: pytest.MonkeyPatch) -> None:
        self.clock, self.folder = Clock(), folder
        self.seconds: dict[str, float] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.states: dict[str, str] = {}
        self.codes: dict[str, int | None] = {}
        self.machine: dict[str, Any] = MACHINE
        self.began: list[str] = []
        self.limits: dict[str, float] = {}
        self.now = ""
        patches.setattr(gpu, "run_checks", self.check)
        patches.setattr(gpu, "measure", self.measure)
        patches.setattr(gpu, "why_not", lambda recipe, machine: None)
        patches.setattr(gpu, "estimate", lambda recipe, machine: 100.0)
        others = dict.fromkeys(gpu.CHECKS, 70.0)
        patches.setattr(gpu, "CHECKS", others | {"environment": 40.0, "layers": 60.0, "proofs": 80.0})

    def check(self, kind: str, words: Sequence[str], log: Path, ends: float, watch: Callable[[], object]) -> int | None:
        self.began.append(kind)
        lines = [VERSIONS, self.machine] if kind == "environment" else []
        lines = [
            *lines,
            {"name": f"of {kind}", "state": self.states.get(kind, "ok"), "seconds": 1.0, "seen": "so | so"},
        ]
        for line in lines:
            with open(words[0], "a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
            watch()
        log.write_text(f"log of {kind}\n" * 100_000, "utf-8")
        self.clock.now += self.seconds.get(kind, 30.0)
        return self.codes.get(kind, 0)

    def measure(self, way: gpu_recipes.Way, machine: Any, *, limit: float, log: Path, **_: Any) -> Any:
        name = way.path.stem + gpu_recipes.EAGER * ("training.compile=false" in way.changes)
        name = gpu_recipes.DPO if "training.objective=dpo" in way.changes else name
        self.began.append(name)
        self.limits[name] = limit
        log.write_text("log of a recipe", "utf-8")
        self.clock.now += self.seconds.get(name, 90.0)
        return dict(self.rows.get(name, GOOD))

    def run(self, *words: str) -> int:
        return gpu.main([*words, "--out", str(self.folder)], self.clock)

    def written(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "gpu.json").read_text("utf-8"))
        return found


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path / "out", monkeypatch)


@pytest.mark.slow
def test_what_does_not_fit_the_minutes_is_not_run_and_says_so(stage: Stage) -> None:
    assert stage.run("--minutes", "5") == gpu.NOT_RUN
    # 30 s a check, 90 a recipe, of which 100 are expected: two recipes fit into 300 s, and a check after them.
    assert stage.began == ["environment", LORA, FULL, "layers"]
    rows = stage.written()["steps"]
    assert rows["llama3_1b_lora_1x8gb"] == {"state": "not run", "reason": "100 s needed, 90 s left"}
    assert [name for name, row in rows.items() if row["state"] == "ok"] == stage.began
    assert {row["state"] for name, row in rows.items() if name not in stage.began} == {"not run"}


def test_a_cheaper_step_still_runs_when_a_dear_one_does_not_fit(stage: Stage) -> None:
    assert stage.run("--minutes", "2", LORA, "layers") == gpu.NOT_RUN
    assert stage.began == ["environment", "layers"]


@pytest.mark.slow
def test_without_minutes_all_run(stage: Stage) -> None:
    assert stage.run() == 0
    assert stage.began == gpu.steps()


def test_no_step_is_given_more_than_the_minutes_nor_the_time_of_a_hang(stage: Stage) -> None:
    stage.run("--minutes", "5", "llama3_1b_lora_1x8gb", EAGER)
    assert stage.limits == {"llama3_1b_lora_1x8gb": 270.0, EAGER: 180.0}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("minutes", "state"), [("5", "not run"), ("60", "failed")])
def test_a_step_that_the_minutes_end_is_not_a_failure_one_that_hangs_is(stage: Stage, minutes: str, state: str) -> None:
    cut = {"ok": False, "out_of_time": True, "phase": "export", "reason": "not finished in time"}
    stage.rows[EAGER] = GOOD | cut
    stage.seconds["environment"] = 70.0
    assert stage.run("--minutes", minutes, EAGER) == (gpu.NOT_RUN if state == "not run" else 1)
    row = stage.written()["steps"][EAGER]
    assert (row["state"], row["tokens_per_second"]) == (state, 12_345.6)
    assert "out_of_time" not in row


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("states", "rows", "code"),
    [
        ({}, {}, 0),
        ({"proofs": "failed"}, {}, 1),
        ({"proofs": "not run"}, {}, 3),
        ({}, {LORA: {"ok": False, "phase": "export", "reason": "disk full"}}, 1),
        ({"layers": "not run"}, {LORA: {"ok": False, "phase": "load", "reason": "no"}}, 1),
    ],
)
def test_exit_codes(stage: Stage, states: dict[str, str], rows: dict[str, Any], code: int) -> None:
    stage.states |= states
    stage.rows |= rows
    assert stage.run("layers", "proofs", LORA) == code


def test_what_the_machine_cannot_run_is_not_a_failure(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "why_not", lambda recipe, machine: "bitsandbytes is not installed")
    assert stage.run(QLORA) == gpu.NOT_RUN
    assert stage.written()["steps"][QLORA]["reason"] == "bitsandbytes is not installed"
    assert stage.began == ["environment"]


def test_checks_that_crash_fail_and_keep_their_lines(stage: Stage) -> None:
    stage.codes["layers"] = -11
    assert stage.run("layers") == 1
    row = stage.written()["steps"]["layers"]
    assert (row["state"], row["reason"]) == ("failed", "it ended with -11")
    assert [check["name"] for check in row["checks"]] == ["of layers"]


def test_without_a_known_machine_no_recipe_runs(stage: Stage) -> None:
    stage.machine = {"name": "machine", "state": "failed", "seconds": 0.1, "seen": "no GPU"}
    assert stage.run(LORA) == 1
    assert stage.began == ["environment"]
    assert stage.written()["steps"][LORA]["state"] == "not run"


@pytest.mark.slow
def test_a_machine_without_a_gpu_leaves_the_record_as_it_is(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.machine = {"name": "machine", "state": "failed", "seconds": 0.1, "seen": "no GPU"}
    record = stage.folder / "benchmarks" / "results"
    record.mkdir(parents=True)
    monkeypatch.setattr(gpu, "ROOT", stage.folder)
    assert gpu.main([], stage.clock) == 1
    assert not [*record.iterdir()]
    assert gpu.main(["--shrunken"], stage.clock) == 1
    assert not [*record.iterdir()]


def test_an_unknown_step_is_refused(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("llama3_fsdp", "layer", "proofs:eager"):
        with pytest.raises(SystemExit) as ended:
            stage.run(name)
        assert ended.value.code == 2
        assert name in capsys.readouterr().err
    assert not stage.folder.exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from benchmarks import gpu
def check(kind, words, log, ends, watch):
    log.write_text("")
    for line in {lines!r}:
        with open(words[0], "a") as out:
            out.write(line + "\\n")
        watch()
    if kind == {at!r}:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0
def measure(way, machine, *, measured, **_):
    measured({good!r})
    if way.path.stem == {at!r} and not way.changes:
        os.kill(os.getpid(), signal.SIGKILL)
    return {good!r}
gpu.run_checks, gpu.measure, gpu.why_not = check, measure, lambda *_: None
sys.exit(gpu.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("at", ["environment", "proofs", "llama3_1b_lora_1x8gb"])
def test_what_was_seen_before_a_kill_is_on_disk(at: str, tmp_path: Path) -> None:
    """Of the step that was running too: each check that was done, and a recipe's speed."""
    code = KILLED.format(lines=[json.dumps(VERSIONS), json.dumps(MACHINE)], at=at, good=GOOD)
    done = subprocess.run([sys.executable, "-c", code, "--out", str(tmp_path)], cwd=gpu.ROOT, env=_path_of_checkout())
    assert done.returncode == -signal.SIGKILL
    rows = json.loads((tmp_path / "gpu.json").read_text("utf-8"))["steps"]
    assert list(rows) == gpu.steps()[: gpu.steps().index(at) + 1]
    assert [row["state"] for row in rows.values()] == ["ok"] * (len(rows) - 1) + ["running"]
    last = rows[at]
    assert len(last["checks"]) == 2 if "checks" in last else last["tokens_per_second"] == 12_345.6
    assert (tmp_path / "gpu.md").read_text("utf-8").startswith("# On one GPU")


def _path_of_checkout(**more: str) -> dict[str, str]:
    paths = [str(gpu.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | more


@pytest.mark.thorough
def test_a_signal_ends_it_and_what_it_started(tmp_path: Path) -> None:
    """By a check that never ends: its process is gone when gpu.py is."""
    code = (
        "import sys; from pathlib import Path; from benchmarks import gpu, gpu_recipes\n"
        "gpu_recipes.CHECKS = Path(sys.argv[1])\n"
        "sys.exit(gpu.main(['--out', sys.argv[2]]))"
    )
    endless, out, pid = tmp_path / "endless.py", tmp_path / "out", tmp_path / "pid"
    endless.write_text(f"import os, time\nopen({str(pid)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    words = [sys.executable, "-c", code, str(endless), str(out)]
    process = subprocess.Popen(words, cwd=gpu.ROOT, env=_path_of_checkout(), stderr=subprocess.PIPE, text=True)
    _wait_for(lambda: pid.is_file() and bool(pid.read_text()))
    process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "stopped by a signal" in said
    assert not psutil.pid_exists(int(pid.read_text()))


def _wait_for(reached: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "not there in time"
        time.sleep(0.02)


@pytest.mark.slow
def test_at_most_six_bounded_files_come_back_however_much_fails(stage: Stage) -> None:
    for name in (*gpu.steps(), f"{QLORA}:eager"):
        stage.states[name] = "failed"
        stage.rows[name] = {"ok": False, "phase": "load", "reason": "no"}
    assert stage.run(*gpu.steps(), f"{QLORA}:eager") == 1
    files = {file.name: file.stat().st_size for file in stage.folder.iterdir()}
    assert set(files) == {
        "gpu.json",
        "gpu.md",
        "environment.log",
        f"{LORA}.log",
        f"{FULL}.log",
        "llama3_1b_lora_1x8gb.log",
    }
    assert max(files.values()) <= gpu.MOST_LOG_BYTES == 1 << 20
    assert files["environment.log"] == gpu.MOST_LOG_BYTES


def test_names_of_files_are_plain(stage: Stage) -> None:
    stage.rows[EAGER] = {"ok": False, "phase": "load", "reason": "no"}
    stage.run(EAGER)
    assert stage.written()["steps"][EAGER]["log"] == "llama3_8b_lora_1x80gb-eager.log"


def test_numbers_that_json_has_not_are_written_by_name(stage: Stage) -> None:
    stage.rows[LORA] = GOOD | {"losses": [1.0, float("nan"), float("inf")]}
    assert stage.run(LORA) == 0
    assert stage.written()["steps"][LORA]["losses"] == [1.0, "nan", "inf"]


@pytest.mark.slow
def test_other_steps_of_the_same_card_and_versions_are_kept(stage: Stage) -> None:
    stage.run("layers", EAGER)
    stage.rows[LORA] = {"ok": False, "phase": "load", "reason": "no"}
    stage.run(LORA)
    rows = stage.written()["steps"]
    assert {name: row["state"] for name, row in rows.items()} == {
        "environment": "ok", "layers": "ok", EAGER: "ok", LORA: "failed",
    }  # fmt: skip
    stage.machine = {**MACHINE, "machine": {"device": "H200", "gpu_gb": 150.0}}
    stage.run(EAGER)
    assert list(stage.written()["steps"]) == ["environment", EAGER]


def test_the_page_shows_checks_speed_and_memory(stage: Stage) -> None:
    stage.rows[LORA] = {"ok": False, "phase": "load", "reason": "out of | memory"}
    stage.run("layers", EAGER, LORA)
    page = (stage.folder / "gpu.md").read_text("utf-8").splitlines()
    assert page[0] == "# On one GPU: H100"
    assert "| of layers | ok | 1 | so / so |" in page
    assert f"| {EAGER} | 12,346 | 0.250 | yes | ok |" in page
    assert f"| {LORA} | | | | failed: out of / memory |" in page
    assert f"| {EAGER} | 2.00 (+50.0%) |" in page


def test_the_page_shows_kernels_and_what_a_second_start_finds(stage: Stage) -> None:
    kinds = {"product": {"ms": 1.5, "share": 0.75}, "idle": {"ms": 0.5, "share": 0.25}}
    longest = [{"name": "gemm|x", "class": "product", "ms": 1.5, "calls": 3}]
    profile = {"classes": kinds, "longest": longest, "span_ms": 2.0, "idle_share": 0.25, "launches": 7, "kernels": 3}
    first = {"first_step_after_seconds": 60.0, "compile_seconds": 28.0}
    stage.rows[LORA] = GOOD | {"profile": profile, "first_start": first, "first_step_after_seconds": 20.0}
    stage.run(f"{LORA}:profile")
    page = (stage.folder / "gpu.md").read_text("utf-8").splitlines()
    assert f"## Kernels of {LORA}:profile: 3, 7 launches, 25.0% of 2.0 ms without a kernel" in page
    assert "| product | 1.50 | 75.0% |" in page
    assert "| `gemm/x` | product | 1.50 | 3 |" in page
    told = gpu.in_words(stage.written()["steps"][f"{LORA}:profile"])
    assert "25% idle, 7 launches; first step after seconds 60.0, again 20.0" in told


# ---- what a machine cannot run


def machine(folder: Path, gpu_gb: float = H100, *packages: str) -> gpu_recipes.Machine:
    return gpu_recipes.Machine(folder, gpu_gb, frozenset(packages))


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Sets free disk and host memory, GB."""

    def set_room(disk: float, host: float) -> None:
        monkeypatch.setattr(gpu_recipes, "free_bytes", lambda folder: disk * 1e9)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=host * 1e9))

    return set_room


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "gpu_gb", "disk", "host", "why"),
    [
        (LORA, H100, 60, 120, None),
        (FULL, H100, 60, 120, None),
        (LORA, H100, 10, 120, "20 GB of disk needed, 10 GB free in "),
        (FULL, H100, 30, 120, "35 GB of disk needed, 30 GB free in "),
        (LORA, H100, 60, 12, "19 GB of host memory needed, 12 GB available"),
        (OFFLOADED, H100, 60, 130, "138 GB of host memory needed, 130 GB available"),
        (OFFLOADED, H100, 60, 500, None),
        (LORA, 25.2, 60, 120, "the recipe is for a GPU of 80 GB, this one has 25.2"),
        ("llama3_8b_lora_1x24gb", 23.6, 60, 120, None),  # an L4 calls itself one of 24 GB
        (QLORA, H100, 60, 120, "bitsandbytes is not installed"),
    ],
)
def test_disk_and_memory_are_looked_at_before(
    name: str, gpu_gb: float, disk: float, host: float, why: str | None, tmp_path: Path, room: Callable[..., None]
) -> None:
    room(disk, host)
    found = gpu_recipes.why_not(recipe_of(name), machine(tmp_path, gpu_gb))
    assert found is None if why is None else (found or "").startswith(why), found


@pytest.mark.slow
def test_a_model_that_is_there_needs_no_disk_and_no_time(tmp_path: Path, room: Callable[..., None]) -> None:
    here = machine(tmp_path, H100, "bitsandbytes")
    room(22, 120)
    assert gpu_recipes.why_not(recipe_of(FULL), here) is not None
    before = gpu_recipes.estimate(recipe_of(FULL), here)
    gpu_recipes.model_folder(recipe_of(LORA), here).mkdir()
    assert gpu_recipes.why_not(recipe_of(FULL), here) is None
    assert gpu_recipes.estimate(recipe_of(FULL), here) < before - 20
    assert gpu_recipes.why_not(recipe_of(QLORA), here) is None


@pytest.mark.slow
def test_an_estimate_knows_what_takes_time(tmp_path: Path) -> None:
    here = machine(tmp_path)
    eager = load_recipe(str(gpu.recipes()[LORA]), ["training.compile=false"]).recipe
    small, lora, full = (recipe_of(name) for name in ("llama3_1b_lora_1x8gb", LORA, FULL))
    taken = [gpu_recipes.estimate(recipe, here) for recipe in (small, eager, lora, full)]
    assert taken[1:] == sorted(taken[1:])
    assert 30 < taken[0] < taken[2]  # of 1B, whose layers are recomputed and compiled
    assert taken[-1] < 400


# ---- a training that is watched: another program in its place

PROGRAM = """
import json, os, sys, time
run = sys.argv[1]
os.makedirs(run)
def write(name, value):
    with open(os.path.join(run, name), "w") as out:
        json.dump(value, out)
measured = {{"phases": {{"backward": {{"peak_bytes": 100}}}}, "reserved_bytes": 120}}
plan = {{"phases": {{"backward": {{"peak_bytes": 110}}}}, "reserved_bytes": 130}}
memory = {{"planned": None if {why!r} else plan, "why": {why!r}, "measured": measured}}
write("receipt.json", {{"strategy": "single", "world_size": 1, "memory": memory, "compiled": {{"layers": True}}}})
for step in range(1, {steps} + 1):
    line = {{"kind": "train", "step": step, "tokens_per_second": 100.0 * step, "step_seconds": 1.0 / step, "loss": 2.0,
            "peak_memory_gib": 1.5}}
    with open(os.path.join(run, "metrics.jsonl"), "a") as out:
        out.write(json.dumps(line) + "\\n")
{then}
"""
SAVING_FAILS = 'write("run_state.json", {"error": "the disk is full", "phase": "export", "rank": 0}); sys.exit(1)'
ENDLESS = "time.sleep(600)"
EVERY = gpu_recipes.STEPS


def trained(
    name: str, tmp_path: Path, patches: pytest.MonkeyPatch, then: str, steps: int = EVERY, limit: float = 60,
    why: str | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:  # fmt: skip
    """The row of a program in the training's place, and what was said of it while it ran."""
    program = PROGRAM.format(steps=steps, then=then, why=why)
    patches.setattr(gpu_recipes, "POLL_SECONDS", 0.02)
    patches.setattr(gpu_recipes.Training, "command", lambda self: [sys.executable, "-c", program, str(self.run_dir)])
    here = machine(tmp_path)
    gpu_recipes.model_folder(recipe_of(name), here).mkdir()
    said: list[dict[str, Any]] = []
    row = gpu_recipes.measure(gpu_recipes.Way(gpu.recipes()[name]), here, limit=limit, measured=said.append)
    return row, said


def test_a_speed_that_was_measured_stays_when_saving_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row, said = trained(LORA, tmp_path, monkeypatch, SAVING_FAILS)
    assert (row["ok"], row["phase"]) == (False, "export")
    assert row["reason"].startswith("the disk is full")
    assert row["tokens_per_second"] == said[0]["tokens_per_second"] == 450.0  # of the steps 3 to 6
    assert (row["steps_timed"], row["peak_memory_gib"], len(said)) == (4, 1.5, 1)
    assert row["phases"]["backward"]["measured_bytes"] == 100


def test_a_speed_stays_when_a_training_is_killed_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row, _ = trained(LORA, tmp_path, monkeypatch, "os.kill(os.getpid(), 9)", steps=EVERY - 1)
    assert (row["ok"], row["tokens_per_second"], row["steps_timed"]) == (False, 400.0, 3)


def test_a_training_without_a_speed_fails_with_its_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row, said = trained(LORA, tmp_path, monkeypatch, SAVING_FAILS, steps=2)
    assert (row["ok"], row["phase"], said) == (False, "export", [])
    assert "tokens_per_second" not in row


@pytest.mark.slow
def test_a_training_that_hangs_is_ended_and_keeps_its_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row, said = trained(LORA, tmp_path, monkeypatch, ENDLESS, limit=3)
    assert (row["ok"], row["out_of_time"], row["tokens_per_second"], len(said)) == (False, True, 450.0, 1)
    assert not [each for each in psutil.Process().children(recursive=True) if "tmp-plan" in " ".join(each.cmdline())]


def test_a_full_training_is_ended_when_its_speed_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic()
    row, said = trained(FULL, tmp_path, monkeypatch, ENDLESS)
    assert time.monotonic() - began < 30
    assert (row["ok"], row["tokens_per_second"], len(said)) == (True, 450.0, 1)
    assert row["phases"]["backward"] == {"measured_bytes": 100, "planned_bytes": 110}
    assert row["reserved_bytes"] == {"measured": 120, "planned": 130}


def test_a_row_says_why_there_is_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row, _ = trained(FULL, tmp_path, monkeypatch, ENDLESS, why="the planner ended with 1")
    assert (row["ok"], row["not_planned"]) == (True, "the planner ended with 1")
    assert row["phases"]["backward"] == {"measured_bytes": 100, "planned_bytes": None}


def test_a_model_that_cannot_be_made_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise SystemExit('no GPU memory for it')")
    monkeypatch.setattr(gpu_recipes, "CHECKS", broken)
    row = gpu_recipes.measure(gpu_recipes.Way(gpu.recipes()[LORA]), machine(tmp_path))
    assert row == {
        "ok": False, "phase": "making the random model", "reason": "exit code 1: no GPU memory for it",
    }  # fmt: skip
    assert not gpu_recipes.model_folder(recipe_of(LORA), machine(tmp_path)).exists()


def test_every_child_keeps_the_path_of_carried_packages_and_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie in a folder that PYTHONPATH names; a parent that is a rank must not make its child one."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "only_there.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("RANK", "3")
    program = tmp_path / "child.py"
    program.write_text("import os, only_there; assert 'RANK' not in os.environ, 'a rank'; print('well')")
    monkeypatch.setattr(gpu_recipes, "CHECKS", program)
    log = tmp_path / "log"
    code = gpu_recipes.run_checks("environment", [], log, time.monotonic() + 60)
    assert code == 0, log.read_text()
    monkeypatch.setattr(gpu_recipes.Training, "command", lambda self: [sys.executable, str(program), "environment"])
    run = gpu_recipes.Training(gpu_recipes.Way(gpu.recipes()[LORA]), machine(tmp_path), EVERY, log)
    assert run.train(time.monotonic() + 60, lambda: False) is None, log.read_text()
    assert log.read_text() == "well\n"


@pytest.mark.slow
def test_a_training_is_the_recipe_as_it_stands(tmp_path: Path) -> None:
    """But for its model, rows, length and what is saved; eager is one key more."""
    here = machine(tmp_path)
    for name, changes in ((LORA, []), (LORA, ["training.compile=false"]), (FULL, [])):
        way = gpu_recipes.Way(gpu.recipes()[name], tuple(changes))
        run = gpu_recipes.Training(way, here, EVERY, tmp_path / "log")
        command = run.command()
        words = command[command.index("finetune/train.py") + 2 :]
        said = load_recipe(str(gpu.recipes()[name]), words).recipe
        own = recipe_of(name)
        assert said.training.compile == (False if changes else own.training.compile)
        assert said.lora == own.lora
        assert said.training.global_batch_size == own.training.global_batch_size
        assert said.training.per_device_batch_size == own.training.per_device_batch_size
        assert said.budget.gpu_memory_gb == H100
        assert said.training.max_steps == (1000 if name == FULL else EVERY)
        assert not said.measure_phases
        assert (said.data.max_length, said.data.eval) == (own.data.max_length, None)


# ---- the checks


def gradients(**values: float) -> dict[str, torch.Tensor | None]:
    return {name: torch.full((4,), value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("ours", "state", "seen"),
    [
        ({"a": 1.0, "b": 2.0}, "ok", "loss 0.0e+00"),
        ({"a": 1.001, "b": 2.0}, "ok", ""),
        ({"a": 0.0, "b": 0.0}, "failed", "2 gradients are 0, first a"),
        ({"a": 0.0, "b": 2.0}, "failed", "1 gradients are 0, first a"),
        ({"a": 1.2, "b": 2.0}, "failed", "furthest"),
        ({"a": float("nan"), "b": 2.0}, "failed", ""),
    ],
)
def test_gradients_that_are_zero_wrong_or_not_finite_fail(ours: dict[str, float], state: str, seen: str) -> None:
    found: dict[str, Any] = {"state": "ok"}
    expected = LossAndGradients(5.0, gradients(a=1.0, b=2.0))
    gpu_checks._judge(found, LossAndGradients(5.0, gradients(**ours)), expected, 0.01, exact=False)
    assert found["state"] == state, found
    assert seen in found["seen"]


def test_a_check_that_raises_ends_no_other(tmp_path: Path) -> None:
    lines = gpu_checks.Lines(tmp_path / "lines.jsonl")
    with lines.check("one"):
        raise RuntimeError("operation not\n supported")
    with lines.check("two") as found:
        found["seen"] = "well"
    first, second = map(json.loads, lines.file.read_text("utf-8").splitlines())
    assert (first["state"], first["seen"]) == ("failed", "RuntimeError: operation not supported")
    assert "Traceback" in first["log"]
    assert (second["state"], second["seen"]) == ("ok", "well")


def test_proofs_run_side_by_side_and_wait_for_what_they_are_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """float32's fails here; of two compiled proofs alone the layers may be compiled."""
    seen: dict[str, tuple[str, Any]] = {}

    def outcome(bench: ProofBench, proof: Any, ok: set[str]) -> dict[str, Any]:
        missing = "" if not proof.of or proof.of in ok else f"there is no {proof.of}"
        assert not proof.of or proof.of in seen
        seen[proof.name] = missing, proof.settings.get("training.compile", "auto")
        state = "not run" if missing else "failed" if proof.name == "bf16" else "ok"
        if state == "failed":
            folder = bench.recipe.parent / proof.name
            folder.mkdir()
            (folder / "run.log").write_text("why")
        return {"name": proof.name, "claim": "", "state": state, "seconds": 1.0, "seen": missing, "figures": {}}

    monkeypatch.setattr(ProofBench, "outcome", outcome)
    lines = gpu_checks.Lines(tmp_path / "lines.jsonl")
    gpu_checks.proofs(lines, shrunken=True)
    every = plan_proofs(ProofMachine("cpu", "a CPU", 1))
    planned = {proof.name: proof for proof in every if proof.ranks <= 1}
    assert len(every) - len(planned) == 5  # of several GPUs
    assert set(seen) == set(planned)
    assert seen["resume"][0] == "there is no bf16"
    compiled = {
        name
        for name, (_, compiles) in seen.items()
        if compiles == "auto" and planned[name].kind in ("curve", "reference")
    }
    assert compiled == set(gpu_checks.COMPILED_PROOFS)
    written = {line["name"]: line for line in map(json.loads, lines.file.read_text("utf-8").splitlines())}
    assert written["bf16"]["log"] == "why"
    assert "log" not in written["float32"]


@pytest.mark.slow
def test_a_recipe_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = gpu_recipes.measure(gpu_recipes.Way(gpu.recipes()["llama3_1b_lora_1x8gb"]), machine(tmp_path, 0.0))
    assert row["ok"], row
    assert row["tokens_per_second"] > 0
    assert {"load", "forward", "backward", "step"} <= set(row["phases"])
    assert row["phases"]["backward"]["measured_bytes"] == row["phases"]["backward"]["planned_bytes"] > 0
    assert row["receipt"]["change"]["unchanged_tensors"] == []
    assert row["receipt"]["compiled"]["left_off"]
    worst = row["receipt"]["worst_step_first"]
    assert worst["tokens"] > 0
    assert worst["step_seconds"] > 0
    assert worst["save_seconds"] > 0


@pytest.mark.slow
def test_a_full_training_says_whether_its_update_was_fused(tmp_path: Path) -> None:
    row = gpu_recipes.measure(gpu_recipes.Way(gpu.recipes()[FULL]), machine(tmp_path, 0.0))
    assert row["ok"], row
    assert row["receipt"]["optimizer_update"] == {
        "fused": False,
        "left_off": "on a CPU",
        "seconds": None,
        "rounded_otherwise": None,
        "formats": [],
    }


@pytest.mark.slow
def test_layers_are_the_librarys_eager_and_compiled(tmp_path: Path) -> None:
    lines = gpu_checks.Lines(tmp_path / "lines.jsonl")
    gpu_checks.layers(lines, shrunken=True)
    found = {line["name"]: line for line in map(json.loads, lines.file.read_text("utf-8").splitlines())}
    assert len(found) == 7
    assert {line["state"] for name, line in found.items() if name.endswith("eager")} == {"ok"}, found
    assert {line["state"] for name, line in found.items() if name.endswith("compiled")} <= {"ok", "not run"}, found
