"""What bytes of the channel were read for."""

from __future__ import annotations

from pathlib import Path

from hosts import Run, Site, Weights

from weightcast.publisher.maintenance.upkeep import UpkeepOptions


def _shards(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def test_single_steps_and_deltas_from_older_versions(site: Site) -> None:
    run = Run(site.root / "run", site.stack, upkeep=UpkeepOptions(skip_span=4))
    host = site.host(run)
    host.step()
    assert host.status.bytes_by_cause == {"step": 0, "skip": 0, "anchor": 0, "repair": 0}
    for _ in (1, 2):
        run.publish()
        host.step()
    steps = sum(_shards(run.channel / f"weight_v00000{version}") for version in (1, 2))
    assert host.status.bytes_by_cause["step"] == steps

    # one index is shorter than two
    for _ in (3, 4):
        run.publish()
    assert "delta of version 4 from version 2" in run.make_due()
    host.step()
    assert host.at(run, 4)
    skip = _shards(run.channel / "weight_v000004" / "from_v000002")
    assert host.status.bytes_by_cause == {"step": steps, "skip": skip, "anchor": 0, "repair": 0}
    assert host.status.bytes_read == steps + skip


def test_full_weights(site: Site) -> None:
    run = site.run()
    run.publish(anchor=True)
    host = site.host(run, base=None)
    assert host.step().local_version == 1
    full = sum(len(data) for _, _, data in Weights.make().tensors.values())
    assert host.status.bytes_by_cause["anchor"] == full == host.status.bytes_read


def test_repair(site: Site) -> None:
    run = site.run()
    run.publish()
    host = site.host(run)
    host.step()
    before = host.status.bytes_by_cause
    file = next(host.local.glob("model-00001*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    with file.open("r+b") as written:
        written.write(data)
    host.sync.rehash()
    assert host.at(run, 1)
    after = host.status.bytes_by_cause
    assert after["repair"] > 0 and {**after, "repair": 0} == before
