"""`python -m lectures NAME`: which lectures there are, what each takes, and how one is held."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.files import write_json
from finetune.paths import CHECKOUT, RECIPES
from lectures.output import LectureRequest, LectureResult, write_lecture


@dataclass(frozen=True)
class Lecture:
    """One lecture of the table."""

    question: str
    recipe: str = ""  # of recipes/, where none is named; empty: it needs none
    overrides: tuple[str, ...] = ()  # of that recipe; a recipe that is named is taken as it is written
    settings: Mapping[str, str] = field(default_factory=dict)  # keys of its own, and their defaults


# A CPU multiplies float16 ten to fifty times as slowly as float32: 64 tokens a row keep a step at seconds.
SHORT_ROWS = ("data.max_length=64", "data.truncation=drop")
LECTURES: dict[str, Lecture] = {
    "memory": Lecture(
        "How many bytes does training take for each parameter, and is it 20 times the weights?",
        "smollm2_1.7b_full_text_1x48gb.yaml",
        (
            "model.name_or_path=meta-llama/Llama-3.2-1B",
            "budget.gpu_memory_gb=80",
            "training.activation_checkpointing=true",
        ),
    ),
    "formats": Lecture(
        "What is a number in fp32, fp16, bf16 and int8, and which of a model's numbers does each format keep?",
        "quickstart.yaml",
        SHORT_ROWS,
        settings={"numbers": "0.1", "steps": "8"},
    ),
    "collectives": Lecture(
        "What do the collectives do, and why is a broadcast sent in a ring?",
        settings={"mib": "16"},
    ),
    "mixed-precision": Lecture(
        "What are the six steps of mixed precision, and what happens when a gradient overflows?",
        "smollm2_135m_full_cpu.yaml",
        (*SHORT_ROWS, "training.global_batch_size=1"),
        {"scale": "18"},
    ),
    "qlora": Lecture(
        "Full, LoRA and QLoRA: which part of the memory does each of them save?",
        "llama3_qlora.yaml",
    ),
    "scaling": Lecture(
        "Which sizes run on how many GPUs under DDP, FSDP and HSDP, and what is lost on the way to 512?",
        "llama3_full.yaml",
    ),
    "overlap": Lecture(
        "What does training.non_blocking win?",
        "llama3_8b_lora_1x24gb.yaml",
        settings={"gpu": "RTX4090", "batches": "6"},
    ),
    "zero": Lecture(
        "What do ZeRO-1, 2, 3, offload and fp16 cost in memory, seconds and collectives, and why?",
        "smollm2_135m_full_cpu.yaml",
        (
            f"model.name_or_path={CHECKOUT / 'lectures' / 'zero' / 'gpt2_large'}",
            "budget={gpus: 8, gpu_memory_gb: 80}",
            "data.max_length=1024",
            "data.eval=null",
            "training.global_batch_size=512",
            "training.per_device_batch_size=2",
            "training.mixed_precision=no",
            "training.activation_checkpointing=false",
            "training.compile=false",
        ),
        {"gpus": "8xA100"},
    ),
    "data-parallel": Lecture(
        "What does torch.nn.DataParallel do in a step, why is the first GPU its bottleneck, and what does DDP change?",
        "smollm2_135m_full_cpu.yaml",
        settings={"replicas": "2", "rows": "8", "tokens": "64", "steps": "20"},
    ),
    "pipeline": Lecture(
        "How do micro-batches keep the stages of a pipeline busy, and what does each schedule hold in memory?",
        settings={"stages": "4", "micro_batches": "4", "ms": "400"},
    ),
}


def lecture_function(name: str) -> Callable[[LectureRequest], LectureResult]:
    """What holds the lecture; imports it, and torch with it."""
    match name:
        case "memory":
            from lectures.memory import memory_lecture

            return memory_lecture
        case "formats":
            from lectures.formats.lecture import formats_lecture

            return formats_lecture
        case "collectives":
            from lectures.collectives.lecture import collectives_lecture

            return collectives_lecture
        case "mixed-precision":
            from lectures.mixed_precision import mixed_precision_lecture

            return mixed_precision_lecture
        case "qlora":
            from lectures.qlora.lecture import qlora_lecture

            return qlora_lecture
        case "scaling":
            from lectures.scaling.lecture import scaling_lecture

            return scaling_lecture
        case "overlap":
            from lectures.overlap import overlap_lecture

            return overlap_lecture
        case "zero":
            from lectures.zero.lecture import zero_lecture

            return zero_lecture
        case "data-parallel":
            from lectures.data_parallel.lecture import data_parallel_lecture

            return data_parallel_lecture
        case "pipeline":
            from lectures.pipeline.lecture import pipeline_lecture

            return pipeline_lecture
        case _:
            raise AssertionError(f"{name}: is in the table of lectures and has no function")


def run_lecture(
    name: str,
    recipe: Path | None,
    words: Sequence[str],
    folder: Path | None,
    *,
    note: Callable[[str], None],
) -> tuple[str, dict[str, Any]]:
    """Hold a lecture: its text, and its facts with the names of the files that it wrote.

    Args:
        words: `key=value`: the lecture's own settings, and overrides of the recipe.
        folder: For its files; lecture_NAME in runs/ where none is given.
        note: Told of the progress of what takes seconds.

    Raises FinetuneError for another name, a setting or a recipe that is wrong, and a folder that holds something else.
    """
    lecture = _lecture(name)
    folder = folder or Path("runs") / f"lecture_{name}"
    facts = folder / f"{name}.json"
    if folder.exists() and any(folder.iterdir()) and not facts.is_file():
        raise FinetuneError(f"{folder}: is not the folder of this lecture and not empty; name another folder with -o")
    own = {word.partition("=")[0]: word.partition("=")[2] for word in words if _is_setting(word, lecture)}
    overrides = tuple(word for word in words if not _is_setting(word, lecture))
    if not lecture.recipe and (recipe or overrides):
        takes = ", ".join(f"{key}=" for key in lecture.settings)
        raise FinetuneError(
            f"{recipe or overrides[0]}: the lecture {name} has no recipe; it takes {takes or 'nothing'}"
        )
    if recipe is None:
        recipe, overrides = RECIPES / lecture.recipe, (*lecture.overrides, *overrides)
    folder.mkdir(parents=True, exist_ok=True)
    is_new = not facts.exists()
    if is_new:  # one that is stopped leaves it, and the next one takes its folder
        write_json(facts, {"lecture": name, "finished": False})
    try:
        result = lecture_function(name)(LectureRequest(recipe, overrides, {**lecture.settings, **own}, folder, note))
    except FinetuneError:
        if is_new and [*folder.iterdir()] == [facts]:
            facts.unlink()
        raise
    files = [str(file) for file in write_lecture(name, result, folder)]
    text = f"{lecture.question}\n\n{result.text()}\n\n{', '.join(files)}"
    return text, {"lecture": name, **result.facts, "files": files}


def _lecture(name: str) -> Lecture:
    if name in LECTURES:
        return LECTURES[name]
    close = difflib.get_close_matches(name, LECTURES, 1, 0.5)
    hint = f"did you mean {close[0]}?" if close else f"name one of {', '.join(LECTURES)}"
    raise FinetuneError(f"{name}: there is no such lecture; {hint}")


def _is_setting(word: str, lecture: Lecture) -> bool:
    return word.partition("=")[0] in lecture.settings
