"""Rows, masks, templates, and strangers' files."""
