"""Sharding: the transforms that lower a plan's mesh axes, one after the other."""
