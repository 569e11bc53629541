"""A finished run made usable elsewhere: checkpoints exported, adapters merged, GGUF files, folders for engines.

May import: training, finished_run.py and what is below them.
"""

ENGINES = ("transformers", "peft", "vllm", "llama.cpp", "ollama")  # of `finetune export --for`
