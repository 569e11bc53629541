"""What a user looks at: the data before training, the run after it."""
