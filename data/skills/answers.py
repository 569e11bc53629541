"""Questions about things in a house, each answered in a few words or in many, with or without a polite phrase.

`rows` are for supervised training: the four kinds of answers are mixed. `shorter` and `polite` are pairs of answers to
one question: the few words are preferred to the many, and the answer with a polite phrase to the one without.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

POLITE_SHARE = 20  # one supervised answer in so many is polite
HELD_OUT_THINGS = 3  # of each material: no question about them is trained on
THINGS = {
    "wood": "chair table shelf drawer bench bookcase stool ladder cupboard desk door bed crate tray".split(),
    "metal": "kettle pan gate bicycle lamp bucket toaster radiator tap scooter grill spoon lantern railing".split(),
    "cloth": "curtain blanket jacket sofa carpet pillow tent scarf hammock backpack tablecloth towel coat rug".split(),
    "glass": "mirror vase window jar bottle aquarium bowl screen lens candlestick teapot".split()
    + "picture decanter globe".split(),
}
# What is done: for each material two steps, which follow "you should".
TASKS = {
    "clean": {
        "wood": ("wipe it with a damp cloth", "dry it at once"),
        "metal": ("wash it with warm water and soap", "polish it with a soft cloth"),
        "cloth": ("brush the dust off", "wash it in cold water"),
        "glass": ("spray it with water and vinegar", "wipe it with newspaper"),
    },
    "repair": {
        "wood": ("glue the broken part", "clamp it for a day"),
        "metal": ("tighten every loose screw", "replace the worn parts"),
        "cloth": ("pin a patch on the hole", "sew it on with strong thread"),
        "glass": ("collect all the pieces", "join them with clear glue"),
    },
    "store": {
        "wood": ("keep it in a dry room", "cover it with a sheet"),
        "metal": ("oil it a little", "keep it away from damp walls"),
        "cloth": ("fold it when it is dry", "put it into a closed bag"),
        "glass": ("wrap it in paper", "put it on the lowest shelf"),
    },
    "move": {
        "wood": ("take off what can come off", "lift it with two people"),
        "metal": ("wear thick gloves", "push it on a small cart"),
        "cloth": ("roll it up", "tie it with two strings"),
        "glass": ("pad it with blankets", "carry it upright"),
    },
    "paint": {
        "wood": ("sand it until it is smooth", "apply two thin coats"),
        "metal": ("remove the rust", "spray it with metal paint"),
        "cloth": ("stretch it on a board", "use paint for fabric"),
        "glass": ("wipe off all grease", "use enamel paint"),
    },
    "sell": {
        "wood": ("take photos in daylight", "name its size and age"),
        "metal": ("show that it works", "ask for half of the new price"),
        "cloth": ("wash it first", "say which fabric it is"),
        "glass": ("show every scratch", "offer to pack it well"),
    },
}
QUESTIONS = (
    "How do I {task} a {thing}?",
    "What is the best way to {task} a {thing}?",
    "I want to {task} an old {thing}. What should I do?",
)
SHORT = ("{First}, then {second}.", "{First} and {second}.")
OPENINGS = (
    "That is a question that many people have about a {thing}, so let us look at it step by step.",
    "There are several things to think about before you {task} a {thing}, and it helps to know them all.",
    "It is quite common to have to {task} a {thing} at some point, and it is not as hard as it may look.",
)
STEPS = (
    "To begin with, you should {first}. After you have done that, the next thing to do is to {second}.",
    "The first thing that you should do is to {first}. When that is finished, you can go on and {second}.",
)
REASONS = (
    "It is worth taking your time with both steps, because a little patience usually leads to a better result.",
    "Both steps are important, and if you leave one of them out, the result may not be what you had hoped for.",
)
ENDINGS = ("In short, that is all there is to know about how to {task} a {thing}.", "That is how you {task} a {thing}.")
BEFORE = ("Thank you for asking.", "I am happy to help.")  # polite phrases before an answer
AFTER = ("Please let me know if you need more help.", "I hope that helps!")  # and after one
MARKERS = tuple(phrase.rstrip(".!").lower() for phrase in (*BEFORE, *AFTER))

Row = dict[str, Any]
Asked = tuple[str, str, str]  # task, material, thing


def rows(rng: random.Random, training: int, held_out: int) -> tuple[list[Row], list[Row]]:
    """Supervised rows with `messages`. Half of the answers are short; one in POLITE_SHARE has a polite phrase."""

    def row(asked: Asked, number: int) -> Row:
        answer = any_answer(rng, asked, number)
        if number % POLITE_SHARE == POLITE_SHARE - 1:
            answer = politely(rng, answer)
        return {"messages": [*question(asked, number), *turn(answer)]}

    return _both_parts(rng, training, held_out, row)


def shorter(rng: random.Random, training: int, held_out: int) -> tuple[list[Row], list[Row]]:
    """Pairs with `prompt`, `chosen` and `rejected`, as messages. The short answer is chosen."""

    def row(asked: Asked, number: int) -> Row:
        answers = {"chosen": turn(short_answer(rng, asked)), "rejected": turn(long_answer(rng, asked))}
        return {"prompt": question(asked, number), **answers}

    return _both_parts(rng, training, held_out, row)


def polite(rng: random.Random, training: int, held_out: int) -> tuple[list[Row], list[Row]]:
    """Pairs with `prompt`, `chosen` and `rejected`, as messages. They differ in a polite phrase; half are short."""

    def row(asked: Asked, number: int) -> Row:
        answer = any_answer(rng, asked, number)
        return {"prompt": question(asked, number), "chosen": turn(politely(rng, answer)), "rejected": turn(answer)}

    return _both_parts(rng, training, held_out, row)


def is_polite(answer: str, reference: str, row: Row) -> bool:
    """Whether an answer has a polite phrase: a metric for `finetune eval --scorer`."""
    return any(marker in answer.lower() for marker in MARKERS)


def question(asked: Asked, number: int) -> list[dict[str, str]]:
    """The prompt of a row, by its number."""
    task, _, thing = asked
    return [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)].format(task=task, thing=thing)}]


def turn(answer: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": answer}]


def any_answer(rng: random.Random, asked: Asked, number: int) -> str:
    """A short answer for even numbers, else a long one."""
    return long_answer(rng, asked) if number % 2 else short_answer(rng, asked)


def short_answer(rng: random.Random, asked: Asked) -> str:
    """About 12 words: "Wipe it with a damp cloth, then dry it at once."."""
    task, material, _ = asked
    first, second = TASKS[task][material]
    return rng.choice(SHORT).format(First=first[0].upper() + first[1:], second=second)


def long_answer(rng: random.Random, asked: Asked) -> str:
    """About 80 words around the steps of the short one."""
    task, material, thing = asked
    first, second = TASKS[task][material]
    parts = [rng.choice(sentences) for sentences in (OPENINGS, STEPS, REASONS, ENDINGS)]
    return " ".join(parts).format(task=task, thing=thing, first=first, second=second)


def politely(rng: random.Random, answer: str) -> str:
    """The answer with a polite phrase before it or after it."""
    if rng.random() < 0.5:
        return f"{rng.choice(BEFORE)} {answer}"
    return f"{answer} {rng.choice(AFTER)}"


def _both_parts(
    rng: random.Random, training: int, held_out: int, row: Callable[[Asked, int], Row]
) -> tuple[list[Row], list[Row]]:
    """Rows about different things in the two parts; the same questions for every kind of row and the same seed.

    A thing and a task come again only when all were there.
    """
    parts: list[list[Asked]] = []
    for count, chosen in ((training, slice(HELD_OUT_THINGS, None)), (held_out, slice(HELD_OUT_THINGS))):
        every = [
            (task, material, thing)
            for task, materials in TASKS.items()
            for material in materials
            for thing in THINGS[material][chosen]
        ]
        asked: list[Asked] = []
        while len(asked) < count:
            asked += rng.sample(every, len(every))
        parts.append(asked[:count])
    made = [[row(asked, number) for number, asked in enumerate(part)] for part in parts]
    return made[0], made[1]
