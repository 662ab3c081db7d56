"""Measurements: `python -m benchmarks.NAME [--output FILE.json]` prints a table."""
