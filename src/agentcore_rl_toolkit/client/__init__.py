"""The trainer's side: start sessions of an agent, wait for their results, stop them."""

from ._batch import AsyncBatchResult, BatchItem, BatchResult
from ._client import RolloutClient
from ._future import RolloutFuture

__all__ = ["AsyncBatchResult", "BatchItem", "BatchResult", "RolloutClient", "RolloutFuture"]
