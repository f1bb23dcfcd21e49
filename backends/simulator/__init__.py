"""Discrete-event simulation of a plan: step time, where it goes, memory, and a timeline; see docs/design/simulator.md."""

from hgc.backends.simulator.engine import play
from hgc.backends.simulator.result import DeviceMemory, Simulation, StageMemory
from hgc.backends.simulator.simulate import USUAL, Options, simulate
from hgc.backends.simulator.stages import StageProgram
from hgc.backends.simulator.timeline import Axis, Event, Parts, Timeline
from hgc.backends.simulator.work import Meeting, Message, Step, Work

__all__ = [
    "USUAL",
    "Axis",
    "DeviceMemory",
    "Event",
    "Meeting",
    "Message",
    "Options",
    "Parts",
    "Simulation",
    "StageMemory",
    "StageProgram",
    "Step",
    "Timeline",
    "Work",
    "play",
    "simulate",
]
