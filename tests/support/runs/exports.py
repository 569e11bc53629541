"""Exports of checkpoints, compared file by file with what a training handed over itself."""

from __future__ import annotations

from pathlib import Path

from finetune.hand_over.export_step import export_step


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def product_of(folder: Path) -> Path:
    """adapter/ or model/ of a run or an export."""
    return next(folder / name for name in ("adapter", "model") if (folder / name).is_dir())


def assert_same_product(export: Path, run: Path) -> None:
    """The same files, byte for byte; of the library versions the product's card tells nothing else."""
    found, expected = contents(product_of(export)), contents(product_of(run))
    assert product_of(export).name == product_of(run).name
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == [], f"{export} is not {run}"


def assert_the_last_step_exports_alike(run: Path, to: Path) -> None:
    """The newest checkpoint, exported in this one process, is what the run's own ranks exported at its end."""
    newest = max(run.joinpath("checkpoints").glob("step-*"))
    export_step(run, int(newest.name.removeprefix("step-")), to)
    assert_same_product(to, run)
