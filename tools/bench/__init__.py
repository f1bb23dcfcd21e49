"""Benchmarks of ``hgc bench``: each module has ``run()``, which prints a table and returns the numbers."""
