"""Fine-tune language models: one YAML recipe, one trainer entrypoint, every strategy, the same curve."""

__version__ = "1.0.0"
