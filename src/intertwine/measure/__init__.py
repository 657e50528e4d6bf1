"""Similarity measures: exact, symmetry-aware, each with its kind, range and invariances declared and tested."""
