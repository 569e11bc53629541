"""A run outlives its machine: its checkpoints and records on an object store, the Hub or a folder (`run.storage`)."""
