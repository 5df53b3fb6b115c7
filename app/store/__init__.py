"""Embeddings by key: in memory, on disk, and on a server that several nodes share.

`SharedTier` is in `app.store.shared`, which needs the extra `store`.
"""

from app.store.disk import DiskTier
from app.store.entry import StoredEmbedding
from app.store.loans import Loans
from app.store.memory import Lease
from app.store.stats import StoreStats, TierStats
from app.store.store import EmbeddingStore, Tier

__all__ = [
    "DiskTier",
    "EmbeddingStore",
    "Lease",
    "Loans",
    "StoreStats",
    "StoredEmbedding",
    "Tier",
    "TierStats",
]
