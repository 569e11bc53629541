"""The packages of the base install: their licences, and what pip-audit knows against them.

    python benchmarks/packages.py               (licences, then the audit: a minute, and a network)
    python benchmarks/packages.py --licences    (from installed metadata alone)

The base install is this package and what it needs without extras. pip-audit is put into an environment of its own, for
this run, and asks the vulnerability service of the Python Packaging Authority about every installed package. Exit code
1 where a licence is unknown or a vulnerability known; 4 where the audit could not be made.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from packaging.requirements import Requirement

from finetune import DISTRIBUTION

UNKNOWN = "unknown"
LONGEST = 60  # of a License field; a longer one is the licence's own text
Run = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--licences", action="store_true", help="only these; no network")
    arguments = parser.parse_args(words)
    licences = dict(licences_of(base_install()))
    width = max(map(len, licences))
    for name, (version, licence) in licences.items():
        print(f"{name:<{width}}  {version:<12}  {licence}")
    counted = Counter(licence for _, licence in licences.values())
    print(f"{len(licences)} packages: " + ", ".join(f"{licence} {count}" for licence, count in counted.most_common()))
    unknown = [name for name, (_, licence) in licences.items() if licence == UNKNOWN]
    if unknown:
        print(f"licence unknown: {', '.join(unknown)}; look it up, and tell the package's owner", file=sys.stderr)
    code = 0 if arguments.licences else audit()
    return code or int(bool(unknown))


def base_install(root: str = DISTRIBUTION) -> list[str]:
    """Distributions that `root` needs without extras, itself included, as far as they are installed here."""
    names, waiting = {}, [root]
    while waiting:
        name = waiting.pop()
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a marker that holds here names what this installation left out
        key = re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower()
        if key in names:
            continue
        names[key] = found
        needs = map(Requirement, found.requires or ())
        waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return sorted(names)


def licences_of(names: Sequence[str]) -> Iterator[tuple[str, tuple[str, str]]]:
    """(name, (version, licence)) of installed distributions."""
    for name in names:
        metadata = importlib.metadata.metadata(name)
        yield name, (metadata["Version"], licence_in(metadata))


def licence_in(metadata: importlib.metadata.PackageMetadata) -> str:
    """By the field of today (PEP 639), else a short License field, else the classifiers."""
    stated = (metadata.get("License-Expression") or "").strip()
    field = (metadata.get("License") or "").strip()
    classified = [text.rpartition(" :: ")[2] for text in metadata.get_all("Classifier") or () if "License ::" in text]
    if stated:
        return stated
    if field and len(field) <= LONGEST and "\n" not in field and field.lower() != UNKNOWN:
        return field
    return ", ".join(text for text in classified if text != "OSI Approved") or UNKNOWN


def audit(run: Run | None = None) -> int:
    """pip-audit over this environment's packages. 0: nothing is known against them; 1: something; 4: not made."""
    run = run or (lambda words: subprocess.run(words, capture_output=True, text=True))
    with tempfile.TemporaryDirectory(prefix="finetune-audit-") as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder, "bin", "python"))
        for words in (["pip", "install", "--quiet", "pip-audit"], ["pip_audit", "--version"]):
            if (made := run([python, "-m", *words])).returncode:
                return _not_made(made)
        paths = [word for path in sys.path if path.endswith("site-packages") for word in ("--path", path)]
        done = run([python, "-m", "pip_audit", "--progress-spinner", "off", *paths])
    print(done.stdout, end="")
    found = re.search(r"Found \d+ known vulnerabilit", done.stdout + done.stderr)
    if done.returncode and not found:
        return _not_made(done)
    return int(bool(found))


def _not_made(process: subprocess.CompletedProcess[str]) -> int:
    last = (process.stderr.strip() or process.stdout.strip() or f"exit code {process.returncode}").splitlines()[-1]
    print(f"pip-audit: not made: {last[:200]}; it needs a network to the package index", file=sys.stderr)
    return 4


if __name__ == "__main__":
    sys.exit(main())
