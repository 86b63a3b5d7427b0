"""The token tree of a session and the training rows made from it."""

from .linearize import linearize
from .record import Status, TraceRecord
from .tree import MAX_VOCABULARY, TokenTree, Turn, TurnState

__all__ = ["MAX_VOCABULARY", "Status", "TokenTree", "TraceRecord", "Turn", "TurnState", "linearize"]
