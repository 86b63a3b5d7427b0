"""The token tree of a session and the training rows made from it."""

from .linearize import linearize
from .record import Status, TraceRecord
from .tree import TokenTree, Turn, TurnState, check_output

__all__ = ["Status", "TokenTree", "TraceRecord", "Turn", "TurnState", "check_output", "linearize"]
