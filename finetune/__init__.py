"""Fine-tune language models: one YAML recipe, one trainer entrypoint, every strategy, the same curve."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.cli.python_api import TrainedRun as TrainedRun
    from finetune.cli.python_api import fit as fit
    from finetune.cli.python_api import load as load

__version__ = "1.0.0"
DISTRIBUTION = "finetune-recipes"  # on the package index `finetune` is another project

# hf_xet reports each transfer, with the machine's size and the speed; transformers names a session in each request.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def __getattr__(name: str) -> Any:
    if name in ("TrainedRun", "fit", "load"):
        from finetune.cli import python_api

        return getattr(python_api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
