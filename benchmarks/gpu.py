"""The first minutes with a GPU: its environment, recipes for one GPU, layers and proofs, the most telling first.

    python benchmarks/gpu.py --minutes 9 --out DIR      (what does not fit into the minutes is not run)
    python benchmarks/gpu.py --call 3 --out DIR         (one of CALLS, below: each fits into nine minutes)
    python benchmarks/gpu.py STEP ...                   (some of the steps below)
    python benchmarks/gpu.py --shrunken --out DIR       (without a GPU: tries this script itself on small models)

environment  versions, imports, the card, rates of products and copies, bytes of the context (total - free - reserved)
optimizer    a billion bfloat16 weights: RoundedAdamW's update as one kernel beside the update as written; adamw_8bit's
layers       two layers of 8B's width: loss and gradients beside the library's, eager and compiled
operator     attention that no flash kernel computes, inside compiled layers: Gemma 4, Gemma 2, Llama in float32
proofs       small trainings beside the CPU's curve, on one GPU and on all of them (gpu_proofs.py)
generate     a random 8B answers 64 prompts: batches of three sizes, adapters merged or not, transformers' own batches;
             1,000 prompts as `eval` answers them
offloading   hidden states in host memory: the same bits, the bytes by arithmetic, the seconds that copies add
peer         transformers, peft and Liger on the rows of 8B LoRA
two_ranks    two ranks on this card over gloo: which collectives work, DDP, FSDP2; FSDP2 as one rank over NCCL
RECIPE       Llama 3.2 1B or 3.1 8B with random weights of that shape, a few steps as the recipe stands, on rows drawn
             here that fill `max_length`: tokens a second, memory of each phase against the plan. Adapters are saved and
             exported; a full training is ended when its speed is known, before its checkpoint of 48 GB.
dpo          8B LoRA on pairs of answers, by recipes/llama3_8b_lora_1x80gb.yaml: its reference's seconds too
RECIPE:eager, dpo:eager  with training.compile=false
RECIPE:profile           two steps under torch.profiler: classes of kernels, the longest ones, idle time
RECIPE:rows=N            with training.per_device_batch_size=N
RECIPE:auto              rows and recomputation as the card has room for
RECIPE:fp8               with model.load_in_fp8=true
RECIPE:fa4               with model.flash_attention=FA4
RECIPE:again             started twice: what the second start finds of the first one's caches

Writes gpu.json and gpu.md, that shows it, into DIR (benchmarks/results) after each check and each recipe, as soon as
its speed is known; at most four logs of failures beside them. Keeps what it has of other steps of the same card and
versions. Everything runs in a process of its own with a limit on its time; this one imports no torch, so no CUDA
context stands beside what is measured.

Exit code: 0 all is well; 1 something failed; 3 nothing failed, and something was not run: no time, disk, memory or
package for it; 130 stopped by a signal.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.gpu_recipes import (
    DPO,
    MODELS,
    OUT_OF_TIME,
    ROOT,
    Machine,
    Way,
    estimate,
    find_way,
    measure,
    recipes,
    run_checks,
    start_seconds,
    why_not,
)
from benchmarks.records import stamp
from finetune.errors import RecipeError
from finetune.files import read_lines, write_json, write_text
from finetune.launch.watched_job import ended_by_signals

# Seconds of each on an H200 with 16 cores. Measured: the environment 19 and 27; layers 150, when there was one more to
# compile, in 30. Of the proofs nine had ended after 46, and float32, which is compiled, had not after 225. The
# optimizer's are a guess: 20 to import and compile, 2 for 20 updates, the rest to draw and to copy, and half as much
# again for one-byte moments.
CHECKS = {"environment": 30.0, "optimizer": 65.0, "layers": 120.0, "proofs": 300.0}
# Guesses. operator: three cases of 40. generate: 30 to make the model, 60 and 45 to answer. peer: 30 to start, two
# ways of 30. two_ranks: five starts of 20. offloading: 20 to import, six micro-batches of 2, gradients to compare.
CHECKS |= {"operator": 120.0, "generate": 135.0, "peer": 100.0, "two_ranks": 110.0, "offloading": 45.0}
# A GPU that is lent for ten minutes at a time: what to run in each of them, with what it shows.
CALLS = {
    1: ("llama3_1b_lora_1x8gb:auto", "llama3_8b_lora_1x80gb", "llama3_8b_lora_1x80gb:fp8"),  # three speeds
    2: ("llama3_8b_full_1x80gb", "llama3_8b_lora_1x80gb:profile"),  # a fourth, and where the time goes
    3: ("operator", "optimizer", "layers", "llama3_qlora"),  # no kernel hangs; one-byte moments; bitsandbytes' share
    4: ("dpo", "dpo:eager", "generate", "two_ranks"),  # references compiled; answers; collectives, FSDP2 over NCCL
    5: ("proofs", "offloading"),  # the CPU's curves, resumes bitwise; hidden states in host memory
    6: ("llama3_8b_lora_1x80gb:again", "peer"),  # a second start; another trainer on the same rows
    7: ("qwen3_30b_a3b_qlora_code_1x24gb",),  # experts in 4 bits
    8: ("qwen3_8b_qlora_long_1x24gb",),  # hidden states in host memory
}
# The most telling first; nine minutes reach the two of 8B. A recipe that is not named here comes after these.
FIRST = (
    "environment",
    "llama3_8b_lora_1x80gb",
    "llama3_8b_full_1x80gb",
    "llama3_1b_lora_1x8gb",
    "optimizer",
    "layers",
    "llama3_8b_lora_1x80gb:eager",
    "llama3_qlora",
    "proofs",
    "operator",
    DPO,
    "generate",
    "peer",
    "two_ranks",
    "offloading",
)
CALL_MINUTES = 9.0
PATIENCE, PATIENCE_ON_CPU = 3.0, 30.0  # times its estimate, after which a step is taken to hang
MOST_LOGS, MOST_LOG_BYTES = 4, 1 << 20
NOT_RUN = 3  # exit code


def steps() -> list[str]:
    """All steps, the most telling first."""
    return [*FIRST, *(name for name in recipes() if name not in FIRST)]


@dataclass
class Results:
    """gpu.json, gpu.md and the logs, written again after each piece of news."""

    folder: Path | None  # None: nothing is written
    minutes: float | None
    at_once: bool = True  # False: not before there is a GPU, so that a machine without one leaves a record as it is
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # of the machine, with the versions
    logs: list[str] = field(default_factory=list)
    before: dict[str, Any] = field(init=False)  # the record that was there

    def __post_init__(self) -> None:
        file = self.folder / "gpu.json" if self.folder else None
        self.before = json.loads(file.read_text("utf-8")) if file and file.is_file() else {}

    @property
    def writes(self) -> Path | None:
        """Where to write; None for now, or for good."""
        return self.folder if self.at_once or self.facts.get("device") else None

    def put(self, name: str, row: dict[str, Any]) -> None:
        """A step's row, so far or as it ended."""
        self.rows[name] = row
        if (folder := self.writes) is not None:
            now = datetime.datetime.now().isoformat(timespec="seconds")
            content = {
                **stamp("gpu", {"steps": self.rows}),
                "date": now,
                "minutes": self.minutes,
                **self.facts,
                "steps": self.rows,
            }
            write_json(folder / "gpu.json", _finite(content))
            write_text(folder / "gpu.md", "\n".join(page_lines(content)) + "\n")

    def know(self, facts: Mapping[str, Any]) -> None:
        """The machine and the versions: what an earlier call has found with the same ones of other steps is kept."""
        self.facts = dict(facts)
        if all(self.before.get(key) == facts[key] for key in ("device", "versions")):
            self.rows = self.before["steps"] | self.rows

    def keep_log(self, name: str, text: str) -> str | None:
        """The end of a failure's log in a file of its own, its name; None where there are enough."""
        if (folder := self.writes) is None or len(self.logs) == MOST_LOGS:
            return None
        file = folder / f"{re.sub('[^A-Za-z0-9_-]+', '-', name)}.log"
        file.write_bytes(text.encode()[-MOST_LOG_BYTES:])
        self.logs.append(file.name)
        return file.name


