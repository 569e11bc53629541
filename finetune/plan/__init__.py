"""The planner: the trainer's own model, loss, optimizer and step, run on tensors that hold no data."""
