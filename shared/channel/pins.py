"""What operators write into a channel: versions that are never pruned (`keep/<version>`), tags
(`tags/<name>`), orders to its owner (`orders/rollback.json`, `orders/repair`, `orders/anchor`). The owner
writes what waits for their end (`orders/waiting`), and why it refused one (`orders/refused`).
docs/FORMAT.md."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from annotated_types import MaxLen

from weightcast.shared.base.errors import DamagedFile, Refused, age
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.layout import digits
from weightcast.shared.channel.run_files import FORMAT, check_format
from weightcast.shared.channel.store import AlreadyExists, Store, read_if_there
from weightcast.shared.files.paths import file_name, is_plain
from weightcast.shared.files.strict_json import Hex, Members, parse_object, write_object

_NUMBER = re.compile(r"\d{6,15}", re.ASCII)
_TAGGED = re.compile(rb"\d{6,15}\s*")
_TAG_LIMIT = 64
_ORDER_LIMIT = 64 << 10
_MOST_WAITING = 8
"""names; a path has up to 4096 bytes"""
_KEEP, _TAGS = "keep", "tags"
_ROLLBACK, _REPAIR, _ANCHOR = "orders/rollback.json", "orders/repair", "orders/anchor"
_WAITING, _REFUSED = "orders/waiting", "orders/refused"
END_HOLD = "`weightcast channel resume` withdraws the order and ends the hold"


def keep(store: Store, version: int) -> None:
    store.replace(_kept_key(version), digits(version).encode())


def unkeep(store: Store, version: int) -> bool:
    """False when it was not kept."""
    return store.delete(_kept_key(version))


def kept(store: Store) -> list[int]:
    return sorted(int(name) for name in store.names(_KEEP) if _NUMBER.fullmatch(name))


def set_tag(store: Store, name: str, version: int) -> None:
    """Raises Refused for a name that cannot be a target."""
    store.replace(_tag_key(name), digits(version).encode())


def delete_tag(store: Store, name: str) -> bool:
    """False when there is none."""
    return store.delete(_tag_key(name))


def tags(store: Store) -> dict[str, int]:
    """Raises DamagedFile for a tag without a version: what it keeps is unknown then."""
    return {name: tagged(store, name) for name in sorted(store.names(_TAGS))}


def tagged(store: Store, name: str) -> int:
    """The version that `tags/<name>` names. Raises NotFound and DamagedFile."""
    key = f"{_TAGS}/{file_name(name)}"
    data = store.read(key, _TAG_LIMIT)
    if not _TAGGED.fullmatch(data):
        raise DamagedFile(
            f"{store.place(key)} does not hold a version of six digits", remedy="set the tag again"
        )
    return int(data)


def _kept_key(version: int) -> str:
    return f"{_KEEP}/{digits(version)}"


def _tag_key(name: str) -> str:
    refusal = Refused(
        f"{name[:80]!r} cannot be a tag", remedy="give a name without /, not a number and not latest"
    )
    try:
        plain = file_name(name)
    except DamagedFile:
        raise refusal from None
    if plain.startswith(".") or plain == "latest" or plain.isdecimal():
        raise refusal
    return f"{_TAGS}/{plain}"


@dataclass(frozen=True)
class Rollback:
    """An order to publish the bytes of version `to` (`root`) again, and nothing else until it is withdrawn.
    `ordered`: unix time on the clock of who ordered it."""

    run_id: Annotated[str, MaxLen(128)]
    to: int
    root: Annotated[str, Hex(64)]
    ordered: float

    def became(self, version: int | None) -> RollbackState:
        return RollbackState(self.to, self.ordered, version)


def order_rollback(store: Store, order: Rollback) -> None:
    """Raises Refused while another order holds."""
    try:
        store.create(_ROLLBACK, write_object({"format": FORMAT, **asdict(order)}))
    except AlreadyExists as error:
        raise Refused("a rollback is ordered already", remedy=END_HOLD) from error


def read_rollback(store: Store) -> Rollback | None:
    """None when publishing is not held. Raises DamagedFile and UnknownFormat."""
    data, place = read_if_there(store, _ROLLBACK, _ORDER_LIMIT), store.place(_ROLLBACK)
    if data is None:
        return None
    members = Members(parse_object(data, place), place)
    check_format(members, place)
    return members.record(Rollback)


@dataclass(frozen=True)
class RollbackState:
    """What became of an order; `to` and `ordered` as in `Rollback`."""

    to: int
    ordered: float
    done_as: int | None
    """the newest version, which has the weights; None: the order is not carried out"""

    @property
    def text(self) -> str:
        if self.done_as is None:
            return f"rollback to version {self.to} is not published yet"
        return f"rolled back to version {self.to} (version {self.done_as} has its weights)"

    @property
    def dated(self) -> str:
        return f"{self.text}, ordered {age(max(0.0, time.time() - self.ordered))} ago"


def rollback_state(channel: Channel) -> RollbackState | None:
    """None when publishing is not held. Raises as `read_rollback`."""
    order = None if channel.foreign else read_rollback(channel.store)
    if order is None:
        return None
    at = channel.pointed()
    index = channel.own_index(at) if at else None
    return order.became(at if index and index.root == order.root else None)


def resume(store: Store) -> bool:
    """Withdraws the order. False when there was none."""
    withdrawn = store.delete(_ROLLBACK)
    store.delete(_WAITING)
    return withdrawn


def note_waiting(store: Store, names: Iterable[str]) -> None:
    """By the owner while an order holds publishing: what is published once it is withdrawn."""
    lines = [line for line in names if is_plain(line)]
    if len(lines) > _MOST_WAITING:
        lines[_MOST_WAITING:] = [f"and {len(lines) - _MOST_WAITING} more"]
    store.replace(_WAITING, "\n".join(lines).encode())


def waiting(store: Store) -> list[str]:
    data = read_if_there(store, _WAITING, _ORDER_LIMIT) or b""
    return data.decode(errors="replace").split("\n") if data else []


Work = Literal["repair", "anchor"]
"""that an operator orders of the owner"""
_WORK: dict[Work, str] = {"repair": _REPAIR, "anchor": _ANCHOR}


def order(store: Store, work: Work) -> None:
    """An earlier order stays."""
    store.delete(_REFUSED)
    with contextlib.suppress(AlreadyExists):
        store.create(_WORK[work], b"")


def is_ordered(store: Store, work: Work) -> bool:
    return store.stat(_WORK[work]) is not None


def end_order(store: Store, work: Work) -> None:
    store.delete(_WORK[work])


def refuse_order(store: Store, work: Work, error: Refused) -> None:
    """By the owner: the order ends, and who gave it reads why."""
    store.replace(_REFUSED, f"{error.message}\n{error.remedy}".encode())
    end_order(store, work)


def refusal(store: Store) -> Refused | None:
    """Of the last order."""
    data = read_if_there(store, _REFUSED, _ORDER_LIMIT)
    if data is None:
        return None
    message, _, remedy = data.decode(errors="replace").partition("\n")
    return Refused(message, remedy=remedy)
