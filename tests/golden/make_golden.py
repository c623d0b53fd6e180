"""Makes tests/golden/channels/, which must not exist: python tests/golden/make_golden.py [NAME]

`adapters`, `draft`, `skyrl`: adds the channel of that name to those that are there.

Never part of a test run. What is committed there was written by the release that made it, and every later
release must go on reading it: a writer that makes other bytes today is no reason to make them anew.

    base/                       the checkpoint that all channels start from
    fast/ xor/ overwrite/       channels as this release writes them, versions 1 to 3
    adapters/                   main at version 1; adapter/math at version 3, adapter/old retired at version 1
    draft/                      main at version 1; the draft model at version 3
    field-plain/ field-run/     channels in the field's plain format, in both dialects of the pointer
    skyrl/                      a channel of SkyRL's
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
from field_writer import root_of, write_pointer, write_skyrl, write_version  # noqa: E402

from weightcast.publisher import Publisher, RawTensor, init_channel  # noqa: E402
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


def adapter_models(rng: np.random.Generator) -> list[Model]:
    """Every word changes, as an optimizer does it."""
    names = [
        f"base_model.model.model.layers.{n}.q_proj.lora_{part}.weight" for n in range(2) for part in "AB"
    ]
    return [{name: tensor(rng, "F32", 3, 17) for name in names} for _ in range(VERSIONS)]


def make_adapters() -> dict[str, str]:
    """The roots of main and of adapter/math, and a digest of the adapter's bytes."""
    channel, rng = CHANNELS / "adapters", np.random.default_rng(20260102)
    init_channel(channel, CHANNELS / "base", run_id=RUN)
    with (
        tempfile.TemporaryDirectory() as room,
        Publisher.open(channel, local=Path(room) / "local", base=CHANNELS / "base") as publisher,
    ):
        main = publisher.publish_checkpoint(write_checkpoint(Path(room) / "main", models()[1]))
        for step, model in enumerate(adapter_models(rng), 1):
            given = {n: RawTensor(one.dtype, one.shape, one.data.tobytes()) for n, one in model.items()}
            config = {"peft_type": "LORA", "r": 3, "lora_alpha": step}
            report = publisher.publish(given, step=step, component="adapter/math", config=config)
        publisher.publish(given, component="adapter/old", config=config)
        publisher.retire("adapter/old")
    for claims in channel.rglob("publishers"):
        shutil.rmtree(claims)
    return {"main": main.root, "math": report.root, "bytes": root_of(bytes_of(model))}


def make_draft() -> dict[str, str]:
    """The roots of main and of the draft model, whose words change as those of main do."""
    channel = CHANNELS / "draft"
    init_channel(channel, CHANNELS / "base", run_id=RUN)
    with (
        tempfile.TemporaryDirectory() as room,
        Publisher.open(channel, local=Path(room) / "local", base=CHANNELS / "base") as publisher,
    ):
        main = publisher.publish_checkpoint(write_checkpoint(Path(room) / "main", models()[1]))
        for step, model in enumerate(models()[1:], 1):
            given = {n: RawTensor(one.dtype, one.shape, one.data.tobytes()) for n, one in model.items()}
            config = {"architectures": ["Tiny"], "step": step}
            report = publisher.publish(given, step=step, component="draft", config=config)
    for claims in channel.rglob("publishers"):
        shutil.rmtree(claims)
    return {"main": main.root, "draft": report.root}


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


def make_skyrl() -> None:
    """Version 1 with older checksums."""
    steps, checksums = models(), ("sha256", "xxh3-128", "xxh3-128")
    for version, checksum in enumerate(checksums, 1):
        directory = CHANNELS / "skyrl" / f"delta-{version:08d}"
        write_skyrl(directory, version, steps[version - 1], steps[version], checksum=checksum, files=2)


def main() -> None:
    if sys.argv[1:] == ["skyrl"]:
        make_skyrl()
        return
    added = {"adapters": make_adapters, "draft": make_draft}
    if sys.argv[1:]:
        expected = json.loads((CHANNELS / "expected.json").read_text())
        expected[sys.argv[1]] = added[sys.argv[1]]()
        (CHANNELS / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
        return
    if CHANNELS.exists():
        sys.exit(f"{CHANNELS} exists; remove it only if no release has written that format yet")
    write_checkpoint(CHANNELS / "base", models()[0])
    roots = {encoding: make_ours(encoding) for encoding in ("fast", "xor", "overwrite")}
    make_field("field-plain", None, encoding="xor", checksum="blake3")
    make_skyrl()
    make_field("field-run", "run-7", encoding="overwrite", checksum="adler32")
    expected = {"roots": roots, "bytes": root_of(bytes_of(models()[VERSIONS]))}
    expected |= {name: make() for name, make in added.items()}
    (CHANNELS / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
