"""A reader of `fast` and `small` channels, made from docs/FORMAT.md alone: no code of the package is shared.

What the page says about bytes is asserted here; deadlines, claims and disks are left out."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

U64 = NDArray[np.uint64]
Words = NDArray[Any]
CHUNK = 1 << 22
WORD = {
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
}
EXPONENT = {"F8_E4M3": (4, 3), "F8_E5M2": (5, 2), "F16": (5, 10), "BF16": (8, 7), "F32": (8, 23)}


def mix(words: U64, n: U64, b: bool = False) -> U64:
    if b:
        x = words + n * np.uint64(0xC2B2AE3D27D4EB4F)
        x = (x ^ x >> np.uint64(31)) * np.uint64(0xD6E8FEB86659FD93)
        x = (x ^ x >> np.uint64(33)) * np.uint64(0xA0761D6478BD642F)
        return x ^ x >> np.uint64(30)
    x = words ^ (n * np.uint64(0x9E3779B97F4A7C15))
    x = (x ^ x >> np.uint64(32)) * np.uint64(0xFF51AFD7ED558CCD)
    x = (x ^ x >> np.uint64(29)) * np.uint64(0xC4CEB9FE1A85EC53)
    return x ^ x >> np.uint64(32)


def lanes(data: bytes, only: NDArray[np.int64] | None = None) -> tuple[int, int]:
    """Sums over all 8-byte words of a tensor, or over those numbered in `only`."""
    words = np.frombuffer(data + b"\0" * (-len(data) % 8), "<u8")
    numbers = np.arange(len(words)) if only is None else only
    n = (numbers + 1).astype(np.uint64)
    chosen = words[numbers]
    return int(mix(chosen, n).sum(dtype=np.uint64)), int(mix(chosen, n, True).sum(dtype=np.uint64))


def added(one: tuple[int, int], two: tuple[int, int]) -> tuple[int, int]:
    return (one[0] + two[0]) % 2**64, (one[1] + two[1]) % 2**64


def text(sums: tuple[int, int]) -> str:
    return f"{sums[0]:016x}{sums[1]:016x}"


def root(table: list[list[Any]], tensors: dict[str, bytes], component: str) -> str:
    own = b"" if component == "main" else component.encode()
    digest = blake3(derive_key_context="weightcast root 1")
    for name, dtype, shape, _, _ in sorted(table, key=lambda row: row[0].encode()):
        n = np.array([2 * len(tensors[name]) + 1], np.uint64)
        a, b = (np.array([lane], np.uint64) for lane in lanes(tensors[name]))
        encoded = name.encode()
        digest.update(struct.pack("<I", len(own)) + own + struct.pack("<I", len(encoded)) + encoded)
        digest.update(bytes([len(dtype)]) + dtype.encode())
        digest.update(struct.pack(f"<B{len(shape)}Q", len(shape), *shape))
        digest.update(struct.pack("<QQ", int(mix(a, n)[0]), int(mix(b, n, True)[0])))
    return digest.hexdigest()


class Bits:
    def __init__(self, data: bytes) -> None:
        self.bits, self.at = "".join(f"{byte:08b}"[::-1] for byte in data), 0

    def number(self, count: int) -> int:
        self.at += count
        return int(self.bits[self.at - count : self.at][::-1] or "0", 2)

    def rice(self, k: int) -> int:
        zeros = self.bits.index("1", self.at) - self.at
        self.at += zeros + 1
        return self.number(32) if zeros == 23 else (zeros << k) | self.number(k)

    def used_up(self) -> None:
        assert len(self.bits) - self.at < 8 and "1" not in self.bits[self.at :]


def magnitudes(coding: int, k: int, k_end: int, data: bytes, count: int) -> list[int]:
    bits, found = Bits(data), []
    if coding == 1:
        found = [bits.rice(k) for _ in range(count)]
    elif coding == 2:
        found = [0] * bits.rice(k)
        while len(found) < count:
            found.append(bits.rice(k_end) + 1)
            found += [0] * bits.rice(k)
    assert len(found) == count and (coding == 0) == (count == 0)
    bits.used_up()
    return found


def exponents(dtype: str, old: Words) -> NDArray[np.int64]:
    bits, shift = EXPONENT[dtype]
    return (old.astype(np.int64) >> shift) & ((1 << bits) - 1)


def stepped(dtype: str, old: int, step: int, width: int) -> int:
    if dtype not in EXPONENT:
        return (old + step) % (1 << 8 * width)
    sign = 1 << 8 * width - 1
    ordinal = (-1 - (old ^ sign) if old & sign else old) + step
    assert -sign <= ordinal < sign
    return ordinal if ordinal >= 0 else (-1 - ordinal) ^ sign


def events(bits: Bits, k: int, count: int) -> list[int]:
    at, found = -1, []
    for _ in range(count):
        at += bits.rice(k) + 1
        found.append(at)
    bits.used_up()
    return found


def positions(mode: int, payload: bytes, dtype: str, old: Words, changed: int) -> tuple[list[int], int]:
    """Changed positions ascending, and where the signs begin."""
    contexts, gap_bytes = payload[1], struct.unpack_from("<I", payload, 4)[0]
    at = 8 + 8 * contexts
    if mode == 1:
        return events(Bits(payload[at : at + gap_bytes]), payload[0], changed), at + gap_bytes
    classes = [struct.unpack_from("<BBBxII", payload, at + 12 * n) for n in range(payload[0])]
    at += 12 * len(classes)
    lowest = np.array([row[0] for row in classes])
    of = np.maximum(np.searchsorted(lowest, exponents(dtype, old), "right") - 1, 0)
    found: list[int] = []
    for number, (_, k, inverted, codes, size) in enumerate(classes):
        members = np.flatnonzero(of == number)
        hit = np.zeros(len(members), bool)
        hit[events(Bits(payload[at : at + size]), k, codes)] = True
        found += members[hit != bool(inverted)].tolist()
        at += size
    assert len(found) == changed
    return sorted(found), at


def sparse(mode: int, payload: bytes, dtype: str, old: Words, changed: int) -> Words:
    width, contexts, first = old.itemsize, payload[1], payload[2]
    where, at = positions(mode, payload, dtype, old, changed)
    signs = Bits(payload[at : at + (changed + 7) // 8])
    at += (changed + 7) // 8
    context = np.zeros(changed, np.int64)
    if contexts == 16:
        context = np.clip(exponents(dtype, old)[where] - first, 0, 15)
    sizes: dict[int, Iterator[int]] = {}
    for number in range(contexts):
        coding, k, k_end, size = struct.unpack_from("<BBBxI", payload, 8 + 8 * number)
        count = int((context == number).sum())
        sizes[number] = iter(magnitudes(coding, k, k_end, payload[at : at + size], count))
        at += size
    assert payload[at:] == bytes(8)
    new = old.copy()
    for position, number in zip(where, context.tolist(), strict=True):
        size = next(sizes[number]) + 1
        new[position] = stepped(dtype, int(old[position]), -size if signs.number(1) else size, width)
    signs.used_up()
    return new


def content(payload: bytes, need: int) -> tuple[NDArray[np.uint8], bytes]:
    (length,) = struct.unpack_from("<I", payload)
    frame = payload[4 : 4 + length]
    assert zstandard.frame_content_size(frame) == need
    return np.frombuffer(zstandard.ZstdDecompressor().decompress(frame), np.uint8), payload[4 + length :]


def dense(mode: int, payload: bytes, dtype: str, old: Words) -> Words:
    if mode == 0:
        return np.frombuffer(payload, old.dtype)
    if mode == 4:
        planes, rest = content(payload, old.nbytes)
        assert not rest
        return planes.reshape(old.itemsize, -1).T.copy().reshape(-1).view(old.dtype)
    steps, rest = content(payload, len(old))
    new = old.copy()
    for at in np.flatnonzero((steps != 0) & (steps != 255)).tolist():
        size = (int(steps[at]) + 1) // 2
        new[at] = stepped(dtype, int(old[at]), -size if steps[at] % 2 else size, old.itemsize)
    new[steps == 255] = np.frombuffer(rest, old.dtype)
    return new


def decode(blob: bytes, dtype: str, old: Words) -> Words:
    mode, width, zero, count, changed, size, checksum = struct.unpack_from("<BBHIIIQ", blob)
    payload = blob[24:]
    assert (width, zero, count, size) == (old.itemsize, 0, len(old), len(payload))
    assert xxhash.xxh3_64_intdigest(blob[:16] + payload) == checksum
    assert mode in (0, 1, 2, 3, 4)
    new = sparse(mode, payload, dtype, old, changed) if mode in (1, 2) else dense(mode, payload, dtype, old)
    assert int((new != old).sum()) == changed
    return new


def spans_of(part: list[list[int]], table: list[list[Any]], widths: list[int]) -> dict[Any, Any]:
    """(dtype, number) of each chunk of a part: its spans (tensor, start, stop)."""
    segments = []
    for row in part:
        tensors = range(row[0], row[1] + 1) if len(row) == 2 else ()
        segments += [row] if len(row) == 3 else [[t, 0, table[t][3] // widths[t]] for t in tensors]
    chunks: dict[Any, Any] = {}
    for dtype, group in groupby(sorted(segments, key=lambda s: table[s[0]][1]), lambda s: table[s[0]][1]):
        number = filled = 0
        for tensor, start, stop in sorted(group, key=lambda s: s[2] - s[1] >= CHUNK):
            assert start % 64 == 0
            if stop - start >= CHUNK and filled:
                number, filled = number + 1, 0
            while start < stop:
                if filled == CHUNK:
                    number, filled = number + 1, 0
                take = min(stop - start, CHUNK - filled)
                chunks.setdefault((dtype, number), []).append((tensor, start, start + take))
                filled, start = min(CHUNK, -(-(filled + take) // 64) * 64), start + take
    return chunks


def apply(directory: Path, own: dict[str, Any], table: list[list[Any]], held: dict[str, bytes]) -> None:
    """Moves `held` to the version in `directory`, whose index has the member `own`."""
    files = [(directory / name).read_bytes() for name, _, _ in own["files"]]
    assert [[len(data), blake3(data).hexdigest()] for data in files] == [row[1:] for row in own["files"]]
    widths = [WORD.get(row[1], 1) for row in table]
    parts = own["parts"] if own["parts"] is not None else [[[0, len(table) - 1]]]
    grids = [spans_of(part, table, widths) for part in parts]
    old = {row[0]: np.frombuffer(held[row[0]], f"<u{widths[n]}") for n, row in enumerate(table)}
    new = {name: words.copy() for name, words in old.items()}
    for part, dtype, number, file, offset, length, changed, before, after in own["chunks"]:
        spans = [(table[t][0], slice(start, stop)) for t, start, stop in grids[part][dtype, number]]
        was = np.concatenate([old[name][place] for name, place in spans])
        now = decode(files[file][offset : offset + length], dtype, was)
        assert int((was != now).sum()) == changed
        sums = {False: (0, 0), True: (0, 0)}
        for name, place in spans:
            new[name][place], now = now[: place.stop - place.start], now[place.stop - place.start :]
            at = place.start + np.flatnonzero(new[name][place] != old[name][place])
            touched = np.unique(at * new[name].itemsize // 8)
            whole = old[name].copy()
            whole[place] = new[name][place]
            sums[False] = added(sums[False], lanes(old[name].tobytes(), touched))
            sums[True] = added(sums[True], lanes(whole.tobytes(), touched))
        assert (text(sums[False]), text(sums[True])) == (before, after)
    held.update({name: words.tobytes() for name, words in new.items()})
    changed_names = {name for name in new if new[name].tobytes() != old[name].tobytes()}
    assert changed_names == set(own["tensors"])
    for name, row in own["tensors"].items():
        assert text(lanes(held[name])) == row[0]


def checkpoint(directory: Path) -> dict[str, bytes]:
    found = {}
    for path in directory.glob("*.safetensors"):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            found[name] = data[start + begin : start + end]
    return found


def components(channel: Path) -> list[str]:
    """The active ones of a run."""
    listed = json.loads((channel / "components.json").read_bytes())
    assert (
        listed["format"] == 1
        and listed["run_id"] == json.loads((channel / "channel.json").read_bytes())["run_id"]
    )
    names = [each["name"] for each in listed["components"]]
    assert names == sorted(set(names))
    return [each["name"] for each in listed["components"] if each["state"] == "active"]


def read_component(channel: Path, name: str) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Its tensors, and the index of its newest version: main's version is in it."""
    nested = channel / "components" / name
    held = read(nested, None, name)
    newest = nested / f"weight_v{(nested / 'latest').read_text()}"
    own = json.loads((newest / "model.safetensors.index.json").read_bytes())["weightcast"]
    files = {path: (newest / "carried" / path).read_bytes() for path, _, _ in own["carried"]}
    assert all(blake3(files[path]).hexdigest() == digest for path, _, digest in own["carried"])
    json.loads(files["config.json" if name == "draft" else "adapter_config.json"])
    return held, own


