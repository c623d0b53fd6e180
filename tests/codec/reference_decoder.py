"""Decodes a chunk's blob from the format's description alone: plain Python, slow, and shares no code with the
package. Damage is not looked for."""

from __future__ import annotations

import struct

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
    mode, width, _, words, changed, size, _ = struct.unpack_from("<BBHIIIQ", blob)
    payload = blob[24 : 24 + size]
    if mode == 0:
        new = [int.from_bytes(payload[width * i : width * i + width], "little") for i in range(words)]
        return {i: word for i, word in enumerate(new) if word != old[i]}
    k_gaps, contexts, first, _, gap_bytes = struct.unpack_from("<BBBBI", payload)
    at = 8 + 8 * contexts
    gaps, position, positions = Bits(payload[at : at + gap_bytes]), -1, []
    for _ in range(changed):
        position += gaps.rice(k_gaps) + 1
        positions.append(position)
    at += gap_bytes
    signs = Bits(payload[at : at + (changed + 7) // 8])
    at += (changed + 7) // 8
    context_of = [0] * changed
    if contexts > 1:
        _, shift, mask = FLOATS[dtype]
        exponents = [old[i] >> shift & mask for i in positions]
        context_of = [min(max(exponent - first, 0), contexts - 1) for exponent in exponents]
    streams = []
    for context in range(contexts):
        coding, k, k_rest, _, length = struct.unpack_from("<BBBBI", payload, 8 + 8 * context)
        count = context_of.count(context)
        streams.append(iter(magnitudes(coding, k, k_rest, payload[at : at + length], count)))
        at += length
    steps = [(next(streams[c]) + 1) * (-1 if signs.number(1) else 1) for c in context_of]
    return {i: moved(dtype, old[i], step) for i, step in zip(positions, steps, strict=True)}
