"""Fixtures that several test files share, how many tests run at once, and a second pytest for tests that trace."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from itertools import chain
from pathlib import Path

import pytest

# Before torch loads, here and in every process that a test starts: on tiny models a second thread only waits (the
# suite took 446 s with two, while another program ran).
os.environ.setdefault("OMP_NUM_THREADS", "1")
from finetune.report import pictures

# Collecting makes millions of objects that all stay. Looking through them for garbage again and again took 12 of 45 CPU
# seconds in each worker; pytest_collection_finish switches it on again.
gc.disable()

LONG = ("test_strategies.py", "test_shipped_batches.py", "test_as_written.py")  # ten seconds and more a test
# A trace's device has to be there before a process's first backward, which then starts threads for it; a process that
# has them cannot fork ranks. So tests/planner/ is run by another pytest, when the other tests are over.
TRACING = Path(__file__).parent / "planner"
LAUNCHERS = ("ACCELERATE_", "FSDP_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "NCCL_")
ASKED, LEFT_OUT, CPU = pytest.StashKey[list[str]](), pytest.StashKey[list[str]](), pytest.StashKey[float]()


def _traces(path: Path) -> bool:
    return TRACING in (path, path.parent)


def _left_out(config: pytest.Config) -> list[str]:
    """What this pytest was asked for and leaves to another: tests that trace, where it was asked for others too."""
    paths = {arg: (config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args}
    if all(map(_traces, paths.values())):
        return []
    if any(TRACING.is_relative_to(path) and path != TRACING for path in paths.values()):
        return [*filter(lambda arg: _traces(paths[arg]), paths), str(TRACING)]
    return [arg for arg, path in paths.items() if _traces(path)]


# Half of a tiny training's CPU time went into its report's ten charts. They are drawn in tests marked `draws` alone.
draw_svg, draw_png, drawing = pictures.inline_svg, pictures.save_png, False


def _inline_svg(chart: pictures.Chart) -> str:
    return draw_svg(chart) if drawing else "<svg></svg>" * bool(chart.shown)


def _save_png(chart: pictures.Chart, file: Path) -> None:
    if drawing:
        draw_png(chart, file)
    else:
        file.write_bytes(b"\x89PNG\r\n\x1a\n")


# Before html.py and run_page.py import them.
pictures.inline_svg, pictures.save_png = _inline_svg, _save_png


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Whether this test, and fixtures that begin with it, draw charts."""
    global drawing
    drawing = item.get_closest_marker("draws") is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", action="store_true", help="at the end, name the tests that took the most CPU seconds")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note the CPU seconds since the last report: of this process, and of the children that it has waited for."""
    report = yield
    before, item.session.stash[CPU] = item.session.stash.get(CPU, 0.0), sum(os.times()[:4])
    report.cpu = item.session.stash[CPU] - before
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.option.cpu:
        return
    seconds = Counter[str]()
    for report in chain(*terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid] += getattr(report, "cpu", 0.0)  # a worker that crashed noted nothing
    terminalreporter.section(f"{seconds.total():.0f} CPU seconds in {len(seconds)} tests; the dearest")
    for name, spent in seconds.most_common(30):
        terminalreporter.line(f"{spent:.2f} {name}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two at most, for many tests start ranks of their own; none for a few named tests."""
    named = all("::" in arg for arg in config.args)
    return 0 if named else min(2, len(os.sched_getaffinity(0)))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ASKED], config.stash[LEFT_OUT] = list(config.args), _left_out(config)
    # A file that is named is collected, whatever pytest_ignore_collect says of it.
    config.args[:] = [arg for arg in config.args if arg not in config.stash[LEFT_OUT]]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if _traces(collection_path) and config.stash[LEFT_OUT] else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest first: one that begins last is waited for by a worker that has nothing left to do.

    A test marked `sample(n, thorough=m)` keeps m cases, spread evenly over its parameters. By default n of these run;
    the others are thorough. Cases that are not kept are slow. Without `thorough`, m is n.
    """
    items.sort(key=lambda item: item.path.name not in LONG)
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("sample") and not item.get_closest_marker("slow"):
            cases[item.nodeid.split("[")[0]].append(item)
    for of_one_test in cases.values():
        marker = of_one_test[0].get_closest_marker("sample")
        kept = _spread(of_one_test, marker.kwargs.get("thorough", marker.args[0]))  # type: ignore[union-attr]
        default = _spread(kept, marker.args[0])  # type: ignore[union-attr]
        for item in of_one_test:
            if item not in kept:
                item.add_marker("slow")
            elif item not in default:
                item.add_marker("thorough")


def _spread(items: list[pytest.Item], count: int) -> list[pytest.Item]:
    return [items[index * len(items) // count] for index in range(count)]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make the trace's device before the first test: that one may train, and the next one trace. Look for garbage
    again."""
    tracing = any(_traces(item.path) for item in session.items)
    if _has_traced() and not tracing:
        raise pytest.UsageError("a test file made the trace's device at import; it belongs to tests/planner/")
    if tracing:
        from finetune.planner.trace.fake_device import pretend_device

        pretend_device()
    gc.freeze()  # what is collected and imported so far is never garbage
    gc.enable()
    session.stash[CPU] = sum(os.times()[:4])


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Run what was left out, with the same options; the session fails where that does."""
    config = session.config
    files = [] if hasattr(config, "workerinput") else config.stash[LEFT_OUT]
    if not files or config.option.collectonly or session.shouldstop or exitstatus == pytest.ExitCode.INTERRUPTED:
        return
    options = [arg for arg in config.invocation_params.args if arg not in config.stash[ASKED]]
    # Two workers would import and collect for longer than they save: 235 tests take 17 s.
    options.append("-n0")
    print("\n\ntests that trace, in a process of their own:", flush=True)
    process = subprocess.run([sys.executable, "-m", "pytest", *options, *files], cwd=config.invocation_params.dir)
    if process.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    elif exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = process.returncode


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama (float32 safetensors) and its tokenizer. Read-only: shared by the session."""
    from tests.support.models.tiny import (
        save_tiny,
    )  # imports torch, which the process that starts workers does not need

    return save_tiny(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """A launcher's variables and a process group that a test leaves would decide what the next one runs under."""
    before, traced = _of_a_launcher(), _has_traced()
    yield
    assert traced or not _has_traced(), "a test that traces belongs to tests/planner/"
    assert _of_a_launcher() == before, "give them back: tests/support/runs/one_rank.py as_before"


def _has_traced() -> bool:
    """Whether a planner's device is here, with which no rank can be forked and no GPU pretended any more."""
    return hasattr(sys.modules.get("torch"), "pretend")


def _of_a_launcher() -> dict[str, str]:
    """This process's variables that launchers and Accelerate set, and whether it has a process group."""
    found = {name: value for name, value in os.environ.items() if name.startswith(LAUNCHERS)}
    if (torch := sys.modules.get("torch.distributed")) is not None and torch.is_initialized():
        found["process group"] = f"of {torch.get_world_size()}"
    return found


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two threads that wait for each other on a busy machine are twenty times slower."""
    import torch

    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # train.py sets no other number then
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def forget_the_last_run() -> Iterator[None]:
    """Accelerate keeps a process's first mixed precision for good; its own tests reset it so too."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
