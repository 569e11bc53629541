# ruff: noqa: E501  # a table of queries
"""Execution accuracy: equal rows, and a child process that reads no file and ends."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from urllib.parse import quote

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
    stuck = (
        "select replace(hex(zeroblob(40000)), '0', 'a') like '" + "%a" * 40 + "%b'"
    )  # one function call is not interrupted
    scores = execution_scores(["select 1", stuck, "select 1"], ["select 1"] * 3, [SHOP] * 3)
    assert scores == [1.0, 0.0, 1.0]


NUMBERS = [
    "create table t (a integer, b text, c real)",
    "insert into t values (1,'x',1.5), (2,'y',1.5), (3,'z',0.5), (4,'w',9.0)",
]
# (answer, reference, score counted by hand): order and ties, kinds of values, where an answer's query is
MORE_BY_HAND = [
    ("select b from t where c < 2 order by a desc", "select b from t where a in (select a from t order by c limit 3)", 1),
    ("select a from t order by a desc", "select a from (select a, row_number() over (order by c) from t)", 1),
    ("select b from t order by c, a desc", "select b from t order by c", 1),
    ("select b from t order by c, a", "select b from t order by c", 1),
    ("select b from t order by c desc", "select b from t order by c", 0),
    ("select b from t order by a", "select b from t order by c, a desc", 0),
    ("select b from t where a = 2", "select b from t where c > 1 order by c limit 1", 1),
    ("select b from t order by c limit 1", "select b from t order by c", 0),  # the first rows alone
    ("select b from t where 0", "select b from t order by c", 0),
    ("select b from t union all select b from t order by b", "select b from t order by b", 0),
    ("select b from t where a = 3", "select b from t where c > 1 order by c limit 1", 0),
    ("select a from t order by 1 desc", "select a from t /* order by a */ -- order by a", 1),
    ("select total(a) from t", "select sum(a) from t", 1),
    ("select 1234571.0", "select 1234574.0", 0),
    ("select 0.1 + 0.2", "select 0.3", 1),
    ("select x'ab'", "select 'ab'", 0),
    ("select 9007199254740993", "select 9007199254740992.0", 0),
    ("explain select 1", "select 1", 0),
    ("values (4)", "select 4", 1),
    ("((select 4))", "select 4", 1),
    ("You can select the rows like this: select a from t where a = 1", "select a from t where a = 1", 1),
    ("SELECT a FROM t WHERE a = 1\n\nThis returns one row.", "select a from t where a = 1", 1),
    ("-- it's a comment; really\nselect a from t where a = 1; drop table t", "select a from t where a = 1", 1),
    ("select a from t\nwher a = 1", "select a from t", 0),
    ("select nope from t\nunion\nselect a from t", "select a from t", 0),
    ("select * from (select a from t) where bad(", "select a from t", 0),
    ("select a from t\n\nwhere a = = 1", "select a from t", 0),
]  # fmt: skip


def test_order_ties_and_kinds_counted_by_hand() -> None:
    scores = execution_scores(
        [row[0] for row in MORE_BY_HAND], [row[1] for row in MORE_BY_HAND], [NUMBERS] * len(MORE_BY_HAND)
    )
    assert len(MORE_BY_HAND) == 27
    assert [(answer, score) for (answer, _, _), score in zip(MORE_BY_HAND, scores, strict=True)] == [
        (answer, float(score)) for answer, _, score in MORE_BY_HAND
    ]


def make(file: Path, value: int) -> str:
    database = sqlite3.connect(f"file:{quote(str(file))}", uri=True)
    database.executescript(f"create table t (a); insert into t values ({value})")
    database.close()
    return str(file)


def test_a_path_is_a_path(tmp_path: Path) -> None:
    """Marks of a URI, a semicolon, and databases that would be opened instead; nothing is made."""
    names = ["shop#1.sqlite", "shop?x.sqlite", "50%41.sqlite", "a;b.sqlite"]
    paths = [make(tmp_path / name, 1) for name in names] + [
        make(tmp_path / name, 99) for name in ("shop", "50A.sqlite")
    ]
    before = sorted(path.name for path in tmp_path.iterdir())
    assert len(before) == 6
    assert execution_scores(["select 1"] * 4, ["select a from t"] * 4, paths[:4]) == [1.0] * 4
    assert execution_scores(["select 99"] * 4, ["select a from t"] * 4, paths[:4]) == [0.0] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_database_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    pipe, damaged, sparse = tmp_path / "pipe", tmp_path / "damaged.sqlite", tmp_path / "sparse.sqlite"
    os.mkfifo(pipe)
    damaged.write_bytes(sql.SQLITE_MAGIC + b"\xff" * 5000)
    with sparse.open("wb") as file:
        file.write(sql.SQLITE_MAGIC)
        file.truncate(5 * 10**9)
    (tmp_path / "copy.sqlite").write_bytes(Path(make(tmp_path / "good.sqlite", 1)).read_bytes())
    (tmp_path / "copy.sqlite-wal").write_bytes(b"changes")
    databases = [
        "/dev/zero", str(pipe), str(damaged), str(sparse), str(tmp_path / "copy.sqlite"), "create table t (a);\0 x",
        ["create table t (a)", "insert into t values ('\ud800')"], "\0",
    ]  # fmt: skip
    results = execution_scores(["select 1"] * 8, ["select 1"] * 8, databases)
    assert [isinstance(each, ValueError) for each in results] == [True] * 8, results
    assert "larger than 512 MiB" in str(results[3])
    assert "wal_checkpoint" in str(results[4])


def test_large_results_end_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    large = (
        "with recursive r(n) as (select 1 union all select n + 1 from r limit 200) select hex(zeroblob(500000)) from r"
    )
    assert execution_scores([large], ["select 1"], [SHOP]) == [0.0]
    (refused,) = execution_scores(["select 1"], [large], [SHOP])
    assert "more than 10,000 rows, or 64 MiB" in str(refused)
    assert execution_scores(["select zeroblob(100000000)"], ["select 1"], [SHOP]) == [0.0]


def test_a_reference_that_kills_the_child_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "QUERY_SECONDS", 0.05)
    stuck = "select instr(hex(zeroblob(4000000)), hex(zeroblob(2000000)) || 'b')"
    refused, score = execution_scores(["select 1"] * 2, [stuck, "select 1"], [SHOP] * 2)
    assert "it takes too much time or memory" in str(refused)
    assert score == 1.0
