"""An object store in this process."""

import obstore.store

from weightcast.shared.channel.object_store import ObjectStore


class MemoryStore(ObjectStore):
    def __init__(self) -> None:
        super().__init__(obstore.store.MemoryStore(), "memory:/")
