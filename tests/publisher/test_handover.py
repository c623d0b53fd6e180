"""Handing weights over in shared memory: what arrives, what gives way, what a kill leaves on each side."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import CODE, CONFIG, MATH, adapter, bytes_of, follow
from core_cases import Model, all_changed, ended, every_dtype, kill, start
from daemonkit import Daemon, Places
from publisher_cases import Place, as_numpy, make_place, numpy_model
from waiting import wait_until

from weightcast.publisher.daemon.sources.handed import HandedWeights, HandOverJob, HandOverSource
from weightcast.publisher.trainer.handover import Export, HandOver
from weightcast.shared.base.errors import Refused, RetryLater
from weightcast.shared.daemon.loop import failure_of

HERE = Path(__file__).parent


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(12)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path, numpy_model(np.random.default_rng(3)))


@pytest.fixture
def export(tmp_path: Path) -> Path:
    return tmp_path / "export"


def arrays(model: Model) -> dict[str, np.ndarray[Any, Any]]:
    return {name: as_numpy(one) for name, one in model.items()}


def publish_newest(place: Place, handed_over: HandOverSource) -> int | None:
    """One step of the daemon's. None: there is nothing new."""
    handed = handed_over.newest()
    if handed is None:
        return None
    with place.publisher() as publisher:
        job = HandOverJob(handed_over, publisher, handed)
        job.begin(publisher.version)
        try:
            report = publisher.publish_weights(job.open, step=job.step)
        except Refused as error:
            job.done(failure_of(error))
            raise
        job.done(report)
    return report.version


def test_what_is_put_arrives(place: Place, export: Path, rng: np.random.Generator) -> None:
    handed_over, model = HandOverSource(export, place.root / "memory"), place.model
    assert handed_over.newest() is None
    with HandOver(export) as hand_over:
        for version in (1, 2, 3):
            model = all_changed(model, rng)
            handed = hand_over.put(arrays(model).items(), step=10 * version)
            assert (handed.sequence, handed.step) == (version, 10 * version)
            assert publish_newest(place, handed_over) == version
            assert handed_over.newest() is None
            place.arrives(model, version)
    assert sorted(path.name for path in export.iterdir() if path.is_dir()) == ["a", "b"]


def test_what_was_put_before_is_not_published_after_it(
    place: Place, export: Path, rng: np.random.Generator
) -> None:
    """Not when the newest slot is lost either: the fleet would go back."""
    handed_over = HandOverSource(export, place.root / "memory")
    with HandOver(export) as hand_over:
        hand_over.put(arrays(place.model).items(), step=1)
        newest = hand_over.put(arrays(all_changed(place.model, rng)).items(), step=2)
    assert publish_newest(place, handed_over) == 1
    Export(export).withdraw(newest.slot)
    assert publish_newest(place, handed_over) is None
    assert publish_newest(place, HandOverSource(export, place.root / "memory")) is None


