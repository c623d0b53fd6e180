"""An intake of the publisher's daemon: HTTP requests, hand-overs and the watched directory are one each.

A source remembers on disk what became of its checkpoints; the loop asks it what to publish next.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Annotated, Generic, Protocol, TypeVar

from pydantic import BaseModel, Field, ValidationError

from weightcast.publisher.components import tensors_in
from weightcast.publisher.publish.publish_job import Publication, report_of
from weightcast.publisher.run_publisher import RunPublisher
from weightcast.publisher.weights.export_rules import NO_RULES, ExportRules
from weightcast.publisher.weights.tensors import NewWeights
from weightcast.shared.base.elements import MAIN
from weightcast.shared.base.errors import DamagedFile
from weightcast.shared.channel.index import Index
from weightcast.shared.channel.layout import index_key
from weightcast.shared.daemon.status import Facts, Failure
from weightcast.shared.files import durable
from weightcast.shared.files.strict_json import parse_object

T = TypeVar("T", bound=BaseModel)


class Memory(Generic[T]):
    """What became of a source's checkpoints: one JSON file, which survives restarts. One thread stores."""

    def __init__(self, path: Path, empty: T, limit: int, remedy: str) -> None:
        """`limit`: bytes. Raises DamagedFile with `remedy` where the file is not one of ours."""
        self._path, self.value = path, empty
        try:
            data = durable.read_file(path, limit)
            parse_object(data, path.name)
            self.value = type(empty).model_validate_json(data, strict=True)
        except FileNotFoundError:
            pass
        except DamagedFile as error:
            raise DamagedFile(f"{path} is damaged: {error.message}", remedy=remedy) from error
        except ValidationError as error:
            wrong = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, wrong["loc"]))
            raise DamagedFile(f"{path} is damaged: {place}: {wrong['msg']}", remedy=remedy) from error

    def store(self, value: T) -> None:
        """It is on disk when this returns."""
        if value != self.value:
            durable.replace(self._path, value.model_dump_json().encode())
            self.value = value


_Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]


class LastContent(Facts):
    """What a checkpoint is compared with before it is published: the last content of its name or key."""

    version: Annotated[int, Field(ge=0)] | None = None
    root: _Digest = ""
    """of that version"""
    sample: _Digest = ""
    """of what was left alone or passed over, and so never read in full"""


NO_CONTENT = LastContent()


def new_request() -> str:
    return secrets.token_hex(8)


Requested = Collection[tuple[str, str]]
"""checkpoints that are published on request: component and real path"""


class SourceJob:
    """One checkpoint to publish. `name`: for logs and status; `step`: the trainer's, where it is known."""

    name: str
    step: int | None = None
    component: str = MAIN
    directory = Path()
    """where the weights are, except of a hand-over"""
    key: str | None = None
    """of the HTTP request that asked for it, empty where it had none; None: nobody asked"""

    def main_version(self) -> int | None:
        """Of main, on which it was trained; None: nothing says so. Raises Refused."""
        return None

    def target(self, publisher: RunPublisher) -> RunPublisher:
        """The publisher of its component, which it begins where there is none. Raises Refused."""
        return publisher.component(self.component, partial(tensors_in, self.directory, self.component))

    def open_in(self, publisher: RunPublisher, rules: ExportRules) -> NewWeights:
        """The weights in its directory. `rules`: for main."""
        own = publisher.component(self.component)
        return own.open_checkpoint(self.directory, rules if own is publisher else NO_RULES)

    def open(self) -> NewWeights:
        """Raises Refused for weights that changed since they were chosen, or cannot be read."""
        raise NotImplementedError

    def known(self) -> LastContent:
        """Content that was published before under this name or key."""
        return NO_CONTENT

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
    def resume(self, publisher: RunPublisher) -> None:
        """After a start, an error or a kill: notes what became of the job that had begun."""
        ...

    def next(self, publisher: RunPublisher) -> SourceJob | None:
        """What to publish now; raises RetryLater where that cannot be read now."""
        ...

    def upcoming(self, publisher: RunPublisher, before: Requested) -> list[str]:
        """Names of all that is published if nothing else comes, in order, after `before`."""
        ...


def read_back(publisher: RunPublisher, index: Index, source: str, component: str = MAIN) -> Publication:
    """The report of a version whose publication did not live to report."""
    channel = publisher.opened(component)
    found = channel.store.stat(index_key(index.version))
    size = 0 if found is None else found.size
    return report_of(index, channel.require_ours()[1].table, size).shown(source)
