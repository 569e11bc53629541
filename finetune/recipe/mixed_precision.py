"""`auto` for `training.mixed_precision` and `model.dtype`: the number format that the device computes fastest.

Everything that decides is here:

    reading a recipe    fastest_for: the recipe's GPUs, or this processor's flags      without_auto
    starting a run      fastest_by_products or fastest_on_gpu: the device itself       without_auto again

training/start.py (`choose_formats`) asks the device. A run that has begun keeps its formats.

Speed of [256, 256] products on one core of an AMD EPYC with AVX-512, in GFLOP/s, with oneDNN limited to each
instruction set. Backward computes the second product, for the gradient of a layer's input:

                              x @ w.T           grad @ w
    flags                bf16   float32      bf16   float32
    avx512_bf16           201       102       203       103
    avx512f                37       102        38       102
    avx2                   15        93       0.9       102
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PRECISION, BASE_FORMAT = "training.mixed_precision", "model.dtype"
KEYS = (PRECISION, BASE_FORMAT)
# Flags for bfloat16 arithmetic: x86, x86's tiles, ARM. With AVX-512 or AVX2 alone a product is emulated.
FAST_BFLOAT16 = ("avx512_bf16", "amx_bf16", "bf16")
# A timed product overrules the flags beyond this ratio. Emulation takes 2.7 to 100 times as long.
MUCH_SLOWER = 2.0
_PRECISION_OF_DTYPE = {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}


@dataclass(frozen=True)
class FastestFormat:
    """A value of `training.mixed_precision` that suits a device, and the reason as a clause."""

    precision: str  # bf16, fp16, or no: float32
    why: str


@dataclass(frozen=True)
class ChosenFormats:
    """The values that replace `auto` in one recipe."""

    keys: tuple[str, ...]  # the KEYS that the recipe sets to auto
    values: Mapping[str, str]  # by these keys
    why: str
    kept: bool = False  # taken from the run in the folder

    @property
    def line(self) -> str:
        """For the terminal; empty if the recipe names the compute format."""
        if PRECISION not in self.keys:
            return ""
        chosen = ", ".join(f"{key}: {self.values[key]}" for key in self.keys)
        return f"auto {'keeps' if self.kept else 'chose'} {chosen}, because {self.why}"

    @property
    def facts(self) -> dict[str, Any]:
        """For the receipt and JSON; empty if nothing was chosen."""
        return {"chosen": dict(self.values), "why": self.why, "line": self.line} if self.keys else {}


def processor_flags(path: str = "/proc/cpuinfo") -> frozenset[str]:
    """The instruction sets of this machine's first processor, as Linux names them; empty if Linux lists none."""
    try:
        with Path(path).open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, words = line.partition(":")
                if name.strip() in ("flags", "Features"):  # x86, ARM
                    return frozenset(words.split())
    except OSError:
        pass
    return frozenset()


def fastest_by_flags(flags: Iterable[str] | None = None) -> FastestFormat:
    """bf16 on a CPU with arithmetic for it, else float32. `flags`: None for this machine's flags."""
    available = processor_flags() if flags is None else frozenset(flags)
    for flag in FAST_BFLOAT16:
        if flag in available:
            return FastestFormat("bf16", f"this processor has bfloat16 arithmetic ({flag})")
    missing = " or ".join(FAST_BFLOAT16[:2])
    for flag in ("avx512f", "avx2", "asimd"):
        if flag in available:  # the widest instructions that it has
            return FastestFormat("no", f"this processor has no bfloat16 arithmetic ({missing}, only {flag})")
    return FastestFormat("no", f"this processor has no bfloat16 arithmetic ({missing})")


