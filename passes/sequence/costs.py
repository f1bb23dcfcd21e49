"""What a group of devices needs for packed sequences: time and memory as functions of their lengths.

A group of ``d`` devices splits every sequence it holds. After FlexSP (arXiv:2412.01523, section 4.1) its time is::

    fixed_s + (quadratic_s * sum(s^2) + linear_s * sum(s)) / d  +  exchange_bytes * sum(s) / (d * bandwidth(d))

and it holds ``d * tokens_per_device`` tokens. Two things are not in the paper's objective: what sharded parameters cost
(:class:`Sharding`), and groups of several nodes whose all-to-alls stay inside nodes while keys and values go round a ring of nodes
(:class:`Ring`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hgc import records
from hgc.errors import PlanError

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Sharding:
    """How parameters, gradients and optimizer are kept. ``state_bytes``: on each device. ``micro_batch_s``: what gathering and reducing
    costs in every micro-batch, and ``step_s`` once a step, as far as nothing hides it. Groups inside the ``devices`` that share
    parameters keep in step."""

    state_bytes: float
    micro_batch_s: float = 0.0
    step_s: float = 0.0


@dataclass(frozen=True)
class Ring:
    """Groups of several nodes: all-to-alls inside each node, a ring of keys and values across nodes beside attention.

    ``key_bytes``: of keys and values of a token in all layers, forward; backward passes them again with their gradients.
    ``bandwidth``: bytes/s from one device to its counterpart in the next node. ``node_devices``: devices of a node.
    """

    key_bytes: float
    bandwidth: float
    node_devices: int


@dataclass(frozen=True)
class SequenceCosts:
    """Of one model on one kind of device. ``quadratic_s`` and ``linear_s``: seconds of one device for a squared token and a token.

    ``fixed_s``: seconds that every group pays for every pack. ``exchange_bytes``: bytes a token sends in all its all-to-alls.
    ``bandwidths``: (degree, bytes/s of one device's all-to-all), ascending; degrees between two listed ones are as slow as the larger.
    ``token_bytes``: memory of a token.
    """

    quadratic_s: float
    linear_s: float
    fixed_s: float
    exchange_bytes: float
    bandwidths: tuple[tuple[int, float], ...]
    token_bytes: float
    memory_bytes: float
    sharding: Sharding
    ring: Ring | None = None

    def __post_init__(self) -> None:
        if self.tokens_per_device < 1:
            raise PlanError(
                f"a device of {self.memory_bytes:.3g} bytes has no room for a token beside {self.sharding.state_bytes:.3g} bytes of "
                "parameters and optimizer; shard them further or use larger devices"
            )

    @property
    def tokens_per_device(self) -> float:
        return (self.memory_bytes - self.sharding.state_bytes) / self.token_bytes

    def bandwidth(self, degree: int) -> float:
        """Bytes/s of one device in an all-to-all among ``degree`` devices; infinite for one."""
        if degree == 1:
            return float("inf")
        return next((rate for listed, rate in self.bandwidths if listed >= degree), self.bandwidths[-1][1])

    def rates(self, degrees: tuple[int, ...]) -> Rates:
        """The formula's coefficients for groups of each degree; those of several nodes have the faster of all-to-all and ring."""
        d = np.array(degrees, dtype=np.float64)
        sent = np.array([self.exchange_bytes / self.bandwidth(degree) for degree in degrees])
        fixed = np.full(len(d), self.fixed_s + self.sharding.micro_batch_s)
        flat = (self.linear_s + sent) / d
        inside, ring = flat, np.zeros(len(d))
        if self.ring is not None:
            nodes = np.maximum(d / self.ring.node_devices, 1.0)
            within = np.array([self.exchange_bytes / self.bandwidth(min(degree, self.ring.node_devices)) for degree in degrees])
            inside = (self.linear_s + within) / d
            ring = 3 * self.ring.key_bytes * (nodes - 1) / nodes / self.ring.node_devices / self.ring.bandwidth
        return Rates(d, self.quadratic_s / d, flat, inside, ring, fixed, self.tokens_per_device * d)


@dataclass(frozen=True)
class Rates:
    """One number for each degree: a group takes ``fixed`` and the ``busy`` seconds of its sequences, and holds ``tokens``.

    ``linear``: seconds of a token with all-to-alls among all devices, ``inside`` with those inside nodes, beside ``ring`` seconds.
    """

    degrees: Numbers
    quadratic: Numbers
    linear: Numbers
    inside: Numbers
    ring: Numbers
    fixed: Numbers
    tokens: Numbers

    def busy(self, lengths: Numbers) -> Numbers:
        """Seconds [degrees, lengths] that one sequence keeps a group of each degree busy, without the group's fixed part."""
        attention = np.outer(self.quadratic, lengths * lengths)
        flat = attention + np.outer(self.linear, lengths)
        return np.minimum(flat, np.maximum(attention, np.outer(self.ring, lengths)) + np.outer(self.inside, lengths))

    def seconds(self, index: int, lengths: Numbers) -> float:
        """Of a group of the ``index``-th degree that holds ``lengths``."""
        return float(self.fixed[index] + self.busy(lengths)[index].sum())


@dataclass(frozen=True)
class Fleet:
    """The devices, and in what numbers they may form groups.

    A group of at most ``node_devices`` lies inside one node, a larger one takes whole nodes. ``degrees`` defaults to powers of two up to a
    node and powers of two of nodes, and all devices together.
    """

    devices: int
    node_devices: int
    degrees: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        records.check_whole("devices", self.devices, 1, PlanError)
        records.check_whole("node_devices", self.node_devices, 1, PlanError)
        if self.devices > self.node_devices and self.devices % self.node_devices:
            raise PlanError(f"{self.devices} devices are not whole nodes of {self.node_devices}; leave some out")
        object.__setattr__(self, "degrees", tuple(sorted(set(self.degrees or self._default_degrees()))))
        for degree in self.degrees:
            inside = 1 <= degree <= min(self.node_devices, self.devices)
            if not inside and (degree < 1 or degree > self.devices or degree % self.node_devices):
                raise PlanError(
                    f"groups of {degree} devices fit neither inside a node of {self.node_devices} nor into whole nodes of "
                    f"{self.devices} devices"
                )

    def _default_degrees(self) -> list[int]:
        inside = min(self.node_devices, self.devices)
        found = [2**k for k in range(inside.bit_length()) if 2**k <= inside] + [inside]
        nodes = self.devices // self.node_devices
        return found + [self.node_devices * 2**k for k in range(nodes.bit_length()) if 2**k <= nodes] + [self.devices]

    def most_groups(self, degree: int) -> int:
        """How many groups of one degree there is room for."""
        if degree > self.node_devices or self.devices < self.node_devices:
            return self.devices // degree
        return self.devices // self.node_devices * (self.node_devices // degree)

    def layout(self, degrees: list[int]) -> list[int] | None:
        """The first device of each group, largest groups first so that none crosses a node's border; ``None`` if they do not fit."""
        free = [self.node_devices] * max(1, self.devices // self.node_devices) if self.devices >= self.node_devices else [self.devices]
        first = [0] * len(degrees)
        whole = 0
        for place in sorted(range(len(degrees)), key=lambda i: -degrees[i]):
            degree = degrees[place]
            if degree > self.node_devices:
                nodes = degree // self.node_devices
                if whole + nodes > len(free):
                    return None
                first[place] = whole * self.node_devices
                free[whole : whole + nodes] = [0] * nodes
                whole += nodes
            else:
                node = next((n for n in range(whole, len(free)) if free[n] >= degree), None)
                if node is None:
                    return None
                first[place] = node * self.node_devices + self._node(node) - free[node]
                free[node] -= degree
        return first

    def _node(self, node: int) -> int:
        return min(self.node_devices, self.devices - node * self.node_devices)
