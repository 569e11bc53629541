"""HTML in a table's cells is said once, with its columns; a text that mentions a tag is not HTML."""

from __future__ import annotations

import pytest

from finetune.new_recipe.html_note import html_note

PLAIN = {"question": "How do I cancel?", "answer": "In your account."}


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("Bonjour,<br><br>merci", "<br>"), ("<p>Yes.</p>", "<p>, </p>"), ("a<BR/>b", "<br/>"), ("R&amp;D", "&amp;"),
        ('<a href="https://x.y">here</a>', '<a href="https://x.y">, </a>'), ("10&nbsp;€", "&nbsp;"),
    ],
)  # fmt: skip
def test_html_is_named_with_its_column(cell: str, shown: str) -> None:
    (line,) = html_note([PLAIN | {"answer": cell}] * 5 + [PLAIN] * 5)
    assert line.startswith(f"HTML in answer (5 of 10 rows): {shown};")


@pytest.mark.parametrize(
    "cell",
    ["a < b and c > d", "List<int> x", "<think>so</think>", "1 <2> 3", "see <https://x.y>", "AT&T", "<user>", ""],
)
def test_other_brackets_are_no_html(cell: str) -> None:
    assert html_note([PLAIN | {"answer": cell}] * 10) == []


def test_a_rare_tag_is_a_text_about_html() -> None:
    assert html_note([PLAIN | {"answer": "write <br> for a line break"}] + [PLAIN] * 200) == []
    assert html_note([]) == []
    assert html_note([{"messages": [{"role": "user", "content": "<br>"}]}] * 4) == []  # lists are not cells