def test_torch_tensors_of_every_dtype(tmp_path: Path, export: Path, rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    kinds = {"BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64"}
    kinds |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F16": "float16", "BF16": "bfloat16"}
    kinds |= {"F32": "float32", "F64": "float64"}
    place = make_place(tmp_path)
    model = all_changed(every_dtype(np.random.default_rng(3)) | place.model, rng)

    def as_torch(one: Any) -> Any:
        kind = getattr(torch, kinds[one.dtype])
        if not len(one.data):
            return torch.empty(one.shape, dtype=kind)
        flat = torch.from_numpy(one.data.copy()).view(kind).reshape(one.shape)
        return flat.t().contiguous().t() if flat.dim() == 2 else flat

    with HandOver(export) as hand_over:
        hand_over.put({name: as_torch(one) for name, one in model.items()})
    assert publish_newest(place, HandOverSource(export, place.root / "memory")) == 1
    place.arrives(model, 1)


def test_the_newest_wins_and_what_is_read_stands_still(
    place: Place, export: Path, rng: np.random.Generator
) -> None:
    handed_over = HandOverSource(export, place.root / "memory")
    models = [all_changed(place.model, rng) for _ in range(4)]
    with HandOver(export) as hand_over, place.publisher() as publisher:
        first = hand_over.put(arrays(models[0]))
        weights = HandedWeights(handed_over.export, first)
        others = [hand_over.put(arrays(model)) for model in models[1:]]
        assert {handed.slot for handed in others} == {"b"} and first.slot == "a"
        assert publisher.publish_weights(lambda: weights).version == 1
        place.arrives(models[0], 1)
        with pytest.raises(RetryLater, match="newer weights"):
            HandedWeights(handed_over.export, others[0])
    assert handed_over.newest() == others[2]
    assert publish_newest(place, handed_over) == 2
    place.arrives(models[3], 2)


def test_both_slots_are_read(export: Path) -> None:
    with HandOver(export) as hand_over:
        for _ in range(2):
            hand_over.put({"a": np.ones(3, np.float32)})
        held = [Export(export).lock(slot) for slot in "ab"]
        for lock in held:
            lock.acquire(shared=True)
        with pytest.raises(RetryLater, match="both slots"):
            hand_over.put({"a": np.ones(3, np.float32)}, timeout=0.1)
        for lock in held:
            lock.release()
        assert hand_over.put({"a": np.ones(3, np.float32)}).sequence == 3


def test_tensors_that_change_their_form(export: Path) -> None:
    with HandOver(export) as hand_over:
        for size in (3, 3, 3, 9, 9, 9):
            handed = hand_over.put({"a": np.arange(size, dtype=np.int32)})
            data = Export(export).weights(handed.slot).read_bytes()
            assert len(data) == handed.nbytes and data.endswith(np.arange(size, dtype=np.int32).tobytes())


def test_one_writer_and_a_sequence_that_goes_on(export: Path) -> None:
    one = {"a": np.zeros(5, np.float32)}
    with HandOver(export) as hand_over:
        assert hand_over.put(one).sequence == 1
        with pytest.raises(RetryLater, match="held by pid"):
            HandOver(export)
    with HandOver(export) as hand_over:
        assert hand_over.put(one).sequence == 2


def test_a_fork_of_the_trainer_keeps_no_writer_out(export: Path) -> None:
    hand_over = HandOver(export)
    child = os.fork()
    while child == 0:
        signal.pause()
    try:
        hand_over.close()
        HandOver(export).close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_what_is_refused(tmp_path: Path, export: Path) -> None:
    with HandOver(export) as hand_over:
        array = np.zeros(5, np.float32)
        with pytest.raises(Refused, match="a was given twice"):
            hand_over.put([("a", array), ("a", array)])
        with pytest.raises(Refused, match="expected a tensor"):
            hand_over.put({"a": [1, 2]})
        with pytest.raises(Refused, match="not a step number"):
            hand_over.put({"a": array}, step=True)
        assert Export(export).newest() is None
    link = tmp_path / "link"
    link.symlink_to(export)
    with pytest.raises(Refused, match="symbolic link"):
        HandOver(link)
    (export / "b").symlink_to(tmp_path)
    with pytest.raises(Refused, match="symbolic link"):
        HandOverSource(export, tmp_path / "memory").newest()


@pytest.mark.parametrize("junk", [b"", b"{", b'{"format": 1}', b'{"format": 9, "slot": "a"}', b"x" * 70000])
def test_a_record_that_is_none(place: Place, export: Path, junk: bytes) -> None:
    with HandOver(export) as hand_over:
        handed = hand_over.put(arrays(place.model))
        other = "b" if handed.slot == "a" else "a"
        Export(export).record(other).write_bytes(junk)
        assert HandOverSource(export, place.root / "memory").newest() == handed
        hand_over.put(arrays(place.model))
        assert hand_over.put(arrays(place.model)).sequence == 3


def test_published_and_not_noted(place: Place, export: Path) -> None:
    with HandOver(export) as hand_over:
        handed = hand_over.put(arrays(place.model))
    for published in (False, True):
        handed_over = HandOverSource(export, place.root / f"memory-{published}")
        with place.publisher() as publisher:
            request = HandOverJob(handed_over, publisher, handed).begin(0)
            # a version of somebody else's says nothing
            publisher.publish_checkpoint(place.new(place.model))
            if published:
                publisher.publish_weights(partial(HandedWeights, handed_over.export, handed), request=request)
            handed_over = HandOverSource(export, place.root / f"memory-{published}")
            handed_over.resume(publisher)
        assert (handed_over.newest() == handed) is not published


def test_light_to_import() -> None:
    code = (
        "import sys, weightcast.publisher.trainer.handover;"
        "heavy = {'numba', 'torch', 'fastapi', 'pydantic', 'blake3', 'zstandard'};"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# killed: real processes


@pytest.mark.parametrize(
    "moment", ["copying", "file.begun", "file.synced", "file.renamed", "directory.synced"]
)
def test_a_trainer_that_is_killed(place: Place, export: Path, moment: str) -> None:
    first = all_changed(place.model, np.random.default_rng(1))
    second = all_changed(first, np.random.default_rng(2))
    child = start(HERE / "handing_child.py", export, moment)
    out, error = child.communicate(timeout=120)
    assert child.returncode < 0 and "put" not in out, error
    whole = moment in ("file.renamed", "directory.synced")
    handed_over = HandOverSource(export, place.root / "memory")
    assert publish_newest(place, handed_over) == 1
    place.arrives(second if whole else first, 1)
    with HandOver(export) as hand_over:
        assert hand_over.put(arrays(second), step=3).sequence == (3 if whole else 2)
    assert publish_newest(place, handed_over) == 2
    place.arrives(second, 2)


MOMENTS = ["publish.recovered:1", "index.allowed:1", "pointer.moved:1"]


class Sidecar:
    """A publisher's daemon that may be told to die somewhere."""

    def __init__(self, place: Place, export: Path) -> None:
        self._port = place.root / "port"
        self._arguments = (place.channel, place.base, place.pub, export, self._port)
        self.child: subprocess.Popen[str] | None = None

    def start(self, moment: str = "none:1") -> subprocess.Popen[str]:
        self._port.unlink(missing_ok=True)
        name, _, count = moment.partition(":")
        self.child = start(HERE / "receiving_child.py", name, count, *self._arguments)
        return self.child

    def url(self) -> str:
        wait_until(self._port.exists, 240, "the daemon has a port")
        return f"http://127.0.0.1:{self._port.read_text().strip()}"


@pytest.fixture
def sidecar(place: Place, export: Path) -> Iterator[Sidecar]:
    made = Sidecar(place, export)
    yield made
    if made.child is not None:
        kill(made.child)


def latest(place: Place) -> int:
    path = place.channel / "latest"
    return int(path.read_text()) if path.exists() else 0


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_sidecar_that_is_killed(
    place: Place, export: Path, sidecar: Sidecar, moment: str, rng: np.random.Generator
) -> None:
    models = [all_changed(place.model, rng) for _ in range(2)]
    with HandOver(export) as hand_over:
        hand_over.put(arrays(models[0]), step=1)
        assert ended(sidecar.start(moment))[0] == -9
        sidecar.start()
        wait_until(lambda: latest(place) == 1, 240, "the first is out")
        place.arrives(models[0], 1)
    with HandOver(export, sidecar=sidecar.url()) as hand_over:
        hand_over.put(arrays(models[1]), step=2)
        wait_until(lambda: latest(place) == 2, 240, "the second is out, once")
    place.arrives(models[1], 2)


def test_a_sidecar_over_http(tmp_path: Path) -> None:
    """Told at once: its poll would be too late. What does not fit is refused once, and said."""
    places = Places.made(tmp_path)
    export = tmp_path / "export"
    daemon = Daemon.start(places, "--hand-over", str(export), "--poll-seconds", "30").ready()
    try:
        tensors = _as_numpy_bytes(places)
        with HandOver(export, sidecar=str(daemon.client.base_url)) as hand_over:
            hand_over.put({"not": np.zeros(3, np.float32)}, step=1)
            wait_until(lambda: daemon.status()["last_error"] is not None, 120, "refused")
            hand_over.put(tensors, step=2)
            status = daemon.wait_for_version(1)
        assert status["publications"][0]["step"] == 2
        assert status["totals"]["failures"] == 1
    finally:
        daemon.kill()
    assert os.environ.get("WEIGHTCAST_TOKEN", "") == ""


def test_adapters_next_to_main(tmp_path: Path) -> None:
    """Each has slots of its own: neither main nor another adapter replaces what is put."""
    places, export = Places.made(tmp_path), tmp_path / "export"
    with HandOver(export) as hand_over:
        for seed in (1, 2):
            hand_over.put(adapter(seed), step=seed, component=MATH, config=CONFIG)
        hand_over.put(adapter(7), component=CODE, config=CONFIG)
        hand_over.put(_as_numpy_bytes(places), step=1)
        with pytest.raises(Refused, match="config= is missing"):
            hand_over.put(adapter(3), component=MATH)
        with pytest.raises(Refused, match="not for main"):
            hand_over.put(_as_numpy_bytes(places), main_version=0)
        with pytest.raises(Refused, match="cannot be handed over"):
            hand_over.put(adapter(3), component="adapter/../main", config=CONFIG)
    (export / "adapter" / "a@b").mkdir()
    (export / "adapter" / "link").symlink_to(export / "adapter" / "math")
    daemon = Daemon.start(places, "--hand-over", str(export)).ready()
    try:
        daemon.wait_for_version(1)
        wait_until(lambda: len(daemon.status()["publications"]) == 3)
        said = {each["component"]: each for each in daemon.status()["publications"]}
        assert [said[name]["main_version"] for name in (MATH, CODE)] == [1, 1]
        assert follow(places.channel, MATH, tmp_path / "math") == (1, bytes_of(adapter(2)), CONFIG)
        assert follow(places.channel, CODE, tmp_path / "code")[:2] == (1, bytes_of(adapter(7)))
        with HandOver(export, sidecar=str(daemon.client.base_url)) as hand_over:
            hand_over.put(adapter(4, rank=8), component=MATH, config=CONFIG)
            wait_until(lambda: daemon.status()["totals"]["failures"] == 1)
            given = {"component": MATH, "config": CONFIG | {"lora_alpha": 16}}
            hand_over.put(adapter(5), step=9, main_version=0, **given)
            wait_until(lambda: len(daemon.status()["publications"]) == 4)
            assert daemon.status()["publications"][0]["main_version"] == 0
        found = follow(places.channel, MATH, tmp_path / "math")
        assert found == (2, bytes_of(adapter(5)), CONFIG | {"lora_alpha": 16})
    finally:
        daemon.kill()


@pytest.mark.parametrize("moment", ["component.made:1", "index.allowed:2", "pointer.moved:2"])
def test_a_sidecar_that_is_killed_at_an_adapter(
    place: Place, export: Path, sidecar: Sidecar, moment: str, rng: np.random.Generator
) -> None:
    """With more versions of main than of the adapter."""
    with HandOver(export) as hand_over:
        for version in (1, 2):
            hand_over.put(arrays(all_changed(place.model, rng)), step=version)
            assert publish_newest(place, HandOverSource(export, place.root / "memory")) == version
        hand_over.put(arrays(place.model), step=3)
        hand_over.put(adapter(1), step=3, component=MATH, config=CONFIG)
    assert ended(sidecar.start(moment))[0] == -9
    sidecar.start()
    latest_of = place.channel / "components" / MATH / "latest"
    wait_until(latest_of.exists, 240, "the adapter is out")
    with HandOver(export, sidecar=sidecar.url()) as hand_over:
        hand_over.put(adapter(2), step=4, component=MATH, config=CONFIG)
        wait_until(lambda: int(latest_of.read_text()) == 2, 240, "the second is out, once")
    assert follow(place.channel, MATH, place.root / "math")[:2] == (2, bytes_of(adapter(2)))


def _as_numpy_bytes(places: Places) -> dict[str, Any]:
    from daemonkit import base_tensors, changed

    from weightcast.publisher import RawTensor

    given = changed(base_tensors(), 3)
    return {name: RawTensor(dtype, shape, data) for name, (dtype, shape, data) in given.items()}


def test_what_is_refused_leaves_its_slot_free(place: Place, export: Path, rng: np.random.Generator) -> None:
    handed_over, model = HandOverSource(export, place.root / "memory"), all_changed(place.model, rng)
    wrong = arrays(model)
    del wrong[min(wrong)]
    kept = []
    with HandOver(export) as hand_over:
        for _ in range(2):
            hand_over.put(wrong)
            with pytest.raises(Refused, match="is missing") as refused:
                publish_newest(place, handed_over)
            kept.append(refused.value)  # an error that is remembered, as a daemon does, holds its frames
        hand_over.put(arrays(model), timeout=0.1)
        assert publish_newest(place, handed_over) == 1
    place.arrives(model, 1)
