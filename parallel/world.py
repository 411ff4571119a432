"""The processes of a run: who is first, what it tells the others, and who was lost."""

import torch.distributed as dist


class World:
    """Stub for now."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size

    def blame(self, told: str) -> str:
        """Stub for now."""
        return told
