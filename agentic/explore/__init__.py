"""Data collection: recipes that explore a task and hand out finished episodes without end."""

from agentic.explore.recipes import RECIPES
from agentic.explore.workers import stream

__all__ = ["RECIPES", "stream"]
