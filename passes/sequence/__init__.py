"""Heterogeneous sequence parallelism: groups of devices chosen for the lengths of every batch."""
