"""Kernels that are kept as object code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

native = pytest.importorskip("weightcast.shared.kernels.compiler", exc_type=ImportError)

from weightcast.shared.kernels.loader import Code, Store  # noqa: E402


def mixed(words: Any, pair: Any, number: Any, down: Any) -> Any:
    total = native.U64(0)
    for row in range(words.shape[0]):
        for column in range(words.shape[1]):
            total += native.U64(words[row, column])
    return total + number, pair[0] - pair[1], down


def first(words: Any) -> None:
    words[0] = 7


def allocating(count: Any) -> Any:
    return np.zeros(count, np.uint64)[0]


def returning_much(number: Any) -> Any:
    return number, number, number, number


ARGUMENTS = (np.arange(12, dtype=np.uint16).reshape(3, 4), (-5, 1 << 40), np.uint64((1 << 64) - 66), True)
RESULTS = (0, -5 - (1 << 40), True)


def test_arguments_and_results_of_every_kind_pass(tmp_path: Path) -> None:
    run: Any = native.kernel(mixed, Store(tmp_path))
    assert run(*ARGUMENTS) == RESULTS
    (path,) = tmp_path.iterdir()
    kept = path.read_bytes()
    again: Any = native.kernel(mixed, Store(tmp_path))
    assert again(*ARGUMENTS) == RESULTS and again(*ARGUMENTS[:3], False)[2] is False
    assert path.read_bytes() == kept
    path.write_bytes(kept[:-1])
    once_more: Any = native.kernel(mixed, Store(tmp_path))
    assert once_more(*ARGUMENTS) == RESULTS
    assert Store(tmp_path).complete is False


def test_what_is_written_reaches_the_array_and_none_comes_back() -> None:
    words = np.zeros(3, np.uint32)
    write: Any = native.kernel(first, Store(None))
    assert write(words) is None
    assert words.tolist() == [7, 0, 0]


def test_arrays_with_gaps_are_refused() -> None:
    write: Any = native.kernel(first, Store(None))
    with pytest.raises(ValueError, match="contiguous"):
        write(np.zeros(8, np.uint32)[::2])


def test_a_kernel_that_allocates_is_refused() -> None:
    with pytest.raises(ImportError, match="NRT"):
        native.kernel(allocating, Store(None))(5)


def test_a_kernel_that_returns_more_than_there_is_room_for_is_refused() -> None:
    with pytest.raises(ImportError, match="too much"):
        native.kernel(returning_much, Store(None))(5)


def test_a_store_without_a_directory_keeps_nothing(tmp_path: Path) -> None:
    code = Code("name", "q", b"code")
    for store in (Store(None), Store(tmp_path / "not there")):
        store.put("kernel", code)
        assert store.get("kernel") is None
    Store(tmp_path).put("kernel", code)
    assert Store(tmp_path).get("kernel") == code and Store(tmp_path).get("other") is None
