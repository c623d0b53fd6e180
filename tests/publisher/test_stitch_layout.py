"""Layout `stitch`: a reader of that system's protocol follows what is published, in a directory and in S3.

The reader is written from the description of the protocol: a store that belongs to one run, checks what was
uploaded, mirrors everything under `updates/`, and leaves versions to a receiver of the slime format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import obstore
import pytest
from core_cases import Model, all_changed, bytes_of, some_changed, tensor, write_checkpoint
from field_reader import follow
from http_faults import HttpFaults, http_faults
from obstore.store import from_url
from publisher_cases import Place, make_place, numpy_model
from s3_gateway import Gateway
from sharded_world import along, cut_model, published, world_of

from weightcast.publisher import init_channel
from weightcast.publisher.maintenance.upkeep import UpkeepOptions
from weightcast.shared.base.errors import Refused
from weightcast.shared.channel.directory_store import open_store
from weightcast.shared.channel.store import Store

RUN = "run-under-test"
XOR = {"encoding": "xor", "layout": "stitch"}


@dataclass
class Replica:
    """`root`: where the system keeps its pointer; `seen`: the texts of the pointer."""

    root: str
    base: Path
    cache: Path
    run: str = RUN
    seen: list[str] = field(default_factory=list)

    def reads(self, model: Model) -> bool:
        """The pointer's version, folded from the base, has these bytes."""
        where = Path(self.root)
        if self.root.startswith("s3://"):
            self._mirror()
            where = self.cache
        text = (where / "latest").read_text()
        run, _, name = text.rpartition("/")
        assert (run, text) == (self.run, text.strip()), "the store is scoped to a run"
        assert not self.seen or text >= self.seen[-1], "the pointer went back"
        self.seen.append(text)
        assert follow(where, self.base / "model.safetensors") == bytes_of(model)
        return name == f"weight_v{int(name[-6:]):06d}"

    def _mirror(self) -> None:
        bucket, _, prefix = self.root.removeprefix("s3://").partition("/")
        store = from_url(f"s3://{bucket}", client_options={"allow_http": True})
        for batch in obstore.list(store, f"{prefix}/updates"):
            for meta in batch:
                path = self.cache / meta["path"].removeprefix(f"{prefix}/")
                if path.exists() and path.stat().st_size == meta["size"]:
                    continue
                found = obstore.get(store, meta["path"])
                data = bytes(found.bytes())
                if "/weight_v" in meta["path"]:
                    stated = found.attributes.get("stitch-sha256")
                    assert stated == hashlib.sha256(data).hexdigest(), meta["path"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
        (self.cache / "latest").write_bytes(bytes(obstore.get(store, f"{prefix}/latest").bytes()))


@dataclass(frozen=True)
class Root(Place):
    address: str = ""

    @property
    def channel(self) -> str:  # type: ignore[override]
        return f"{self.address}/updates"

    @property
    def store(self) -> Store:
        """Of the root."""
        return open_store(self.address)

    def replica(self) -> Replica:
        return Replica(self.address, self.base, self.root / "cache")

    @property
    def pointer(self) -> bytes:
        return self.store.read("latest", 100)


Make = Callable[[], Root]


@pytest.fixture(params=["directory", pytest.param("s3", marks=pytest.mark.s3)])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "directory":
        return str(tmp_path / "root")
    return f"{request.getfixturevalue('bucket')}/root"


@pytest.fixture
def root(tmp_path: Path, address: str) -> Root:
    return _made(tmp_path, address, numpy_model(np.random.default_rng(3)))


def _made(tmp_path: Path, address: str, model: Model) -> Root:
    made = Root(tmp_path, model, address)
    write_checkpoint(made.base, model)
    init_channel(made.channel, made.base, run_id=RUN)
    return made


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(17)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_both_follow_each_version(root: Root, rng: np.random.Generator, encoding: str) -> None:
    model, replica = root.model, root.replica()
    with root.publisher(encoding=encoding, layout="stitch") as publisher:
        assert root.pointer == f"{RUN}/weight_v000000".encode()
        assert replica.reads(model)
        for version in range(1, 4):
            model = some_changed(model, rng)
            publisher.publish_checkpoint(root.new(model))
            assert root.pointer == f"{RUN}/weight_v{version:06d}".encode()
            assert replica.reads(model)
            root.arrives(model, version)
    late = replace(replica, cache=root.root / "late", seen=[])
    assert late.reads(model)


def test_versions_of_several_ranks(root: Root, rng: np.random.Generator) -> None:
    model, replica = root.model, root.replica()
    with world_of(root, 2, **XOR) as world:
        for step in (1, 2):
            model = all_changed(model, rng)
            assert published(world.publish(cut_model(model, along(0), 2), step)) == step
            assert replica.reads(model)
    root.arrives(model, 2)


def test_a_pointer_that_was_left_behind_is_moved_at_the_start(root: Root, rng: np.random.Generator) -> None:
    """As by a publisher that was killed between the two pointers."""
    model, replica = some_changed(root.model, rng), root.replica()
    root.publish(model, **XOR)
    root.store.replace("latest", f"{RUN}/weight_v000000".encode())
    with root.publisher(**XOR):
        assert root.pointer == f"{RUN}/weight_v000001".encode()
        assert replica.reads(model)


def test_the_pointer_never_goes_back(root: Root, rng: np.random.Generator) -> None:
    root.store.create("latest", f"{RUN}/weight_v000009".encode())
    root.publish(some_changed(root.model, rng), **XOR)
    assert root.pointer == f"{RUN}/weight_v000009".encode()


def test_a_root_is_claimed_from_an_older_run(root: Root, rng: np.random.Generator) -> None:
    root.store.create("latest", b"old-run/weight_v000009")
    model = some_changed(root.model, rng)
    root.publish(model, **XOR)
    assert root.replica().reads(model)


@pytest.mark.parametrize("other", [b"other-run/weight_v000000", b"000007"])
def test_a_root_that_another_run_has_is_left_alone(
    root: Root, rng: np.random.Generator, other: bytes
) -> None:
    model = some_changed(root.model, rng)
    root.publish(model, **XOR)
    root.store.replace("latest", other)
    with pytest.raises(Refused, match=r"latest names run .*, this channel is run run-under-test"):
        root.publish(all_changed(model, rng), **XOR)
    assert root.pointer == other
    root.arrives(model, 1)


def test_a_claim_during_the_run_ends_it(root: Root, rng: np.random.Generator) -> None:
    with root.publisher(**XOR) as publisher:
        root.store.replace("latest", b"other-run/weight_v000000")
        with pytest.raises(Refused, match="names run other-run"):
            publisher.publish_checkpoint(root.new(some_changed(root.model, rng)))
    assert root.pointer == b"other-run/weight_v000000"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"encoding": "fast"}, "cannot read encoding fast"),
        ({"encoding": "small"}, "cannot read encoding small"),
        ({"anchor_every": 2}, "leave out the options of anchors"),
        ({"upkeep": UpkeepOptions(skip_span=8)}, "leave out the options of anchors"),
    ],
)
def test_what_cannot_be_read_is_refused(root: Root, options: dict[str, object], why: str) -> None:
    with pytest.raises(Refused, match=why), root.publisher(**{**XOR, **options}):
        pass
    assert open_store(root.channel).names("publishers") == []


