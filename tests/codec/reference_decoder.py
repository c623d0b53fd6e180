"""Decodes a chunk's blob from the format's description alone: plain Python, slow, and shares no code with the
package. Damage is not looked for."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import zstandard

FLOATS = {  # dtype: (bits of the word, shift and mask of the exponent)
    "F8_E4M3": (8, 3, 0xF),
    "F8_E5M2": (8, 2, 0x1F),
    "F16": (16, 10, 0x1F),
    "BF16": (16, 7, 0xFF),
    "F32": (32, 23, 0xFF),
}
INTEGERS = {"U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "F64": 8, "I64": 8}


class Bits:
    def __init__(self, data: bytes) -> None:
        self.bits = "".join(f"{byte:08b}"[::-1] for byte in data)
        self.at = 0

    def number(self, count: int) -> int:
        piece = self.bits[self.at : self.at + count]
        self.at += count
        return int(piece[::-1] or "0", 2)

    def rice(self, k: int) -> int:
        zeros = 0
        while self.number(1) == 0:
            zeros += 1
        return self.number(32) if zeros == 23 else (zeros << k) + self.number(k)


def magnitudes(coding: int, k: int, k_rest: int, data: bytes, count: int) -> list[int]:
    bits, values = Bits(data), []
    if coding == 1:
        return [bits.rice(k) for _ in range(count)]
    while coding == 2:
        values += [0] * bits.rice(k)
        if len(values) == count:
            break
        values.append(bits.rice(k_rest) + 1)
    return values


def moved(dtype: str, old: int, step: int) -> int:
    if dtype in INTEGERS:
        return (old + step) % (1 << INTEGERS[dtype])
    sign = 1 << (FLOATS[dtype][0] - 1)
    ordinal = (-1 - (old ^ sign) if old & sign else old) + step
    return ordinal if ordinal >= 0 else (-1 - ordinal) | sign


def decode(blob: bytes, dtype: str, old: list[int]) -> dict[int, int]:
    """`old`: the chunk's words without padding. Position without padding -> new word."""
    mode, width, _, _, changed, size, _ = struct.unpack_from("<BBHIIIQ", blob)
    payload = blob[24 : 24 + size]
    if mode in (1, 2):
        return dict(changed_words(payload, mode, dtype, old, changed))
    new = {0: raw, 3: step_bytes, 4: planes}[mode](payload, width, dtype, old)
    return {i: word for i, word in enumerate(new) if word != old[i]}


def raw(payload: bytes, width: int, dtype: str, old: list[int]) -> list[int]:
    return [int.from_bytes(payload[at : at + width], "little") for at in range(0, len(payload), width)]


def framed(payload: bytes) -> tuple[bytes, bytes]:
    (size,) = struct.unpack_from("<I", payload)
    return zstandard.ZstdDecompressor().decompress(payload[4 : 4 + size]), payload[4 + size :]


def step_bytes(payload: bytes, width: int, dtype: str, old: list[int]) -> list[int]:
    steps, rest = framed(payload)
    longer = iter(raw(rest, width, dtype, old))
    lengths = [-(byte + 1) // 2 if byte % 2 else byte // 2 for byte in steps]
    return [
        next(longer) if byte == 255 else moved(dtype, word, length)
        for byte, word, length in zip(steps, old, lengths, strict=True)
    ]


def planes(payload: bytes, width: int, dtype: str, old: list[int]) -> list[int]:
    content, rest = framed(payload)
    assert rest == b""
    count = len(content) // width
    return [sum(content[p * count + i] << 8 * p for p in range(width)) for i in range(count)]


def changed_words(
    payload: bytes, mode: int, dtype: str, old: list[int], changed: int
) -> Iterator[tuple[int, int]]:
    _, contexts, first, _, _ = struct.unpack_from("<BBBBI", payload)
    positions, at = (gaps if mode == 1 else classes)(payload, dtype, old, changed)
    signs = Bits(payload[at : at + (changed + 7) // 8])
    at += (changed + 7) // 8
    context_of = [0] * changed
    if contexts > 1:
        exponents = [exponent(dtype, old[i]) for i in positions]
        context_of = [min(max(one - first, 0), contexts - 1) for one in exponents]
    streams = []
    for context in range(contexts):
        coding, k, k_rest, _, length = struct.unpack_from("<BBBBI", payload, 8 + 8 * context)
        count = context_of.count(context)
        streams.append(iter(magnitudes(coding, k, k_rest, payload[at : at + length], count)))
        at += length
    for i, context in zip(positions, context_of, strict=True):
        yield i, moved(dtype, old[i], (next(streams[context]) + 1) * (-1 if signs.number(1) else 1))


def exponent(dtype: str, word: int) -> int:
    _, shift, mask = FLOATS[dtype]
    return word >> shift & mask


def gaps(payload: bytes, dtype: str, old: list[int], changed: int) -> tuple[list[int], int]:
    k, contexts, _, _, size = struct.unpack_from("<BBBBI", payload)
    at = 8 + 8 * contexts
    bits, position, positions = Bits(payload[at : at + size]), -1, []
    for _ in range(changed):
        position += bits.rice(k) + 1
        positions.append(position)
    return positions, at + size


def classes(payload: bytes, dtype: str, old: list[int], changed: int) -> tuple[list[int], int]:
    count, contexts, _, _, _ = struct.unpack_from("<BBBBI", payload)
    heads = [struct.unpack_from("<BBBBII", payload, 8 + 8 * contexts + 12 * c) for c in range(count)]
    at = 8 + 8 * contexts + 12 * count
    class_of = [sum(exponent(dtype, word) >= head[0] for head in heads[1:]) for word in old]
    found = []
    for number, (_, k, inverted, _, codes, size) in enumerate(heads):
        members = [i for i, one in enumerate(class_of) if one == number]
        bits, rank, events = Bits(payload[at : at + size]), -1, set()
        for _ in range(codes):
            rank += bits.rice(k) + 1
            events.add(members[rank])
        found += [i for i in members if (i in events) != bool(inverted)]
        at += size
    assert len(found) == changed
    return sorted(found), at
