"""Errors for user mistakes: one sentence that names the thing, the value, what was expected, and the remedy."""

from __future__ import annotations


class HgcError(Exception):
    """Base of every error that is the user's to mend; the command line prints it without a traceback."""


class TraceError(HgcError):
    """The model cannot be captured."""


class PlanError(HgcError):
    """The plan is malformed, or does not fit the program or the cluster."""


class ClusterError(HgcError):
    """The cluster description is malformed."""


class ShardingError(HgcError):
    """A size does not divide, or no rule allows the placement asked for."""


class VerifyError(HgcError):
    """The verifier refused a program: it names node, axis, expected and found."""


class ArtifactError(HgcError):
    """A saved executable is missing, damaged, or belongs to something else."""
