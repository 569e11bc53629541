"""Fine-tune language models: one YAML recipe, one trainer entrypoint, every strategy, the same curve."""

import os

__version__ = "1.0.0"
DISTRIBUTION = "finetune-recipes"  # on the package index `finetune` is another project

# hf_xet reports each transfer, with the machine's size and the speed; transformers names a session in each request.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
