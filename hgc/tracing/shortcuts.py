"""What an attempt at tracing takes for granted, and how it starts over when that turns out wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shortcuts:
    """``fold``: trace equal blocks twice only, except the groups in ``whole``; ``opened``: containers whose members are no blocks;
    ``windows``: sliding windows need no mask because every attention is told its window; ``own_attention``: names of configs
    whose models compute attention themselves, so that they keep the implementation they were built with.
    """

    fold: bool = True
    opened: frozenset[str] = frozenset()
    whole: frozenset[str] = frozenset()
    windows: bool = True
    own_attention: frozenset[str] = frozenset()

    def without_folding(self, group: str) -> Shortcuts:
        return replace(self, whole=self.whole | {group})

    def opening(self, container: str) -> Shortcuts:
        return replace(self, opened=self.opened | {container})

    def keeping_attention(self, configs: set[str]) -> Shortcuts:
        return replace(self, own_attention=self.own_attention | configs)

    def with_masks(self) -> Shortcuts:
        return replace(self, windows=False)


class StartOver(Exception):
    """The attempt must be repeated with other shortcuts; ``reason`` goes into the program's report."""

    def __init__(self, shortcuts: Shortcuts, reason: str = "") -> None:
        super().__init__(reason)
        self.shortcuts = shortcuts
        self.reason = reason
