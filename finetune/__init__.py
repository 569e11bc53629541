"""Fine-tune Llama-3-style models: one YAML recipe, one trainer entrypoint, every strategy, the same curve."""

__version__ = "0.1.0"
