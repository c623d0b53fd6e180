"""The example that quantises, then publishes: what arrives is the trainer's policy, rounded once."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from examples.attach.quantised import run  # noqa: E402
from weightcast.publisher import quantise  # noqa: E402
from weightcast.publisher.weights.quantise import SCHEMES  # noqa: E402
from weightcast.shared.channel.channel import Channel  # noqa: E402
from weightcast.shared.channel.directory_store import open_store  # noqa: E402
from weightcast.shared.checkpoint.local_updater import LocalUpdater  # noqa: E402


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_host_holds_the_quantised_policy(tmp_path: Path, scheme: str) -> None:
    policy = run(tmp_path, scheme, 2)
    channel = tmp_path / f"channel-{scheme}"
    updater = LocalUpdater(open_store(channel), tmp_path / "host", tmp_path / f"base-{scheme}")
    try:
        updater.update_to(Channel.open(open_store(channel)))
        assert updater.local is not None and updater.local.state.position.version == 2
    finally:
        updater.close()
    held = load_file(tmp_path / "host" / "model.safetensors")
    wanted = dict(quantise(policy.state_dict(), scheme))
    wanted = {
        name: one.bfloat16() if name in policy.state_dict() and one.itemsize > 1 else one
        for name, one in wanted.items()
    }
    assert held.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert held[name].dtype == tensor.dtype
        assert torch.equal(held[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name
