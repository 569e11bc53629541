"""The build step that pyproject.toml cannot state: the package carries folders that stand at the repository's top.

A wheel has recipes/, accelerate_configs/ and data/ in finetune/shipped/. An editable install uses the checkout's.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

# data/README.md says whose the data are.
SHIPPED = ("recipes/*.yaml", "accelerate_configs/*.yaml", "data/*.jsonl", "data/*.csv", "data/README.md")


class BuildWithShipped(build_py):  # type: ignore[misc]  # setuptools has no types
    """`build_py`, and the files that finetune/paths.py looks for in `shipped`."""

    def _shipped(self) -> dict[Path, Path]:
        target = Path(self.build_lib) / "finetune" / "shipped"
        named = {pattern: sorted(Path().glob(pattern)) for pattern in SHIPPED}
        missing = [pattern for pattern, files in named.items() if not files]
        if missing:
            raise FileNotFoundError(f"not beside setup.py: {', '.join(missing)}; build from a checkout or an sdist")
        return {file: target / file for files in named.values() for file in files}

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        shutil.rmtree(Path(self.build_lib) / "finetune" / "shipped", ignore_errors=True)  # of an earlier build
        for file, target in self._shipped().items():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs: list[str] = super().get_outputs(include_bytecode)
        return outputs if self.editable_mode else outputs + [str(target) for target in self._shipped().values()]


setup(cmdclass={"build_py": BuildWithShipped})
