"""The seeded faults are of the code as it is: each can be put in, and the tests that must notice are there.

That they notice: `python benchmarks/seeded_faults.py`, and its record.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from benchmarks.seeded_faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]


def test_each_can_be_seeded_and_names_a_test_file() -> None:
    assert len(FAULTS) > 70
    assert [name for name, times in Counter(fault.name for fault in FAULTS).items() if times > 1] == []
    texts = {fault: (ROOT / "finetune" / fault.file).read_text("utf-8") for fault in FAULTS}
    assert [fault.name for fault, text in texts.items() if text.count(fault.text) != 1] == []
    assert [fault.name for fault in FAULTS if fault.text == fault.instead] == []
    assert [fault.name for fault in FAULTS if not (ROOT / "tests" / fault.tests.split()[0]).is_file()] == []
