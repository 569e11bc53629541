"""Questions about four small tables, as SQLite queries. Every row carries the database, so a query can be run."""

from __future__ import annotations

import random
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SEED = 5  # of the tables' contents, which never change


@dataclass(frozen=True)
class Table:
    """A table: its rows have a name, some columns with words, and some with numbers. Numbers in a column differ."""

    name: str
    one: str  # what a row is called in a question
    many: str
    key: str  # the column with the names
    names: list[str]
    words: dict[str, list[str]]  # column: its values
    numbers: dict[str, tuple[int, int, int]]  # column: lowest, highest, step

    @property
    def schema(self) -> str:
        columns = [f"{column} TEXT" for column in (self.key, *self.words)]
        columns += [f"{column} INTEGER" for column in self.numbers]
        return f"CREATE TABLE {self.name} ({', '.join(columns)})"

    def rows(self) -> list[tuple[str | int, ...]]:
        rng = random.Random(f"{SEED} {self.name}")
        columns: list[list[Any]] = [self.names]
        for values in self.words.values():
            # Every value occurs, then some again.
            columns.append(rng.sample(values * len(self.names), len(self.names) - len(values)) + values)
            rng.shuffle(columns[-1])
        for low, high, step in self.numbers.values():
            columns.append(rng.sample(range(low, high + 1, step), len(self.names)))
        return list(zip(*columns, strict=True))

    def database(self) -> list[str]:
        """The statements that create and fill the table."""
        values = ", ".join("(" + ", ".join(map(literal, row)) + ")" for row in self.rows())
        return [self.schema, f"INSERT INTO {self.name} VALUES {values}"]


TABLES = (
    Table(
        "books", "book", "books", "title",
        ["Blue River", "Cold Harbour", "Dust", "Night Train", "Old Maps", "Paper Moon", "Salt", "The Gate", "Orchards",
         "Winter Light", "Tin Roof", "Glass Hill"],
        {"author": ["Adams", "Brandt", "Costa", "Okafor"], "genre": ["crime", "history", "poetry", "travel"]},
        {"length": (80, 640, 8), "price": (6, 40, 1), "rating": (1, 50, 1)},
    ),
    Table(
        "staff", "employee", "employees", "name",
        ["Anna", "Boris", "Clara", "David", "Elena", "Felix", "Grace", "Hugo", "Irene", "Jonas", "Karim", "Lena"],
        {"department": ["sales", "support", "research", "finance"], "city": ["Berlin", "Lyon", "Oslo", "Porto"]},
        {"salary": (2400, 7200, 100), "age": (21, 64, 1), "experience": (1, 35, 1)},
    ),
    Table(
        "cities", "city", "cities", "city",
        ["Arden", "Belport", "Corvale", "Dunmore", "Eastwick", "Fairmont", "Glenrock", "Harwich", "Inverton", "Kings",
         "Lowell", "Marlow"],
        {"country": ["Norway", "Spain", "Chile", "Japan"], "climate": ["dry", "mild", "wet"]},
        {"population": (20000, 900000, 5000), "area": (12, 480, 4), "height": (0, 900, 10)},
    ),
    Table(
        "products", "product", "products", "product",
        ["lamp", "desk", "chair", "kettle", "radio", "mirror", "carpet", "clock", "shelf", "heater", "blanket", "vase"],
        {"category": ["kitchen", "office", "living room"], "color": ["black", "blue", "red", "white"]},
        {"price": (5, 300, 5), "stock": (1, 90, 1), "weight": (1, 40, 1)},
    ),
)  # fmt: skip


def literal(value: str | int) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)


