"""Codes and scales, bit for bit, as compressed-tensors computes them; its reader of configs takes ours."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    # torch.compile, which it asks for when it is imported, warns of other parts of torch
    warnings.simplefilter("ignore")
    torch._dynamo.config.disable = True
    quantization = pytest.importorskip("compressed_tensors.quantization")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

from weightcast.publisher import Quantiser, quantise  # noqa: E402
from weightcast.publisher.weights.quantise import SCHEMES  # noqa: E402

pytestmark = pytest.mark.trainers

PRESETS = {
    "fp8-block": ("FP8_BLOCK", "float-quantized"),
    "fp8-channel": ("FP8_DYNAMIC", "float-quantized"),
    "int8-channel": ("W8A8", "int-quantized"),
    "mxfp8": ("MXFP8", "mxfp8-quantized"),
    "nvfp4": ("NVFP4A16", "nvfp4-pack-quantized"),
}


def reference(weight: Any, name: str) -> dict[str, Any]:
    preset, form = PRESETS[name]
    scheme = quantization.preset_name_to_scheme(preset, ["Linear"])
    (rows, columns), (high, wide) = weight.shape, SCHEMES[name].block
    wide = wide or columns
    padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
    blocks = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    unit = generate_gparam(weight.amin(), weight.amax()) if name == "nvfp4" else None
    ends = blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    state = {"weight": weight, "weight_scale": calculate_qparams(*ends, scheme.weights, unit)[0]}
    if unit is not None:
        state["weight_global_scale"] = unit
    made: dict[str, Any] = BaseCompressor.get_value_from_registry(form).compress(state, scheme)
    if name == "fp8-block":
        made["weight_scale_inv"] = made.pop("weight_scale")
    return made


def weights() -> list[Any]:
    random = torch.Generator().manual_seed(5)
    found = []
    for shape in ((128, 128), (130, 192), (1, 32), (300, 1024)):
        normal = torch.randn(shape, generator=random)
        powers = torch.randint(-60, 40, (shape[0], 1), generator=random)
        halves = torch.randint(-256, 257, shape, generator=random) / 64
        found += [normal, normal * torch.exp2(powers.float()), normal * 1e-36, halves, torch.zeros(shape)]
        found += [torch.where(powers > 0, normal, 0.0), normal.bfloat16().float()]
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_and_scales_are_those_of_the_reference(scheme: str) -> None:
    for weight in weights():
        wanted = reference(weight.clone(), scheme)
        made = dict(quantise({"a.weight": weight}, scheme))
        assert made.keys() == {f"a.{name}" for name in wanted}
        for name, one in wanted.items():
            found = made[f"a.{name}"]
            assert (found.dtype, found.shape) == (one.dtype, one.shape), name
            assert torch.equal(found.view(torch.uint8), one.view(torch.uint8)), (name, weight.shape)


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "fp8-block"])
def test_the_config_is_that_of_the_preset(scheme: str) -> None:
    said = Quantiser(scheme).config(["lm_head.weight", "model.layers.0.mlp.gate.weight", "a.weight"])
    read = quantization.QuantizationConfig.model_validate(said)
    assert read.ignore == ["lm_head", "model.layers.0.mlp.gate"] and read.format == PRESETS[scheme][1]
    [found] = read.config_groups.values()
    wanted = quantization.preset_name_to_scheme(PRESETS[scheme][0], ["Linear"])
    for one, other in ((found.weights, wanted.weights), (found.input_activations, wanted.input_activations)):
        assert (one is None) == (other is None)
        for field in ("num_bits", "type", "strategy", "symmetric", "dynamic", "group_size", "scale_dtype"):
            assert one is None or getattr(one, field) == getattr(other, field), field
