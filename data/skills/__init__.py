"""Seeded training rows for three skills that a small model can learn: dates, SQL, tool calls."""
