"""Rebuild devils_dictionary.jsonl from the Debian package dict-devil, byte for byte.

    apt-get download dict-devil && dpkg -x dict-devil_*.deb devil
    python data/make_devils_dictionary.py devil/usr/share/dictd > data/devils_dictionary.jsonl

Standard library only. An entry of the dictionary is a headword, a part of speech, prose, and often verse by an
invented poet. Kept are the first three, of the prose the first paragraph in whole sentences up to MAX_CHARACTERS, as
the answer to "Define: Headword".
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

MAX_CHARACTERS = 420  # about 100 tokens: a row stays cheap, and an answer is whole within a short sample
MIN_CHARACTERS = 20
DIGITS = {
    character: value
    for value, character in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")
}
PART_OF_SPEECH = r"(?:(?:n|adj|v|t|i|adv|pl|pp|p|pro|pron)\.)+"
ENTRY = re.compile(rf"(?P<head>[A-Z][A-Z' -]*[A-Z]),\s+(?P<part>{PART_OF_SPEECH})\s+(?P<body>[A-Z].*)", re.S)
# Left out whole: slurs and jokes upon races, peoples and faiths, which nobody should be handed as sample data.
UNFIT = re.compile(
    r"nigger|negro|jew|hebrew|shebrew|indian|injun|savage|mulatto|aborigin|red-skin|african|squaw|chinese|mohammed|mahomet|mussul",
    re.I,
)
UNFIT_HEADWORDS = {"WHITE", "WOMAN", "FEMALE", "MISS", "HAG", "BELLADONNA"}


def entries(folder: Path) -> Iterator[str]:
    """The text of each entry, in the file's order; the index holds offsets and lengths in base 64."""
    text = gzip.decompress((folder / "devil.dict.dz").read_bytes())
    spans = set()
    for line in (folder / "devil.index").read_text("ascii").splitlines():
        headword, *numbers = line.split("\t")
        if not headword.startswith("00database"):
            spans.add(tuple(number(digits) for digits in numbers))
    for start, length in sorted(spans):
        yield text[start : start + length].decode("ascii")


def number(digits: str) -> int:
    value = 0
    for digit in digits:
        value = 64 * value + DIGITS[digit]
    return value


def clean(entry: str) -> tuple[str, str] | str:
    """Headword and answer, or the reason why the entry is left out."""
    paragraphs = re.split(r"\n\s*\n", entry.strip("\n"))
    match = ENTRY.match(paragraphs[0])
    if match is None:
        return "no headword, part of speech and prose"
    if UNFIT.search(entry) or match["head"] in UNFIT_HEADWORDS:
        return "unfit"
    prose = re.sub(r"(?<=[a-z])-\n(?=[a-z])", "-", match["body"])  # "cannon-", "shot" over two lines
    if re.search(r"\n {3,}\S", prose):
        return "verse inside the prose"
    if re.search(r"[\[\]{}\\^|]|\(sic\)", prose):
        return "editorial marks"
    sentences = [" ".join(sentence.split()) for sentence in re.split(r"(?<=[.!?\"')])\s{2,}|(?<=[.!?])\n", prose)]
    kept = ""
    for sentence in sentences:
        if len(kept) + 1 + len(sentence) > MAX_CHARACTERS:
            break
        kept = f"{kept} {sentence}".strip()
    kept = re.sub(r"_([^_]*)_", r"\1", kept).replace(" -- ", " — ")
    if not kept:
        return "too long"
    if not re.search(r"[.!?][\"')]?$", kept) or re.search(r"_|--|\d", kept):
        return "leads into verse, or odd characters"
    if len(kept) < MIN_CHARACTERS or "q.v." in kept:
        return "too short, or a mere reference"
    headword = match["head"].capitalize()
    return headword, f"{headword}, {match['part']} {kept}"


def main(folder: str) -> int:
    left_out: Counter[str] = Counter()
    seen = set()
    for entry in entries(Path(folder)):
        result = clean(entry)
        if isinstance(result, str):
            left_out[result] += 1
            continue
        headword, answer = result
        if headword in seen:
            left_out["a second entry of the same headword"] += 1
            continue
        seen.add(headword)
        turns = {"user": f"Define: {headword}", "assistant": answer}
        row = {"messages": [{"role": role, "content": content} for role, content in turns.items()]}
        print(json.dumps(row, ensure_ascii=False))
    print(f"kept {len(seen)}; left out {dict(left_out)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]) if len(sys.argv) == 2 else __doc__)
