"""SkyRL's delta files, a foreign channel without a pointer: a manifest for each version, written last.
docs/FORMAT.md, Foreign channels."""

from __future__ import annotations

from blake3 import blake3

from weightcast.shared.base.errors import DamagedFile, UnknownFormat
from weightcast.shared.channel.index import ForeignIndex, Payload, read_top
from weightcast.shared.channel.layout import MANIFEST, Pointer, delta_name, delta_version, read_pointer
from weightcast.shared.channel.store import Store
from weightcast.shared.files.paths import file_name
from weightcast.shared.files.safetensors import naturals
from weightcast.shared.files.strict_json import Members

_DIGITS = {"xxh3-128": 32, "sha256": 64}
"""of hex checksums"""
_DIMENSIONS = 32
_RESTART_NS = 10 * 10**9
"""least time from a trainer's last manifest to the next one's first; copies may be out of order by less"""


def foreign_pointer(store: Store) -> Pointer | None:
    """Of a channel that is not weightcast's: its `latest`, or SkyRL's newest version. As `read_pointer`."""
    return read_pointer(store) or newest(store)


def newest(store: Store) -> Pointer | None:
    """The highest version with a manifest; None in a store that cannot be listed. A restarted trainer counts
    from 1 and leaves the files of its predecessor: manifests older than version 1's do not count."""
    if store.is_static:
        return None
    first = store.stat(_key(1))
    began = 0 if first is None else first.written_ns - _RESTART_NS

    def counts(version: int) -> bool:
        found = store.stat(_key(version))
        return found is not None and found.written_ns >= began

    named = sorted(filter(None, map(delta_version, store.names())), reverse=True)
    version = next(filter(counts, named), 0)
    while counts(version + 1):  # a listing may lack it
        version += 1
    return Pointer(version, is_skyrl=True) if version else None


def _key(version: int) -> str:
    return f"{delta_name(version)}/{MANIFEST}"


def parse_manifest(data: bytes, *, what: str = MANIFEST) -> ForeignIndex:
    """Raises DamagedFile, and UnknownFormat for a checksum that SkyRL does not have."""
    top = read_top(data, what)
    version, files = top.integer("version", 1), set(top.texts("payload_files"))
    top.integer("base_version", version - 1, version - 1)
    payloads: dict[str, Payload] = {}
    for row in top.array("tensors"):
        tensor = Members(row, f"{what}: a tensor")
        name, payload = tensor.text("name"), _payload(tensor, what)
        if not name or name in payloads:
            raise DamagedFile(f"{what}: tensor {name!r} is listed twice or has no name")
        if payload.file not in files:
            raise DamagedFile(f"{what}: {payload.file} of tensor {name!r} is not in 'payload_files'")
        payloads[name] = payload
    weight_map = {name: payload.file for name, payload in payloads.items()}
    digest = blake3(data).hexdigest()
    return ForeignIndex(version, version - 1, "xor", "xxh3-128", weight_map, digest, payloads)


def _payload(tensor: Members, what: str) -> Payload:
    """Older manifests have `sha256` in place of `checksum`."""
    key = "checksum" if "checksum" in tensor else "sha256"
    form = "xxh3-128" if key == "checksum" else key
    if key == "checksum" and "checksum_algorithm" in tensor:
        form = tensor.text("checksum_algorithm")
    if form not in _DIGITS:
        raise UnknownFormat(f"{what}: unknown checksum {form[:40]!r}", remedy="upgrade weightcast here")
    shape = naturals(tensor.array("shape"), _DIMENSIONS)
    if shape is None:
        raise tensor.bad("shape", "a shape")
    return Payload(
        file_name(tensor.text("payload_file")),
        tensor.text("payload_key"),
        shape,
        tensor.integer("uncompressed_num_bytes"),
        form,
        tensor.hex(key, _DIGITS[form]),
    )
