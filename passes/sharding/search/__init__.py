"""Automatic hybrid parallelism; see docs/design/search.md."""
