"""An intake of the publisher's daemon: HTTP requests, hand-overs and the watched directory are one each.

A source remembers on disk what became of its checkpoints; the loop asks it what to publish next.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Protocol

from weightcast.publisher.daemon.sources.inbox import LastContent
from weightcast.publisher.publish.report import Publication, publication, report_of
from weightcast.publisher.service_publisher import ServicePublisher
from weightcast.publisher.weights.tensors import NewWeights
from weightcast.shared.channel.index import Index
from weightcast.shared.channel.layout import index_key
from weightcast.shared.daemon.status import Failure

MadeFor = Callable[[str, int], Index | None]
"""The version that came of a request, if it is one after another version."""


def new_request() -> str:
    return secrets.token_hex(8)


class SourceJob:
    """One checkpoint to publish. `name`: for logs and status; `step`: the trainer's, where it is known."""

    name: str
    step: int | None = None

    def open(self) -> NewWeights:
        """Raises Refused for weights that changed since they were chosen, or cannot be read."""
        raise NotImplementedError

    def known(self) -> LastContent | None:
        """Content that was published before under this name or key; None: publish without a comparison."""
        return None

    def has_sample(self, known: LastContent) -> bool:
        """Whether a sample of the bytes is enough to tell that the content is the known one."""
        return False

    def unchanged(self, known: LastContent) -> None:
        """The content is the known one: nothing is published."""

    def begin(self, version: int) -> str:
        """Notes on disk that its publication starts after `version`; returns the request to publish it by."""
        raise NotImplementedError

    def done(self, outcome: Publication | Failure) -> None:
        """Notes on disk what became of it; a Failure is final."""

    def interrupted(self, error: Exception) -> None:
        """The publication ended with `error` and is tried again after `Source.resume`."""


class Source(Protocol):
    def resume(self) -> None:
        """After a start, an error or a kill: notes what became of the job that had begun."""
        ...

    def next(self) -> SourceJob | None:
        """What to publish now; raises RetryLater where that cannot be read now."""
        ...


def read_back(publisher: ServicePublisher, index: Index, source: str) -> Publication:
    """The report of a version whose publication did not live to report."""
    found = publisher.store.stat(index_key(index.version))
    size = 0 if found is None else found.size
    return publication(report_of(index, publisher.run[1].table, size), source)
