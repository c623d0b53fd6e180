"""Publishes and follows a large checkpoint, and says how much its memory grew: memory_child.py ROOT ENCODING.

Counted is RssAnon: pages of mapped files are the page cache's.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from weightcast.publisher import Publisher, PublisherOptions
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.checkpoint.local_updater import LocalUpdater


def rss_anon() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise LookupError("RssAnon")


class Highest:
    """The most that was seen while it was watching."""

    def __init__(self) -> None:
        self.seen = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self.seen = max(self.seen, rss_anon())

    def __enter__(self) -> Highest:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


root, encoding = Path(sys.argv[1]), sys.argv[2]
idle = rss_anon()
grown = {}
with Publisher.open(
    root / "channel",
    local=root / "pub",
    base=root / "base",
    encoding=encoding,  # type: ignore[arg-type]
    options=PublisherOptions(threads=2),
) as publisher:
    with Highest() as highest:
        report = publisher.publish_checkpoint(root / "new")
    grown["publish"] = highest.seen - idle
updater = LocalUpdater(open_store(root / "channel"), root / "host", root / "base")
with Highest() as highest:
    updater.update_to(Channel.open(open_store(root / "channel")))
grown["sync"] = highest.seen - idle
updater.close()
print(json.dumps([grown, report.changed_elements, report.elements]))
