"""The first calls of somebody who stays in Python: paths as text, a handle where a version is expected."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from core_cases import tensor, write_checkpoint

from weightcast.publisher import init_channel
from weightcast.publisher.api import Publisher
from weightcast.shared.base.errors import NotInTime, Refused


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "base", {"w": tensor(np.random.default_rng(0), "F32", 9, 5)})
    return "base"


def test_every_path_may_be_text(base: str) -> None:
    made = init_channel("channel", base)
    assert init_channel(Path("channel"), Path(base)) == made
    with Publisher.open("channel", local="local", base=base) as publisher:
        write_checkpoint(Path("export"), {"w": tensor(np.random.default_rng(1), "F32", 9, 5)})
        assert publisher.publish_checkpoint("export").version == 1


def test_a_handle_stands_for_its_version(base: str) -> None:
    init_channel("channel", base)
    with Publisher.open("channel", local="local", base=base) as publisher:
        handle = publisher.submit({"w": np.ones((9, 5), np.float32)})
        handle.result()  # a loaded machine takes longer than the timeout below
        with pytest.raises(NotInTime, match="version 1 or later"):
            publisher.wait(handle, timeout=0.1)
        with pytest.raises(Refused, match="not str"):
            publisher.wait("1", timeout=0.1)  # type: ignore[arg-type]


def test_a_prompt_shows_what_trainers_call(base: str) -> None:
    init_channel("channel", base)
    with Publisher.open("channel", local="local", base=base) as publisher:
        assert {"publish", "submit", "wait"} <= set(dir(publisher)) and "make_due" not in dir(publisher)
        assert all(hasattr(publisher, name) for name in dir(publisher))
        new = {"w": np.random.default_rng(1).random((9, 5), np.float32)}
        report = publisher.publish(new)
        assert f"{publisher.run_id} in " in repr(publisher) and "version 1" in repr(publisher)
        assert report.ratio == report.full_bytes / report.delta_bytes
