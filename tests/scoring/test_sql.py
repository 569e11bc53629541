# ruff: noqa: E501  # a table of queries
"""Execution accuracy: equal rows, and a child process that reads no file and ends."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from finetune.scoring import sql
from finetune.scoring.sql import execution_scores, queries_in

SHOP = [
    "create table item (name text, price real, stock integer)",
    "insert into item values ('pen', 1.5, 10), ('book', 12.0, 3), ('lamp', 30.0, 0)",
]
# (answer, reference, score counted by hand)
BY_HAND = [
    ("select name from item", "select name from item", 1),
    ("SELECT name FROM item ORDER BY price DESC", "select name from item", 1),
    ("select name from item order by price desc", "select name from item order by price", 0),
    ("select name from item order by price", "select name from item order by price", 1),
    ("select count(*) from item", "select 3", 1),
    ("select count(*) from item where stock > 0", "select count(*) from item", 0),
    ("```sql\nselect max(price) from item;\n```", "select 30.0", 1),
    ("The query is: select min(price) from item; I hope it helps", "select 1.5", 1),
    ("select price, name from item", "select name, price from item", 0),
    ("select sum(price) from item", "select 43.5", 1),
    ("select avg(price) from item", "select 14.5", 1),
    ("select name from items", "select name from item", 0),
    ("selec name from item", "select name from item", 0),
    ("", "select name from item", 0),
    ("select name from item where name = 'a;b'", "select name from item where 0", 1),
    ("with cheap as (select * from item where price < 20) select name from cheap", "select name from item where price < 20", 1),
    ("select distinct 1 from item", "select 1", 1),
    ("select 1 from item", "select 1", 0),
    ("delete from item", "select 1 where 0", 0),
    ("select null", "select null", 1),
]  # fmt: skip


def test_scores_counted_by_hand() -> None:
    assert len(BY_HAND) == 20
    scores = execution_scores([row[0] for row in BY_HAND], [row[1] for row in BY_HAND], [SHOP] * 20)
    assert [(answer, score) for (answer, _, _), score in zip(BY_HAND, scores, strict=True)] == [
        (answer, float(score)) for answer, _, score in BY_HAND
    ]


def test_databases_of_all_kinds(tmp_path: Path) -> None:
    file, script = tmp_path / "shop.sqlite", tmp_path / "shop.sql"
    with sqlite3.connect(file) as database:
        for statement in SHOP:
            database.execute(statement)
    database.close()
    script.write_text(";\n".join(SHOP) + ";")
    databases = [SHOP, ";\n".join(SHOP), str(file), str(script)]
    assert execution_scores(["select sum(stock) from item"] * 4, ["select 13"] * 4, databases) == [1.0] * 4
    wrong = execution_scores(["select 1"] * 3, ["select 1"] * 3, [3, str(tmp_path / "none.sqlite"), "create tabel x;"])
    assert [str(each).split(":")[0] for each in wrong] == [
        "sql needs a database", str(tmp_path / "none.sqlite"), "its database cannot be made"
    ]  # fmt: skip


def test_a_query_neither_writes_nor_reads_files_nor_runs_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "QUERY_SECONDS", 0.3)
    secret = tmp_path / "secret.sqlite"
    with sqlite3.connect(secret) as database:
        database.execute("create table t as select 42 as a")
    database.close()
    forever = "with recursive r(n) as (select 1 union all select n + 1 from r) select count(*) from r"
    answers = [
        forever,
        f"attach database '{secret}' as s",
        f"select readfile('{secret}')",
        f"select writefile('{tmp_path}/new', 'x')",
        "select load_extension('x')",
        f"vacuum into '{tmp_path}/copy.sqlite'",
        "pragma database_list",
        "update item set price = 0",
        "select randomblob(2000000000), randomblob(2000000000)",
        "select * from item a, item b, item c, item d, item e, item f, item g, item h, item i, item j, item k",
    ]
    before = secret.read_bytes()
    scores = execution_scores([*answers, "select 1"], ["select 1"] * 11, [SHOP] * 11)
    assert scores == [0.0] * 10 + [1.0]
    assert (secret.read_bytes(), sorted(path.name for path in tmp_path.iterdir())) == (before, ["secret.sqlite"])
    # A data set's own statements cannot attach a file either.
    stolen = execution_scores(["select 1"], ["select 1"], [[f"attach database '{secret}' as s"]])
    assert str(stolen[0]) == "its database cannot be made: not authorized; correct the column db"


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("select 1; select 2", "select 1"),
        ("select 'a;b' from t; drop table t", "select 'a;b' from t"),
        ("```sql\nSELECT 1\n```\nselect 2", "SELECT 1"),
        ("Answer: with a as (select 1) select * from a", "with a as (select 1) select * from a"),
    ],
)
def test_the_query_of_an_answer(text: str, query: str) -> None:
    assert queries_in(text)[:1] == [query]


def test_the_child_may_die(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that kills the child is wrong, and the rows after it are scored."""
    monkeypatch.setattr(sql, "QUERY_SECONDS", 0.1)
    monkeypatch.setattr(sql, "START_SECONDS", 3.0)
    stuck = "select replace(hex(zeroblob(40000)), '0', 'a') like '" + "%a" * 40 + "%b'"  # one function call is not interrupted
    scores = execution_scores(["select 1", stuck, "select 1"], ["select 1"] * 3, [SHOP] * 3)
    assert scores == [1.0, 0.0, 1.0]
