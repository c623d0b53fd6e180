"""The plugin's sums are those of the format: held to the golden vectors and to the project's own."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plugin_models import ToyHost
from torch import nn
from weightcast_engine.update.checksums import PIECE, Lanes, sums
from weightcast_engine.update.elements import INTEGERS, Form
from weightcast_engine.update.live_elements import resident
from weightcast_engine.update.places import Block, Piece, View, blocks_of, disjoint, on_whole_words, tile

from weightcast.shared.digest.checksums import hash_bytes

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "channels"


def lanes_of(data: bytes) -> Lanes:
    words = np.frombuffer(data + bytes(-len(data) % 8), "<i8").copy()
    return sums(torch.from_numpy(words), torch.arange(len(words)))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("803f80bf0000c07f0080", "c49c7eb71d98f1b6b14d884bc0a847e4"),
        ("00002040", "866724d19bb729f62c4e7a3cefd56111"),
        ("", "0" * 32),
    ],
)
def test_the_examples_of_the_format(data: str, expected: str) -> None:
    assert lanes_of(bytes.fromhex(data)).hex() == expected
    assert Lanes.from_hex(expected).hex() == expected


@given(st.binary(max_size=200))
def test_the_sums_are_the_projects(data: bytes) -> None:
    assert lanes_of(data).hex() == hash_bytes(np.frombuffer(data, np.uint8)).hex()


def test_the_sums_of_more_than_one_piece_add_up() -> None:
    data = np.random.default_rng(5).bytes(8 * PIECE + 24)
    assert lanes_of(data).hex() == hash_bytes(np.frombuffer(data, np.uint8)).hex()


class Held(nn.Module):
    """A model that is its checkpoint."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._names = {name.replace(".", "_"): name for name in tensors}
        for plain, name in self._names.items():
            self.register_buffer(plain, torch.zeros_like(tensors[name]))

    def load_weights(self, weights) -> None:  # type: ignore[no-untyped-def]
        for name, tensor in weights:
            self.get_buffer(name.replace(".", "_")).copy_(tensor)


def test_the_digest_of_a_golden_checkpoint_is_that_of_its_base(tmp_path: Path) -> None:
    """All dtypes, empty, odd and without dimensions: what the channel says of version 0."""
    from safetensors.torch import load_file

    tensors = load_file(GOLDEN / "base" / "model.safetensors")
    rows = json.loads((GOLDEN / "fast" / "base.json").read_text())["tensors"]
    told = ToyHost([Held(tensors)], tensors, tmp_path).run("digest", None, 0, 1000)
    assert told["refused"] == {} and told["lanes"] == {name: lanes for name, *_, lanes in rows}


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 6),
    step=st.integers(0, 3),
    width=st.sampled_from([1, 2, 4, 8]),
)
def test_sums_of_column_blocks(rows: int, columns: int, step: int, width: int) -> None:
    """Of a slice of whole words of every row: the same words under the same numbers."""
    per_word = 8 // width
    run, wide = columns * per_word, (columns + step) * per_word
    whole = np.arange(rows * wide * width, dtype=np.uint8).reshape(rows, wide * width)
    mine = np.ascontiguousarray(whole[:, -run * width :])
    flat = torch.from_numpy(mine.reshape(-1)).view(INTEGERS[width])
    block = Block((wide - run), 0, rows, wide, run, run)
    dtype = {1: "U8", 2: "I16", 4: "I32", 8: "I64"}[width]
    found = [lanes for _, lanes in resident(Piece(flat, block), Form(dtype, (rows, wide)))]
    total = Lanes()
    for lanes in found:
        total = total.plus(lanes)
    others = whole.copy()
    others[:, -run * width :] = 0
    both, rest, none = (hash_bytes(data.reshape(-1)) for data in (whole, others, np.zeros_like(whole)))
    zeros = hash_of_zeros(rows, wide // per_word, (wide - run) // per_word)
    assert Lanes(both.a, both.b).minus(Lanes(rest.a, rest.b)).plus(zeros) == total
    assert none is not None


def hash_of_zeros(rows: int, words: int, first: int) -> Lanes:
    """Zero words have sums of their own: those that the slice's places would have."""
    numbers = [row * words + column for row in range(rows) for column in range(first, words)]
    return sums(torch.zeros(len(numbers), dtype=torch.int64), torch.tensor(numbers, dtype=torch.int64))


@given(st.data())
def test_blocks_are_the_elements_of_the_copy(data: st.DataObject) -> None:
    """Narrow views of a tensor, put into narrow views of another, whose dimensions may lie in another order:
    each element lies where the blocks say."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    source = torch.arange(int(np.prod(shape))).reshape(shape)
    live = torch.full([length + data.draw(st.integers(0, 2)) for length in shape], -1)
    near, far = source, live
    if data.draw(st.booleans()):
        order = data.draw(st.permutations(range(len(shape))))
        live = live.permute(order).contiguous()
        far = live.permute([order.index(dim) for dim in range(len(shape))])
    for dim, length in enumerate(shape):
        start = data.draw(st.integers(0, length - 1) | st.just(0))
        count = data.draw(st.integers(1, length - start) | st.just(length - start))
        near = near.narrow(dim, start, count)
        far = far.narrow(dim, data.draw(st.integers(0, far.shape[dim] - count)), count)
    far.copy_(near)
    try:
        blocks = blocks_of(*(View(t.storage_offset(), tuple(t.shape), t.stride()) for t in (near, far)))
    except ValueError:
        return
    flat, seen = live.view(-1), 0
    for block in blocks:
        for row in range(block.rows):
            for at in range(block.run):
                number = block.source + row * block.source_step + at
                assert flat[block.target + row * block.target_step + at * block.stride] == number
                seen += 1
    assert seen == near.numel()


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)), max_size=4
    )
)
def test_blocks_are_said_apart_or_to_tile_only_when_they_are(drawn: list[tuple[int, int, int, int]]) -> None:
    keys = [(source, rows, max(step, run), run) for source, rows, step, run in drawn]
    sets = [{s + r * step + at for r in range(rows) for at in range(run)} for s, rows, step, run in keys]
    apart = sum(map(len, sets)) == len(set().union(*sets))
    assert apart or not disjoint(keys)
    for elements in (0, 12, 24):
        if tile(keys, elements):
            assert set().union(*sets) == set(range(elements)) and apart


@pytest.mark.parametrize(
    ("keys", "elements"),
    [([(0, 1, 1, 24)], 24), ([(0, 1, 1, 8), (8, 1, 1, 16)], 24), ([(0, 3, 8, 4), (4, 3, 8, 4)], 24), ([], 0)],
)
def test_what_ranks_hold_tiles_a_tensor(keys: list[tuple[int, int, int, int]], elements: int) -> None:
    assert tile(keys, elements)


def test_a_last_word_may_be_short_and_no_other() -> None:
    assert on_whole_words((0, 1, 15, 15), 4, 15) and not on_whole_words((0, 1, 15, 15), 4, 30)
    assert on_whole_words((8, 3, 16, 8), 4, 48) and not on_whole_words((6, 3, 16, 8), 4, 48)


def test_the_digest_covers_every_byte(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(35, dtype=torch.uint8).reshape(5, 7)}
    host = ToyHost([Held(tensors)], tensors, tmp_path)
    seen = {host.run("digest", ["w"], 0, 1)["lanes"]["w"]}
    for at in range(35):
        host.engines[0].model.w.view(-1)[at] ^= 16
        seen.add(host.run("digest", ["w"], 0, 1)["lanes"]["w"])
    assert len(seen) == 36
    assert hashlib.sha256(b"").hexdigest()
