"""Units, phases and counts in messages: 1 row, 2 rows, 12,345 rows. And settings as words in a line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

GIB = 2**30  # bytes
PHASES = ("load", "forward", "backward", "step", "save")  # of a training, in their order


def counted(count: int, noun: str, plural: str = "") -> str:
    """The number and its noun; `plural` where that is not the noun and an s."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def install_command(*extras: str) -> str:
    """The command that adds these extras in the checkout; the package index has another `finetune`."""
    # DeepSpeed is a source package; the variable keeps it from compiling when it is installed.
    variable = "DS_BUILD_OPS=0 " if "deepspeed" in extras else ""
    return f"{variable}pip install -e '.[{','.join(extras)}]'"


def as_word(path: object) -> str:
    """A file's name as a word of a shell command. A name that begins with a dash would be an option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def percent(share: float) -> str:
    """95 %, 0.3 %, below 0.1 %: a share above 0 never reads 0 %."""
    if 0 < share < 0.001:
        return "below 0.1 %"
    return f"{100 * share:.{1 if share < 0.01 else 0}f} %"


def in_digits(number: float) -> str:
    """1048576 and 0.5, as a recipe takes them."""
    if float(number).is_integer():
        return str(int(number))
    return f"{number:g}"


def metric_in_words(name: str, value: float) -> str:
    """A value of metric_for_best_model: held-out loss 0.5751, reward accuracy 83%, reward margin 0.448, eval_sql 0.9.

    A loss has four decimals. Other names stay as a recipe has them.
    """
    match name:
        case "eval_loss":
            return f"held-out loss {value:.4f}"
        case "eval_reward_accuracy":
            return f"held-out reward accuracy {value:.1%}"
        case "eval_reward_margin":
            return f"held-out reward margin {value:.3g}"
        case _:
            return f"{name} {value:.4f}"


def recomputation_in_words(setting: bool | int | str) -> str:
    """`activation_checkpointing` in a sentence."""
    if isinstance(setting, str):
        return setting
    if not setting:
        return "none"
    if int(setting) == 1:
        return "all layers"
    return f"one layer of {int(setting)}"


def first_lines(lines: Sequence[str], most: int) -> list[str]:
    """The first of a message's lines, and how many more there are."""
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


def duration(seconds: float) -> str:
    """3 s, 2:05 or 1:02:03."""
    total = round(seconds)
    hours, rest = divmod(total, 3600)
    if hours:
        return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
    if total >= 60:
        return f"{total // 60}:{total % 60:02d}"
    return f"{total} s"
