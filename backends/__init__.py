"""Backends: what turns a lowered program into files."""
