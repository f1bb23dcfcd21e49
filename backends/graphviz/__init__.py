"""Pictures of programs through Graphviz.

:func:`draw` shows the root graph with runs of equal blocks collapsed, or the operators of one block.
"""

from hgc.backends.graphviz.drawing import draw
from hgc.backends.graphviz.render import Drawing

__all__ = ["Drawing", "draw"]
