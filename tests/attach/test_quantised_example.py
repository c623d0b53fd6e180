"""The example that quantises, then publishes: what arrives is the trainer's policy, rounded once."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from examples.attach.quantised import BLOCK, HOW, power_of_two, quantised, run  # noqa: E402
from weightcast.shared.channel.channel import Channel  # noqa: E402
from weightcast.shared.channel.directory_store import open_store  # noqa: E402
from weightcast.shared.checkpoint.local_updater import LocalUpdater  # noqa: E402


@pytest.mark.parametrize("how", sorted(HOW))
def test_a_host_holds_the_quantised_policy(tmp_path: Path, how: str) -> None:
    policy = run(tmp_path, how, 2)
    channel = tmp_path / f"channel-{how}"
    updater = LocalUpdater(open_store(channel), tmp_path / "host", tmp_path / f"base-{how}")
    try:
        updater.update_to(Channel.open(open_store(channel)))
        assert updater.local is not None and updater.local.state.position.version == 2
    finally:
        updater.close()
    held = load_file(tmp_path / "host" / "model.safetensors")
    wanted = dict(quantised(policy.state_dict(), how))
    assert held.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert held[name].dtype == tensor.dtype
        assert torch.equal(held[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name
    _, ending, back = HOW[how]
    weight = policy.state_dict()["up.weight"]
    error = (back(held["up.weight"], held["up.weight" + ending]) - weight).abs().max()
    assert error <= weight.abs().max() / (8 if how == "fp8" else 64)


@pytest.mark.parametrize("how", sorted(HOW))
@pytest.mark.parametrize("shape", [(1, 1), (BLOCK, BLOCK), (BLOCK + 1, 2 * BLOCK - 1), (3, 300)])
def test_shapes_zeros_and_extremes(how: str, shape: tuple[int, int]) -> None:
    quantise, _, back = HOW[how]
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 100
    weight[0] = 0
    words, scale = quantise(weight)
    assert words.shape == shape and bool(torch.isfinite(scale).all()) and bool((scale > 0).all())
    found = back(words, scale)
    assert bool(torch.isfinite(found).all()) and bool((found[0] == 0).all())
    assert torch.allclose(found, weight, atol=float(weight.abs().max()) / 8, rtol=0.08)


def test_scales_stand_still_for_small_steps() -> None:
    values = torch.tensor([1.0, 1.9, 448.0, 449.0, 0.0])
    assert power_of_two(values, 448.0).tolist() == [2**-8, 2**-7, 1.0, 2.0, 1.0]
    assert power_of_two(values * 0.999, 448.0)[1] == power_of_two(values, 448.0)[1]
