"""Orders of work on the stages of a pipeline, as lists of actions per rank: made, printed, read, checked.

What plays them (the runtime's executor, the simulator) and what writes them (``make``, planners) meet here; see docs/design/simulator.md.
"""

from hgc.schedule.actions import Action, Kind, Schedule
from hgc.schedule.check import check, in_flight
from hgc.schedule.layout import Layout, chain
from hgc.schedule.make import NAMES, make

__all__ = ["NAMES", "Action", "Kind", "Layout", "Schedule", "chain", "check", "in_flight", "make"]
