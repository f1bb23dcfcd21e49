"""Every Python block of the guides runs as a test, in order, in one namespace for each file."""

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser()], patterns=["guides/*.md"]).pytest()
