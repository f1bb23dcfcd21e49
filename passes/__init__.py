"""Passes: what reads a program (analyses), decides (planners) and rewrites (transforms)."""
