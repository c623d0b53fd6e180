"""Makes tests/golden/channels/, which must not exist: python tests/golden/make_golden.py

Never part of a test run. What is committed there was written by the release that made it, and every later
release must go on reading it: a writer that makes other bytes today is no reason to make them anew.

    base/                       the checkpoint that all channels start from
    fast/ xor/ overwrite/       channels as this release writes them, versions 1 to 3
    field-plain/ field-run/     channels in the field's plain format, in both dialects of the pointer
    expected.json               per channel the root of version 3 and a digest of the tensor bytes
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import numpy as np  # noqa: E402
from core_cases import Model, bytes_of, some_changed, tensor, write_checkpoint  # noqa: E402
from field_writer import root_of, write_pointer, write_version  # noqa: E402

from weightcast.publisher import Publisher, init_channel  # noqa: E402
from weightcast.shared.channel.channel import Channel  # noqa: E402
from weightcast.shared.channel.directory_store import open_store  # noqa: E402
from weightcast.shared.channel.index import Index  # noqa: E402

CHANNELS = HERE / "channels"
VERSIONS = 3
RUN = "golden-run"


def models() -> list[Model]:
    rng = np.random.default_rng(20260101)
    base: Model = {"odd": tensor(rng, "U8", 3)}
    for dtype in ("BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "I8", "I32", "I64", "BOOL"):
        base[f"layer.{dtype.lower()}"] = tensor(rng, dtype, 5, 13)
    base |= {"scale": tensor(rng, "F32"), "empty": tensor(rng, "BF16", 0, 4)}
    made = [base]
    for _ in range(VERSIONS):
        made.append(some_changed(made[-1], rng, 4))
    return made


def make_ours(encoding: str) -> str:
    """The root of the last version."""
    channel = CHANNELS / encoding
    init_channel(channel, CHANNELS / "base", run_id=RUN)
    with (
        tempfile.TemporaryDirectory() as room,
        Publisher.open(
            channel,
            local=Path(room) / "local",
            base=CHANNELS / "base",
            encoding=encoding,  # type: ignore[arg-type]
        ) as publisher,
    ):
        for step, model in enumerate(models()[1:], 1):
            new = write_checkpoint(Path(room) / str(step), model)
            report = publisher.publish_checkpoint(new, step=step)
    for left in (channel / ".trash", channel / "publishers"):
        shutil.rmtree(left, ignore_errors=True)
    index = Channel.open(open_store(channel)).index(pointer_of(channel), VERSIONS, table_of(channel))
    assert isinstance(index, Index) and index.root == report.root
    return report.root


def pointer_of(channel: Path):  # type: ignore[no-untyped-def]
    return Channel.open(open_store(channel)).pointer()


def table_of(channel: Path):  # type: ignore[no-untyped-def]
    return Channel.open(open_store(channel)).require_ours()[1].table


def make_field(name: str, run: str | None, **options: str) -> None:
    channel = CHANNELS / name
    prefix = channel if run is None else channel / "updates"
    steps = [bytes_of(model) for model in models()]
    for version in range(1, VERSIONS + 1):
        directory = prefix / f"weight_v{version:06d}"
        write_version(directory, version, steps[version - 1], steps[version], shards=2, **options)
    write_pointer(channel, VERSIONS, run)


def main() -> None:
    if CHANNELS.exists():
        sys.exit(f"{CHANNELS} exists; remove it only if no release has written that format yet")
    write_checkpoint(CHANNELS / "base", models()[0])
    roots = {encoding: make_ours(encoding) for encoding in ("fast", "xor", "overwrite")}
    make_field("field-plain", None, encoding="xor", checksum="blake3")
    make_field("field-run", "run-7", encoding="overwrite", checksum="adler32")
    expected = {"roots": roots, "bytes": root_of(bytes_of(models()[VERSIONS]))}
    (CHANNELS / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
