"""An object store in this process."""

import obstore.store

from weightcast.shared.channel.object_store import ObjectStore
from weightcast.shared.channel.rate import NO_RATES, Rates


class MemoryStore(ObjectStore):
    def __init__(self, rates: Rates = NO_RATES) -> None:
        super().__init__(obstore.store.MemoryStore(), "memory:/", "", rates)