def read(channel: Path, base: Path | None, component: str = "main") -> dict[str, bytes]:
    """The tensors of the version that the pointer names, from the base on through every delta. `base`: None
    for another component, which begins with zeros."""
    run = json.loads((channel / "channel.json").read_bytes())
    raw = (channel / "base.json").read_bytes()
    zero = json.loads(raw)
    assert run["format"] == zero["format"] == 1 and run["run_id"] == zero["run_id"]
    assert zero["component"] == component, f"component {zero['component']}"
    table = zero["tensors"]
    found = {row[0]: bytes(row[3]) for row in table} if base is None else checkpoint(base)
    held = {row[0]: found[run["aliases"].get(row[0], row[0])] for row in table}
    assert all(text(lanes(held[row[0]])) == row[4] and len(held[row[0]]) == row[3] for row in table)
    assert root(table, held, component) == zero["root"]
    parent, base_root = blake3(raw).hexdigest(), zero["root"]
    for version in range(1, int((channel / "latest").read_text()) + 1):
        directory = channel / f"weight_v{version:06d}"
        raw = (directory / "model.safetensors.index.json").read_bytes()
        index = json.loads(raw)
        own = index["weightcast"]
        assert (own["kind"], own["version"], own["base_version"]) == ("delta", version, version - 1)
        assert own["component"] == component and ("main_root" in own) == (component != "main")
        assert (own["parent"], own["base_root"], own["run_id"]) == (parent, base_root, run["run_id"])
        assert index["metadata"]["delta_encoding"] == "step" and set(index["weight_map"]) == set(
            own["tensors"]
        )
        apply(directory, own, table, held)
        assert root(table, held, component) == own["root"]
        parent, base_root = blake3(raw).hexdigest(), own["root"]
    return held
