"""Analyses: what a program costs."""