def _finite(value: Any) -> Any:
    """The value with the names of numbers that JSON has not."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and (value != value or abs(value) == float("inf")) else value


@dataclass
class Session:
    """The steps one after another, each in the time that is left."""

    results: Results
    shrunken: bool
    scratch: Path
    clock: Callable[[], float] = time.monotonic
    ends: float | None = None  # by the clock
    machine: Machine | None = None  # known once the environment is

    def run(self, name: str) -> None:
        """One step: its row, whatever becomes of it."""
        check = CHECKS.get(name)
        way = None if check is not None else find_way(name)
        why, needed = None, check or 0.0
        if way is None and check is None:
            why = f"there is no recipe {name} in this checkout"
        elif way is not None:
            recipe = way.recipe
            if self.machine is None:
                why = "the machine is not known, since its environment failed"
            else:
                why, needed = why_not(recipe, self.machine), estimate(recipe, self.machine) * (1 + way.again)
        left = None if self.ends is None else self.ends - self.clock()
        if why is None and left is not None and needed > left:
            why = f"{needed:.0f} s needed, {max(left, 0):.0f} s left"
        if why is not None:
            self.say(name, {"state": "not run", "reason": why})
            return
        patience = (PATIENCE_ON_CPU if self.shrunken else PATIENCE) * needed
        limit = patience if left is None else min(left, patience)
        began = self.clock()
        row = self.checks(name, limit) if way is None else self.recipe(name, way, limit)
        if row.pop("out_of_time", False) and limit < patience:
            row |= {"state": "not run", "reason": f"the minutes were over, {row.get('phase', '')}".rstrip(", ")}
        row |= {"seconds": round(self.clock() - began, 1), "estimated_seconds": needed}
        self.say(name, row)

    def checks(self, name: str, limit: float) -> dict[str, Any]:
        """A step of several checks, whose lines are read while it runs."""
        file, log = self.scratch / f"{name}.jsonl", self.scratch / f"{name}.log"
        seen: list[dict[str, Any]] = []

        def watch() -> None:
            found = read_lines(file) if file.is_file() else []
            if len(found) > len(seen):
                for line in found[len(seen) :]:
                    print(f"  {line['state']:<8}{line['seconds']:6.1f} s  {line['name']}: {line['seen']}", flush=True)
                seen[:] = found
                self.results.put(name, {"state": "running", "checks": [self.without_log(name, each) for each in seen]})

        words = [str(file), *(["--shrunken"] if self.shrunken else [])]
        code = run_checks(name, words, log, time.monotonic() + limit, watch)
        states = [line["state"] for line in seen]
        row: dict[str, Any] = {"state": "ok", "checks": [self.without_log(name, each) for each in seen]}
        if code is None:
            row |= {"state": "failed", "reason": OUT_OF_TIME, "out_of_time": True}
        elif code:
            row |= {"state": "failed", "reason": f"it ended with {code}"}
        if "failed" in states:
            row |= {"state": "failed", "reason": f"{states.count('failed')} of {len(states)} checks failed"}
            row.pop("out_of_time", None)
        elif row["state"] == "ok" and "not run" in states:
            row["some_not_run"] = True
        if row["state"] == "failed":
            logs = [f"== {line['name']}\n{line['log']}" for line in seen if "log" in line]
            row["log"] = self.results.keep_log(name, "\n".join([log.read_text("utf-8", errors="replace"), *logs]))
        if name == "environment":
            self.know(seen)
        return row

    @staticmethod
    def without_log(name: str, line: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in line.items() if key != "log"}

    def know(self, seen: Sequence[Mapping[str, Any]]) -> None:
        """The machine, from the lines of its environment."""
        lines = {line["name"]: line for line in seen}
        versions, machine = lines.get("versions", {}), lines.get("machine", {})
        device = machine.get("machine", {}).get("device")
        self.results.know({"device": device, "versions": versions.get("versions"), "machine": machine.get("machine")})
        if "machine" in machine:
            self.machine = Machine(self.scratch, machine["machine"]["gpu_gb"], frozenset(versions.get("packages", ())))

    def recipe(self, name: str, way: Way, limit: float) -> dict[str, Any]:
        """A recipe's row; with its speed on disk as soon as that is known."""
        assert self.machine is not None
        log = self.scratch / "run.log"
        row = measure(
            way,
            self.machine,
            limit=limit,
            measured=lambda row: self.results.put(name, {"state": "running", **row}),
            log=log,
        )
        row["state"] = "ok" if row.pop("ok") else "failed"
        if row["state"] == "failed" and log.is_file():
            row["log"] = self.results.keep_log(name, log.read_text("utf-8", errors="replace"))
        return row

    def say(self, name: str, row: dict[str, Any]) -> None:
        """Write it down, and print one line."""
        self.results.put(name, row)
        print(f"{name}: {in_words(row)}", flush=True)