def fastest_by_products(by_flags: FastestFormat, bfloat16: float, float32: float) -> FastestFormat:
    """The flags' format, unless its timed products are MUCH_SLOWER than the other format's. Both times in seconds."""
    times = f"small products take {1e3 * bfloat16:.3g} ms in bfloat16 and {1e3 * float32:.3g} ms in float32"
    if by_flags.precision == "bf16" and bfloat16 > MUCH_SLOWER * float32:
        return FastestFormat("no", f"{times}, although {by_flags.why}")
    if by_flags.precision == "no" and float32 > MUCH_SLOWER * bfloat16:
        return FastestFormat("bf16", f"{times}, although {by_flags.why}")
    return FastestFormat(by_flags.precision, f"{by_flags.why}, and {times}")


def fastest_for(gpus: int) -> FastestFormat:
    """The format for a recipe with this many GPUs, or with none for a CPU like this one."""
    if gpus:
        return FastestFormat("bf16", "GPUs from Ampere on have bfloat16 arithmetic")
    return fastest_by_flags()


def fastest_on_gpu(name: str, *, has_bfloat16: bool) -> FastestFormat:
    """The format for a GPU with this name."""
    if has_bfloat16:
        return FastestFormat("bf16", f"{name} has bfloat16 arithmetic")
    return FastestFormat("fp16", f"{name} has no bfloat16 arithmetic, which begins with compute capability 8.0")


def without_auto(recipe: Mapping[str, Any], fastest: str | None = None) -> Mapping[str, Any]:
    """A recipe's values with `training.mixed_precision` and `model.dtype` in place of `auto`.

    A value that does not fit the schema stays, and pydantic reports it.

    Args:
        fastest: The device's `FastestFormat.precision`. None: found for the recipe's budget.
    """
    budget, model, training = (recipe.get(name, {}) for name in ("budget", "model", "training"))
    quantization = recipe.get("quantization")
    sections = [budget, model, training, {} if quantization is None else quantization]
    if "model" not in recipe or not all(isinstance(section, Mapping) for section in sections):
        return recipe
    precision, base = training.get("mixed_precision", "auto"), model.get("dtype", "auto")
    if not isinstance(precision, str) or not isinstance(base, str) or "auto" not in (precision, base):
        return recipe
    gpus = budget.get("gpus", 0)
    # 4-bit weights have their own compute format, and everything else follows it. 8-bit weights compute in bfloat16.
    quantised_compute = None
    if quantization is not None:
        quantised_compute = "bfloat16"
        if quantization.get("load_in_4bit"):
            quantised_compute = str(quantization.get("bnb_4bit_compute_dtype", "bfloat16"))
    chosen = precision
    if precision == "auto" and training.get("pure_bf16") is True:
        chosen = "bf16"
    elif precision == "auto" and quantised_compute:
        chosen = _PRECISION_OF_DTYPE.get(quantised_compute, "bf16")
    elif precision == "auto":
        chosen = fastest or fastest_for(gpus if isinstance(gpus, int) else 0).precision
    if base == "auto" and quantised_compute:
        base = quantised_compute
    elif base == "auto" and recipe.get("lora", True) is None:  # only the export's format, equal on every device
        base = "bfloat16"
    elif base == "auto" and chosen == "no":
        base = "float32"
    elif base == "auto" and chosen == "fp16" and precision == "auto":
        base = "float16"
    elif base == "auto":
        base = "bfloat16"
    return {**recipe, "model": {**model, "dtype": base}, "training": {**training, "mixed_precision": chosen}}


def in_float32(recipe: Any) -> tuple[str, ...]:
    """One override for each setting of a Recipe that computes in 16 bits, so that it computes in float32."""
    training, quantization = recipe.training, recipe.quantization
    changes = []
    if training.mixed_precision != "no":
        changes.append(f"{PRECISION}=no")
    if training.pure_bf16:
        changes.append("training.pure_bf16=false")
    if recipe.lora is not None and recipe.model.dtype != "float32":
        changes.append(f"{BASE_FORMAT}=float32")
    if quantization is not None and quantization.load_in_4bit and quantization.bnb_4bit_compute_dtype != "float32":
        changes.append("quantization.bnb_4bit_compute_dtype=float32")
    return tuple(changes)
