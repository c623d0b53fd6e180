"""Versions whose parts split tensors, and versions of other splits one after the other."""

from __future__ import annotations

import numpy as np
import pytest
from cut_versions import commit_cut
from hosts import Run, SGLang, Site, Weights

from weightcast.publisher.api import Publisher
from weightcast.shared.base.elements import Part, Segment, TensorTable


def cut(table: TensorTable) -> tuple[Part, ...]:
    """Two parts; every tensor that is long enough lies in both, most of it in the second."""
    first, second = [], []
    for number, spec in enumerate(table):
        border = 64 if spec.words > 64 else spec.words
        first.append(Segment(number, 0, border))
        if border < spec.words:
            second.append(Segment(number, border, spec.words))
    return Part(0, tuple(first)), Part(1, tuple(second))


def commit_in_parts(run: Run, new: Weights) -> int:
    """A version of one shard per part; pointed to, not patched in."""
    number = len(run.versions)
    given = new.write(run.root / f"given{number}")
    commit_cut(run.channel, run.root / "publisher", given, number, cut)
    run.versions.append(new)
    return number


def both_halves(weights: Weights) -> Weights:
    """The first and the last byte of every tensor are others."""
    tensors = {}
    for name, (dtype, shape, data) in weights.tensors.items():
        array = np.frombuffer(data, np.uint8).copy()
        array[:1] ^= 3
        array[-1:] ^= 5
        tensors[name] = dtype, shape, array.tobytes()
    return Weights(tensors)


@pytest.fixture
def run(site: Site) -> Run:
    """Versions 1 of one part, 2 of two parts that split tensors, 3 of one part again."""
    made = site.run()
    made.publish()
    made._publisher.close()
    commit_in_parts(made, both_halves(made.versions[-1]))
    made._publisher = site.stack.enter_context(
        Publisher.open(made.channel, local=made.root / "publisher", base=made.base_dir)
    )
    assert made._publisher.local_version == 2
    made.publish(both_halves(made.versions[-1].changed(9)))
    return made


def test_a_host_far_behind_reloads_once(site: Site, run: Run) -> None:
    engine = SGLang()
    host = site.host(run, engine, target="0")
    assert host.step().ready and host.at(run, 0)
    engine.calls.clear()
    updater = site.host(run, engine, name="host")
    host.sync.close()
    outcome = updater.step()
    assert outcome.ready and updater.at(run, 3) and engine.held == run.digest(3)
    assert len(engine.of("/update_weights_from_disk")) == 1
    assert updater.status.updates[-1].folded == 3


@pytest.mark.parametrize("version", [1, 2, 3])
def test_every_version_of_a_split_arrives(site: Site, run: Run, version: int) -> None:
    host = site.host(run, target=str(version), threads=3)
    host.step()
    assert host.at(run, version)