def ask(table: Table) -> Iterator[tuple[str, str, str]]:
    """Every template with every value: (template, question, query)."""
    t, key, many, one = table.name, table.key, table.many, table.one
    yield "count", f"How many {many} are there?", f"SELECT COUNT(*) FROM {t}"
    for word, values in table.words.items():
        yield "distinct", f"Which different values of {word} are there?", f"SELECT DISTINCT {word} FROM {t}"
        yield "count per", f"How many {many} are there per {word}?", f"SELECT {word}, COUNT(*) FROM {t} GROUP BY {word}"
        for value in values:
            where = f"WHERE {word} = '{value}'"
            yield "count where", f"How many {many} have the {word} {value}?", f"SELECT COUNT(*) FROM {t} {where}"
            yield "where", f"List the {key} of every {one} with the {word} {value}.", f"SELECT {key} FROM {t} {where}"
    for number in table.numbers:
        for adjective, function in (("average", "AVG"), ("highest", "MAX"), ("lowest", "MIN"), ("total", "SUM")):
            query = f"SELECT {function}({number}) FROM {t}"
            yield "aggregate", f"What is the {adjective} {number} of all {many}?", query
            for word, values in table.words.items():
                per = f"SELECT {word}, {function}({number}) FROM {t} GROUP BY {word}"
                yield "aggregate per", f"What is the {adjective} {number} per {word}?", per
                for value in values:
                    question = f"What is the {adjective} {number} of {many} with the {word} {value}?"
                    yield "aggregate where", question, f"{query} WHERE {word} = '{value}'"
        for adjective, order in (("highest", " DESC"), ("lowest", "")):
            query = f"ORDER BY {number}{order} LIMIT"
            yield "top", f"Which {one} has the {adjective} {number}?", f"SELECT {key} FROM {t} {query} 1"
            for count in (2, 3, 4, 5):
                question = f"Which {count} {many} have the {adjective} {number}?"
                yield "top many", question, f"SELECT {key} FROM {t} {query} {count}"
            for word, values in table.words.items():
                for value in values:
                    question = f"Which {one} with the {word} {value} has the {adjective} {number}?"
                    yield "top where", question, f"SELECT {key} FROM {t} WHERE {word} = '{value}' {query} 1"
        low, high, step = table.numbers[number]
        a_number = f"an {number}" if number[0] in "ae" else f"a {number}"
        for part in range(1, 10):
            limit = low + (high - low) * part // 10 // step * step
            for adjective, sign in (("above", ">"), ("below", "<")):
                where = f"WHERE {number} {sign} {limit}"
                question = f"How many {many} have {a_number} {adjective} {limit}?"
                yield "count number", question, f"SELECT COUNT(*) FROM {t} {where}"
                question = f"List the {key} and {number} of every {one} with {a_number} {adjective} {limit}."
                yield "number", question, f"SELECT {key}, {number} FROM {t} {where}"
                question = f"List the {key} of every {one} with {a_number} {adjective} {limit}, sorted by {number}."
                yield "sorted", question, f"SELECT {key} FROM {t} {where} ORDER BY {number}"
                for word, values in table.words.items():
                    value = values[part % len(values)]
                    question = f"Which {many} with the {word} {value} have {a_number} {adjective} {limit}?"
                    yield (
                        "both",
                        question,
                        f"SELECT {key} FROM {t} WHERE {word} = '{value}' AND {number} {sign} {limit}",
                    )


def answers(table: Table, queries: list[str]) -> list[list[tuple[Any, ...]]]:
    """What each query returns."""
    connection = sqlite3.connect(":memory:")
    try:
        for statement in table.database():
            connection.execute(statement)
        return [connection.execute(query).fetchall() for query in queries]
    finally:
        connection.close()


def rows(rng: random.Random, training: int, held_out: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows with `instruction`, `output` and `db`: the statements that create and fill the tables.

    Templates take turns, so simple and longer queries are equally frequent. No query occurs twice, and every query
    returns something: no empty list, no null, and no count of zero.
    """
    by_template: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for table in TABLES:
        asked = list(ask(table))
        results = answers(table, [query for _, _, query in asked])
        for (template, question, query), result in zip(asked, results, strict=True):
            if result and result[0][0] not in (None, 0):
                instruction = f"{table.schema}\nWrite one SQLite query: {question}"
                by_template[template].append({"instruction": instruction, "output": query, "db": table.database()})
    for made in by_template.values():
        rng.shuffle(made)
    mixed = []
    while len(mixed) < training + held_out and any(by_template.values()):
        mixed += [made.pop() for made in by_template.values() if made]
    del mixed[training + held_out :]
    rng.shuffle(mixed)
    return mixed[:training], mixed[training:]