def in_words(row: Mapping[str, Any]) -> str:
    """A step's row in one line."""
    told = []
    if "tokens_per_second" in row:
        told.append(f"{row['tokens_per_second']:,.0f} tokens/s, {row['step_seconds']:.2f} s a step")
        told.append(f"peak {row['peak_memory_gib']:.2f} GiB{_against_plan(row)}")
    if row.get("profile"):
        told.append(f"{row['profile']['idle_share'] or 0:.0%} idle, {row['profile']['launches']:,} launches")
    if "first_start" in row:
        once, again = row["first_start"], start_seconds(row)
        told += [f"{key.replace('_', ' ')} {once[key]}, again {again[key]}" for key in once if again[key] is not None]
    if "first_rewards" in row:
        told.append(f"margin of step 1 {row['first_rewards'].get('reward_margin', float('nan')):.1e}")
        told.append(f"reference {row['reference_seconds']} s")
    if row["state"] != "ok":
        told.append(f"{row['state']}: {row['reason']}" if "reason" in row else row["state"])
    if row["state"] == "failed" and "phase" in row:
        told.append(f"in {row['phase']}")
    if "checks" in row:
        states = [check["state"] for check in row["checks"]]
        told.append(", ".join(f"{states.count(each)} {each}" for each in dict.fromkeys(states)))
    took = f" ({row['seconds']:.0f} s, estimated {row['estimated_seconds']:.0f})" if "seconds" in row else ""
    return "; ".join(filter(None, told)) + took