def test_a_channel_of_another_name_is_refused(tmp_path: Path) -> None:
    place = make_place(tmp_path, numpy_model(np.random.default_rng(3)))
    with pytest.raises(Refused, match=r"channel is not ROOT/updates"), place.publisher(**XOR):
        pass


@pytest.fixture
def proxy(s3: Gateway, bucket: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpFaults]:
    with http_faults(s3.endpoint) as made:
        monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
        yield made


@pytest.mark.s3
def test_what_is_sent_to_s3(tmp_path: Path, bucket: str, proxy: HttpFaults, rng: np.random.Generator) -> None:
    """Checksums with all of a version, in one request or several; the pointer only over what was read."""
    model = {**numpy_model(rng), "wide": tensor(rng, "F32", 1500, 2000)}
    root = _made(tmp_path, f"{bucket}/root", model)
    wide = model["wide"]
    new = {**model, "wide": wide._replace(data=rng.integers(0, 256, wide.data.size, np.uint8))}
    with root.publisher(**XOR) as publisher:
        publisher.publish_checkpoint(root.new(new))
    assert root.replica().reads(new)
    sent = [(path, headers) for method, path, headers in proxy.sent if method == "PUT"]
    parts = [headers for path, headers in sent if "partNumber" in path]
    whole = [headers for path, headers in sent if "/updates/weight_v" in path and "partNumber" not in path]
    assert len(parts) > 1 and whole
    assert all("x-amz-checksum-sha256" in headers for headers in (*parts, *whole))
    moved = [headers for path, headers in sent if path.endswith("/root/latest")]
    assert "if-none-match" in moved[0] and all("if-match" in headers for headers in moved[1:])


@pytest.mark.s3
def test_pieces_that_are_made_meanwhile_get_a_digest_too(bucket: str) -> None:
    pieces = [bytes([number]) * (1 << 20) for number in range(10)]
    open_store(bucket, stitch=True).upload("full", iter(pieces))
    found = obstore.get(from_url(bucket, client_options={"allow_http": True}), "full")
    assert found.attributes["stitch-sha256"] == hashlib.sha256(b"".join(pieces)).hexdigest()
    assert bytes(found.bytes()) == b"".join(pieces)


def test_the_daemon_s_settings(weightcast: Callable[..., object], tmp_path: Path) -> None:
    place = make_place(tmp_path)
    words = ["--channel", tmp_path / "channel", "--base", place.base, "--local", place.pub]
    for flags, why in (
        (["--encoding", "xor"], "is not ROOT/updates"),
        (["--channel", tmp_path / "updates"], "cannot read encoding fast"),
        (["--channel", tmp_path / "updates", "--encoding", "xor", "--keep-versions", 9], "pruning"),
    ):
        done = weightcast("publisher", "run", "--layout", "stitch", *words, *flags)
        assert done.code == 2 and why in done.err  # type: ignore[attr-defined]
