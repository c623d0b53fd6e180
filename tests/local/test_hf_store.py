"""A channel in a bucket of the Hugging Face hub, by a double of its client. The hub was never asked."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from core_cases import bytes_of, read_checkpoint, unpack, write_checkpoint
from local_cases import make_run

from weightcast.publisher import Publisher, PublisherOptions, init_channel
from weightcast.shared.base.errors import Refused, WeightcastError
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.hf_store import HfStore, open_hf_store
from weightcast.shared.channel.store import NotFound, Unavailable
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions

pytest.importorskip("huggingface_hub")
from hf_double import Hub


class Answer(Exception):
    def __init__(self, status: int) -> None:
        super().__init__("Authorization: Bearer hf_secret")
        self.response = SimpleNamespace(status_code=status)


class BucketNotFoundError(Answer):
    pass


def test_a_host_follows_a_copy_of_a_channel(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    hub = Hub()
    store = HfStore(hub, "owner/bucket", "runs/seven")
    files = [path for path in run.channel.rglob("*") if path.is_file()]
    copied = [(str(path), f"runs/seven/{path.relative_to(run.channel)}") for path in files]
    hub.batch_bucket_files("owner/bucket", add=copied)  # type: ignore[arg-type]
    updater = LocalUpdater(store, tmp_path / "host", run.base, UpdaterOptions(visible_seconds=0.2))
    try:
        updater.update_to(Channel.open(store))
        [written] = (tmp_path / "host").glob("*.safetensors")
        assert unpack(written.read_bytes()).keys() == run.latest.keys()
        assert all(
            unpack(written.read_bytes())[name] == one.data.tobytes() for name, one in run.latest.items()
        )
        channel = Channel.open(store)
        hub.downloads.clear()
        assert channel.pointed() == channel.pointed() == len(run.models) - 1
        assert len(hub.downloads) <= 1, "a pointer that did not change is not downloaded again"
    finally:
        updater.close()


def test_publishing_needs_a_word(tmp_path: Path) -> None:
    run = make_run(tmp_path, 2)
    store = HfStore(Hub(), "owner/bucket", "run")
    init_channel(store, run.base, unfenced=True)
    with pytest.raises(Refused, match="ignores if-none-match and if-match"):
        Publisher.open(store, local=tmp_path / "publisher", base=run.base)
    options = PublisherOptions(unfenced=True)
    with Publisher.open(store, local=tmp_path / "publisher", base=run.base, options=options) as publisher:
        write_checkpoint(tmp_path / "new", run.models[1])
        publisher.publish_checkpoint(tmp_path / "new")
    updater = LocalUpdater(store, tmp_path / "host", run.base, UpdaterOptions(visible_seconds=0.2))
    try:
        updater.update_to(Channel.open(store))
        assert read_checkpoint(tmp_path / "host") == bytes_of(run.models[1])
    finally:
        updater.close()


def test_names_become_visible_by_one_call() -> None:
    hub = Hub()
    store = HfStore(hub, "owner/bucket", "run")
    writer = store.write("v/large")
    writer.write(bytes(1000))
    assert not hub.batches
    writer.finish()
    store.move("v", "w")
    assert hub.batches == [["run/v/large"], ["run/w/large"], ["run/v/large"]]


@pytest.mark.parametrize(
    ("raised", "error", "says"),
    [
        (Answer(401), Unavailable, "access to hf://buckets/owner/bucket/latest was denied"),
        (Answer(404), NotFound, "does not exist"),
        (Answer(503), Unavailable, "answered 503"),
        (ConnectionError("hf_secret"), Unavailable, "ConnectionError"),
        (BucketNotFoundError(404), Unavailable, "the bucket does not exist, or is private"),
    ],
)
def test_errors_of_the_hub(
    raised: Exception, error: type[WeightcastError], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Hub):
        def get_bucket_paths_info(self, bucket_id: str, paths: object) -> object:  # type: ignore[override]
            raise raised

    with pytest.raises(error, match=says) as told:
        HfStore(Failing(), "owner/bucket").read("latest", 100)
    assert "hf_secret" not in str(told.value)


@pytest.mark.parametrize("url", ["hf://owner/bucket", "hf://buckets/owner", "hf://buckets/a/b?token=hf_x"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(Refused, match="not the URL of a bucket") as told:
        open_hf_store(url)
    assert "hf_x" not in str(told.value)