def _against_plan(row: Mapping[str, Any]) -> str:
    """How far the plan is off in the phase that took most."""
    phases = {name: each for name, each in row["phases"].items() if each["planned_bytes"]}
    if not phases:
        return ""
    name = max(phases, key=lambda each: phases[each]["measured_bytes"])
    return f", plan {phases[name]['planned_bytes'] / phases[name]['measured_bytes'] - 1:+.2%} in {name}"


def page_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """The page of gpu.json: a table of the checks, one of the recipes' speed, one of their memory; with reasons."""
    versions = ", ".join(f"{name} {version}" for name, version in (result.get("versions") or {}).items())
    yield f"# On one GPU: {result.get('device')}\n"
    yield f"Written by `python benchmarks/gpu.py`, {result['date']}; {versions}."
    rows = result["steps"]
    for name in (name for name in rows if name in CHECKS):
        yield f"\n## {name.capitalize()}: {in_words(rows[name])}\n"
        yield "| check | | seconds | seen |\n|---|---|---:|---|"
        for check in rows[name].get("checks", ()):
            yield f"| {check['name']} | {check['state']} | {check['seconds']:.0f} | {check['seen'].replace('|', '/')} |"
    trained = {name: row for name, row in rows.items() if name not in CHECKS}
    yield "\n## Speed\n"
    yield "| recipe | tokens a second | seconds a step | layers compiled | |\n|---|---:|---:|---|---|"
    for name, row in trained.items():
        speeds = "| |"
        if "tokens_per_second" in row:
            compiled = row["receipt"].get("compiled") or {}
            left_off = f"no: {compiled.get('left_off')}" if not compiled.get("layers") else "yes"
            speeds = f"{row['tokens_per_second']:,.0f} | {row['step_seconds']:.3f} | {left_off}"
        reason = f": {row['reason']}".replace("|", "/") if "reason" in row else ""
        yield f"| {name} | {speeds} | {row['state']}{reason} |"
    for name, row in trained.items():
        if row.get("profile"):
            yield from _profile_lines(name, row["profile"])
    phases = list(dict.fromkeys(phase for row in trained.values() for phase in row.get("phases", {})))
    yield "\n## Memory: GiB at the peak of each phase, and the plan's error\n"
    yield f"| recipe | {' | '.join(phases)} |\n|---|{'---:|' * len(phases)}"
    for name, row in trained.items():
        if row.get("phases"):
            yield f"| {name} | {' | '.join(_peak(row['phases'].get(phase)) for phase in phases)} |"


