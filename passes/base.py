"""What a pass is: an :class:`Analysis` reads, a :class:`Planner` decides, a :class:`Transform` rewrites.

A pass is a frozen dataclass: its fields are its options and its text form, so any pipeline can be printed and pasted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from hgc.errors import PlanError
from hgc.ir.equivalence import check_same_numbers
from hgc.ir.program import Program

if TYPE_CHECKING:
    from hgc.cluster import Cluster
    from hgc.plan import Plan


@dataclass(frozen=True)
class Analysis(ABC):
    """Reads a program and returns what it found; never changes it."""

    name: ClassVar[str]

    @abstractmethod
    def run(self, program: Program) -> Any: ...


@dataclass(frozen=True)
class Planner(ABC):
    """Reads a program and a cluster and writes a plan."""

    name: ClassVar[str]

    @abstractmethod
    def run(self, program: Program, cluster: Cluster) -> Plan: ...


@dataclass(frozen=True)
class Transform(ABC):
    """Rewrites a program as the plan says. ``run`` gets a copy that it may change, and returns the result.

    A transform may move values, insert hgc's collectives and change sizes; operators must stay what the model has. One that replaces
    operators (a fusion) sets ``replaces_operators`` and runs before anything is sharded: its bodies are then compared
    numerically with what they were, and become what later passes are held to.
    """

    name: ClassVar[str]
    replaces_operators: ClassVar[bool] = False

    @abstractmethod
    def run(self, program: Program, plan: Plan) -> Program: ...

    def applies(self, plan: Plan) -> bool:
        """Would ``run`` change anything? A transform that does not apply is neither run nor checked."""
        return True

    def check(self, before: Program, after: Program) -> list[str]:
        """For transforms that replace operators: raise if the numbers differ, return what could not be checked."""
        return check_same_numbers(before, after, self.name)


@dataclass(frozen=True)
class Pipeline:
    """Transforms in order; the verifier runs after each one."""

    passes: tuple[Transform, ...] = ()

    def __iter__(self) -> Iterator[Transform]:
        return iter(self.passes)

    def __str__(self) -> str:
        return ", ".join(str(p) for p in self.passes)

    def prepend(self, new: Transform) -> Pipeline:
        return self._insert(0, new)

    def insert_before(self, name: str, new: Transform) -> Pipeline:
        return self._insert(self._position(name), new)

    def insert_after(self, name: str, new: Transform) -> Pipeline:
        return self._insert(self._position(name) + 1, new)

    def append(self, new: Transform) -> Pipeline:
        return self._insert(len(self.passes), new)

    def without(self, name: str) -> Pipeline:
        at = self._position(name)
        return replace(self, passes=self.passes[:at] + self.passes[at + 1 :])

    def _insert(self, at: int, new: Transform) -> Pipeline:
        return replace(self, passes=(*self.passes[:at], new, *self.passes[at:]))

    def _position(self, name: str) -> int:
        names = [p.name for p in self.passes]
        if name not in names:
            raise PlanError(f"the pipeline has no pass {name!r}; it has {', '.join(names) or 'none'}")
        return names.index(name)

    def apply(self, program: Program, plan: Plan, check: Callable[[Program, str], None]) -> Program:
        """Run every transform on a copy and ``check(program, pass name)`` the result."""
        applying = [transform for transform in self.passes if transform.applies(plan)]
        for transform in applying:
            before = program
            program = transform.run(program.copy(), plan)
            if transform.replaces_operators:
                _become_reference(before, program, transform)
            check(program, transform.name)
        if not applying:
            check(program, "trace")
        return program


def _become_reference(before: Program, program: Program, transform: Transform) -> None:
    if before.mesh:
        raise PlanError(f"pass {transform.name!r} replaces operators, so it must run before the passes that shard; insert it at the front")
    program.report.extend(transform.check(before, program))
    program.reference = program.copy()
