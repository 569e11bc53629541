"""The lecture `collectives`: what five operations do to the rows of four ranks, and two ways to broadcast."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from finetune.planner import CHIPS, PCIE_MACHINE
from finetune.report.pictures import COLOURS, new_figure
from lectures.collectives.ranks import LINK, PIECES, PLAYED_MIB, RANKS
from lectures.local_ranks import figures_of_ranks
from lectures.output import Chapter, LectureRequest, LectureResult, columns, whole_number

GPUS, GIB = 8, 2**30  # of the table of links: 1 GiB over eight GPUs
# Bytes/s of one GPU's link one way, as the plan has them.
LINKS = {
    "NVLink, H100": CHIPS["H100"].link,
    "NVLink, A100": CHIPS["A100"].link,
    "PCIe 4, RTX 4090": CHIPS["RTX4090"].link,
    "PCIe 3, T4": CHIPS["T4"].link,
    "InfiniBand, 400 Gbit/s for each GPU": CHIPS["H100"].between,
    "Ethernet, 100 Gbit/s for eight GPUs": PCIE_MACHINE,
}
DOES = {
    "Broadcast": "every rank gets rank 0's row",
    "Reduce": "rank 0 gets out[c] = sum over r of in[r][c]",
    "AllReduce": "every rank gets out[c] = sum over r of in[r][c]",
    "AllGather": "every rank gives in[r][r] and gets all of them",
    "ReduceScatter": "rank r gets out[r] alone",
}
RankFigures = Sequence[Mapping[str, Any]]


def collectives_lecture(asked: LectureRequest) -> LectureResult:
    """Four processes, once. Raises EnvironmentMismatch where one fails."""
    mib = whole_number(asked.settings, "mib")
    asked.note(f"starting {RANKS} gloo ranks")
    ranks = _run_ranks(mib)
    sections = [_examples(ranks), _costs(ranks, mib), _broadcasts(ranks, mib), _played(ranks), _links()]
    facts = {"ranks": [dict(each) for each in ranks], "mib": mib, "links": LINKS}
    return LectureResult(sections, facts, partial(_draw, ranks))


def broadcast_seconds(nbytes: float, link: float, ranks: int) -> tuple[float, float]:
    """A naive broadcast and one in a ring of PIECES, over links of `link` bytes/s each way: the arithmetic."""
    once = nbytes / link
    return (ranks - 1) * once, once * (PIECES + ranks - 2) / PIECES


def _run_ranks(mib: int) -> RankFigures:
    with tempfile.TemporaryDirectory(prefix="finetune-collectives-") as name:
        return figures_of_ranks("collectives", "lectures.collectives.ranks", Path(name), RANKS, str(mib))


def _row(numbers: Sequence[int]) -> str:
    return " ".join(f"{number:>3}" for number in numbers) if numbers else "-"


def _examples(ranks: RankFigures) -> Chapter:
    """The rows before, and after each operation."""
    names = list(ranks[0]["operations"])
    cells = [[f"rank {rank}", _row(each["before"])] for rank, each in enumerate(ranks)]
    for rank, each in enumerate(ranks):
        cells[rank] += [_row(each["operations"][name]["after"]) for name in names]
    lines = [*columns(("", "in[r]", *names), cells), "", *(f"{name}: {DOES[name]}." for name in names)]
    return Chapter("The rows of four ranks, before and after", lines)


def _costs(ranks: RankFigures, mib: int) -> Chapter:
    """What a rank sends in a ring, counted from the calls, and seconds."""
    rows = []
    for name in ranks[0]["operations"]:
        each = [rank["operations"][name] for rank in ranks]
        sent, payload = (max(one[key] for one in each) for key in ("ring_bytes", "payload_bytes"))
        seconds = max(one["seconds"] for one in each)
        rows.append((name, f"{payload / 2**20:.0f}", f"{sent / 2**20:.0f}", f"{1000 * seconds:.1f}"))
    lines = columns((f"tensor of {mib} MiB", "payload, MiB", "a rank sends in a ring, MiB", "ms here"), rows)
    return Chapter("What each costs", lines, measured=True)


def _broadcasts(ranks: RankFigures, mib: int) -> Chapter:
    lines = columns(_heads(), [_sent(name, ranks, "broadcasts") for name in ("naive", "ring")])
    return Chapter(f"Broadcast of {mib} MiB by sends, as fast as this machine is", lines, measured=True)


def _heads() -> tuple[str, ...]:
    return ("MiB sent by", *(f"rank {rank}" for rank in range(RANKS)), "most", "ms")


def _sent(name: str, ranks: RankFigures, key: str) -> tuple[str, ...]:
    sent = [each[key][name]["sent_bytes"] / 2**20 for each in ranks]
    seconds = max(each[key][name]["seconds"] for each in ranks)
    return name, *(f"{each:.0f}" for each in sent), f"{max(sent):.0f}", f"{1000 * seconds:.0f}"


def _played(ranks: RankFigures) -> Chapter:
    """Over links of a known speed, beside the arithmetic."""
    expected = broadcast_seconds(PLAYED_MIB * 2**20, LINK, RANKS)
    rows = [
        (*_sent(name, ranks, "played"), f"{1000 * seconds:.0f}")
        for name, seconds in zip(("naive", "ring"), expected, strict=True)
    ]
    lines = [
        *columns((*_heads(), "by arithmetic"), rows),
        f"Each rank has a link of {LINK / 1e6:.0f} MB/s, played by sleeping as long as its bytes would take. With N",
        f"ranks, S bytes and P = {PIECES} pieces: naive (N-1) S / link, ring S / link x (P+N-2) / P.",
    ]
    return Chapter(f"Broadcast of {PLAYED_MIB} MiB over links of one speed", lines, measured=True)


def _links() -> Chapter:
    rows = []
    for name, link in LINKS.items():
        naive, ring = broadcast_seconds(GIB, link, GPUS)
        rows.append((name, f"{link / 1e9:.1f}", f"{1000 * naive:.1f}", f"{1000 * ring:.1f}"))
    head = (f"1 GiB to {GPUS} GPUs", "GB/s one way", "naive, ms", "ring, ms")
    lines = [*columns(head, rows), "A bound by makers' figures, which finetune plan uses too: no link reaches them."]
    return Chapter("The same arithmetic over the links that the plan knows", lines)


def _draw(ranks: RankFigures, file: Path) -> None:
    """Bytes that each rank sends, and seconds over the played link."""
    figure = new_figure(figsize=(9.0, 4.2))
    left, right = figure.subplots(1, 2, width_ratios=[1.5, 1])
    for offset, (name, colour) in enumerate(zip(("naive", "ring"), COLOURS, strict=False)):
        places = [rank + (offset - 0.5) * 0.4 for rank in range(RANKS)]
        sent = [each["played"][name]["sent_bytes"] / 2**20 for each in ranks]
        left.bar_label(left.bar(places, sent, 0.36, color=colour, label=name), fmt="{:.0f}", fontsize=9)
        seconds = max(each["played"][name]["seconds"] for each in ranks)
        right.bar_label(right.bar(name, seconds, 0.5, color=colour), fmt="{:.2f}", fontsize=9)
    expected = broadcast_seconds(PLAYED_MIB * 2**20, LINK, RANKS)
    right.hlines(expected, (-0.22, 0.78), (0.22, 1.22), colors="black", label="by arithmetic")
    left.set_xticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)])
    left.set_ylabel("MiB sent")
    right.set_ylabel("seconds")
    left.set_title(f"Broadcast of {PLAYED_MIB} MiB: who sends how much", loc="left", fontsize=11)
    right.set_title(f"Links of {LINK / 1e6:.0f} MB/s", loc="left", fontsize=11)
    for axes in (left, right):
        axes.legend(frameon=False)
        axes.margins(y=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)