def _profile_lines(name: str, profile: Mapping[str, Any]) -> Iterator[str]:
    """Two tables of a step: milliseconds by class of kernels, and the longest kernels."""
    idle = f"{profile['idle_share'] or 0:.1%} of {profile['span_ms']:,.1f} ms without a kernel"
    yield f"\n## Kernels of {name}: {profile['kernels']:,}, {profile['launches']:,} launches, {idle}\n"
    yield "| class | ms a step | share |\n|---|---:|---:|"
    for kind, each in profile["classes"].items():
        yield f"| {kind} | {each['ms']:,.2f} | {each['share']:.1%} |"
    yield "\n| kernel | class | ms a step | calls |\n|---|---|---:|---:|"
    for each in profile["longest"]:
        yield f"| `{each['name'].replace('|', '/')}` | {each['class']} | {each['ms']:,.2f} | {each['calls']:,} |"


def _peak(phase: Mapping[str, Any] | None) -> str:
    if phase is None:
        return ""
    measured, planned = phase["measured_bytes"], phase["planned_bytes"]
    return f"{measured / 2**30:.2f}" + (f" ({planned / measured - 1:+.1%})" if planned and measured else "")


def exit_code(rows: Sequence[Mapping[str, Any]]) -> int:
    """0 where all is well, 1 where something failed, else NOT_RUN."""
    states = {row["state"] for row in rows}
    if "failed" in states:
        return 1
    return NOT_RUN if "not run" in states or any(row.get("some_not_run") for row in rows) else 0


def main(words: Sequence[str] | None = None, clock: Callable[[], float] = time.monotonic) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP")
    parser.add_argument("--call", type=int, choices=CALLS, help="the steps of one of CALLS, in nine minutes")
    parser.add_argument("--minutes", type=float, help="begin no step that would end after these")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write; benchmarks/results")
    parser.add_argument("--shrunken", action="store_true", help="small models on the CPU; writes into --out alone")
    asked = parser.parse_args(words)
    try:
        if unknown := [name for name in asked.steps if name not in CHECKS and find_way(name) is None]:
            parser.error(f"no such step, and no recipe for one GPU and {' or '.join(MODELS)}: {', '.join(unknown)}")
    except RecipeError as error:
        parser.error(f"a step's rows: {error}")
    if asked.call is not None:
        asked.steps = [*CALLS[asked.call], *asked.steps]
        asked.minutes = asked.minutes or (None if asked.shrunken else CALL_MINUTES)
    began = clock()
    folder = asked.out or (None if asked.shrunken else ROOT / "benchmarks" / "results")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    todo = list(dict.fromkeys(["environment", *(asked.steps or steps())]))  # what the machine is comes first
    with tempfile.TemporaryDirectory(prefix="finetune-gpu-", ignore_cleanup_errors=True) as scratch:
        results = Results(folder, asked.minutes, at_once=asked.out is not None)
        ends = None if asked.minutes is None else began + 60 * asked.minutes
        session = Session(results, asked.shrunken, Path(scratch), clock, ends)
        try:
            with ended_by_signals():
                for name in todo:
                    session.run(name)
        except KeyboardInterrupt:
            print("stopped by a signal; what was measured is written", file=sys.stderr)
            return 130
    print("\n".join(["", *(f"{name:<36}{in_words(results.rows[name])}" for name in todo)]), flush=True)
    return exit_code([results.rows[name] for name in todo])


if __name__ == "__main__":
    sys.exit(main())
