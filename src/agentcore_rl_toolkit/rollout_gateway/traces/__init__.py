"""The token tree of a session and the training rows made from it."""

from .record import Status, TraceRecord

__all__ = ["Status", "TraceRecord"]
