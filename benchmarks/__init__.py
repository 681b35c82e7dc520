"""Paired measurements; each folder's README says what of, and `python -m` runs it."""
