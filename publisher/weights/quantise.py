"""Weights in the precision of a fleet that serves quantised ones: codes and scales under the names, dtypes
and shapes that engines load.

Computed in float32 on the tensors' own device, as compressed-tensors does for float32 weights.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from weightcast.publisher.weights.config import CONFIG, read_config
from weightcast.publisher.weights.given import (
    CastTensor,
    RawTensor,
    dtype_of,
    in_torch,
    pairs_of,
    shard_of,
    torch,
    torch_dtype,
)
from weightcast.publisher.weights.precision import FLOATS
from weightcast.publisher.weights.tensors import CheckpointWeights, GivenWeights, NewWeights
from weightcast.shared.base.errors import Refused
from weightcast.shared.files.hf_checkpoint import side_files
from weightcast.shared.files.paths import exists

_E4M3_MAX, _FP4_MAX, _INT8_MAX = 448.0, 6.0, 127.5
_BAND = 1 << 22
"""elements that are quantised at a time"""
_SHARD_BYTES = 4 << 30
IGNORE = ("*lm_head.weight", "*embed*", "*.wte.weight", "*.wpe.weight", "*.gate.weight", "*router*")
"""globs of matrices that stay as they are: heads, embeddings, routers"""
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""what engines join into one matrix, for which they take one global scale"""


def _linear(most: float, largest: Any, unit: Any) -> Any:
    scale = largest / most
    return torch.where(scale == 0, torch.finfo(torch.float32).eps, scale)


def _power_of_two(largest: Any, unit: Any) -> Any:
    """The power of two at or below `largest`, from 1.75 times it on the next one, by e4m3's largest power."""
    exponent = ((largest.view(torch.int32) + (1 << 21)) >> 23) - 8
    return _from_e8m0(exponent.clamp(0, 254))


def _from_e8m0(stored: Any) -> Any:
    bits = stored.to(torch.int32) << 23
    return torch.where(bits == 0, 1 << 22, bits).view(torch.float32)


def _to_e8m0(scale: Any) -> Any:
    return (scale.view(torch.int32) >> 23).to(torch.uint8)


def _of_unit(largest: Any, unit: Any) -> Any:
    scale = (unit * (largest / _FP4_MAX)).clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn).float()
    return torch.where(scale == 0, 0.125, scale)


def _unit(largest: Any) -> Any:
    """A tensor's global scale: of its largest block the scale becomes e4m3's largest value."""
    tiny = torch.finfo(torch.float32).tiny
    return torch.nan_to_num(_E4M3_MAX * _FP4_MAX / largest.clamp(min=tiny), posinf=1.0).reshape(1)


def _to_e4m3(values: Any) -> Any:
    return values.clamp_(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)


def _to_int8(values: Any) -> Any:
    return values.clamp_(-128, 127).round_().to(torch.int8)


def _to_fp4(values: Any) -> Any:
    """Two codes in each byte, the first in its lower half. Values are 0.5 apart, 1 from 2 on, 2 from 4 on."""
    size = values.abs().clamp_(max=_FP4_MAX)
    large = torch.where(size < 4, size.round() + 2, (size / 2).round_() + 4)
    codes = torch.where(size < 2, (size * 2).round_(), large).to(torch.uint8)
    codes |= (values < 0).to(torch.uint8) << 3
    return codes[:, 0::2] | codes[:, 1::2] << 4


@dataclass(frozen=True)
class Scheme:
    """`block`: rows and columns with one scale; 0 columns: all of them. `scale`: float32 from a block's
    largest absolute value and the tensor's global scale; `store`, `load`: to its dtype and back. `codes`: of
    values divided by the scale, `packed` in a byte. `names`: of codes, scale and, with one, global scale.
    `config`: of `quantization_config`."""

    block: tuple[int, int]
    scale: Callable[[Any, Any], Any]
    codes: Callable[[Any], Any]
    names: tuple[str, ...]
    config: Mapping[str, Any]
    store: Callable[[Any], Any] = lambda scale: scale
    load: Callable[[Any], Any] = lambda stored: stored.float()
    packed: int = 1


def _compressed(form: str, weights: Mapping[str, Any], inputs: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """As compressed-tensors writes it."""
    group = {
        "targets": ["Linear"],
        "weights": {"symmetric": True, "dynamic": False, **weights},
        "input_activations": None if inputs is None else {"symmetric": True, "dynamic": True, **inputs},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


_FLOAT8, _INT8 = {"num_bits": 8, "type": "float"}, {"num_bits": 8, "type": "int"}
_CHANNEL, _TOKEN = {"strategy": "channel"}, {"strategy": "token"}
_MX = {**_FLOAT8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_NV = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
SCHEMES: Mapping[str, Scheme] = {
    "fp8-block": Scheme(
        (128, 128),
        partial(_linear, _E4M3_MAX),
        _to_e4m3,
        ("weight", "weight_scale_inv"),
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    ),
    "fp8-channel": Scheme(
        (1, 0),
        partial(_linear, _E4M3_MAX),
        _to_e4m3,
        ("weight", "weight_scale"),
        _compressed("float-quantized", {**_FLOAT8, **_CHANNEL}, {**_FLOAT8, **_TOKEN}),
    ),
    "int8-channel": Scheme(
        (1, 0),
        partial(_linear, _INT8_MAX),
        _to_int8,
        ("weight", "weight_scale"),
        _compressed("int-quantized", {**_INT8, **_CHANNEL}, {**_INT8, **_TOKEN}),
    ),
    "mxfp8": Scheme(
        (1, 32),
        _power_of_two,
        _to_e4m3,
        ("weight", "weight_scale"),
        _compressed("mxfp8-quantized", _MX, _MX),
        _to_e8m0,
        _from_e8m0,
    ),
    "nvfp4": Scheme(
        (1, 16),
        _of_unit,
        _to_fp4,
        ("weight_packed", "weight_scale", "weight_global_scale"),
        _compressed("nvfp4-pack-quantized", {**_NV, "scale_dtype": "torch.float8_e4m3fn"}, None),
        lambda scale: scale.to(torch.float8_e4m3fn),
        packed=2,
    ),
}


@dataclass
class _Last:
    """A matrix as it was quantised last. `digests`: of its source, band by band; `codes`: kept where bands
    do not change; both may be missing."""

    scale: Any
    unit: Any
    digests: tuple[bytes, ...] = ()
    codes: Any = None


class Quantiser:
    """Quantises a model for one run, version after version. Not thread-safe.

    Examples:
        >>> quantiser = Quantiser("fp8-block")
        >>> publisher.publish(quantiser(model.state_dict()), step=step)
    """

    def __init__(
        self,
        scheme: str,
        *,
        hold: float = 0.0,
        ignore: Iterable[str] = IGNORE,
        keep_bytes: int = 1 << 30,
    ) -> None:
        """Chooses a format.

        Args:
            scheme: A name in `SCHEMES`.
            hold: A scale stays while it is between that of the block's largest value and that of (1 + hold)^2
                times it; else it becomes that of (1 + hold) times. 0: scales follow the weights alone.
            ignore: Globs of matrices that stay as they are.
            keep_bytes: Of codes that are kept because their source does not change. Scales are kept in any
                case.

        Raises:
            Refused: The scheme is unknown.
        """
        if scheme not in SCHEMES:
            raise Refused(f"unknown scheme {scheme!r}", remedy=f"give one of {', '.join(SCHEMES)}")
        self.scheme, self._factor = SCHEMES[scheme], 1.0 + hold
        self._ignore, self._keep_bytes = tuple(ignore), keep_bytes
        self._last: dict[str, _Last] = {}
        self.reused = 0
        """elements whose codes were not computed again, of the last call"""

    def __call__(
        self, named_tensors: Iterable[tuple[str, Any]] | Mapping[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        """Pairs for `publish`, `submit`, `cast_like` and `HandOver.put`. A matrix called `*.weight` is
        quantised when its turn comes; everything else passes. What was yielded does not change later.

        Raises:
            Refused: A matrix is a shard, is not finite, or does not divide into the scheme's blocks.
        """
        self.reused, self._room = 0, self._keep_bytes
        pairs: Iterable[tuple[str, Any]] = pairs_of(named_tensors)
        units: Mapping[str, Any] = {}
        if self.scheme.names[2:]:
            pairs = list(pairs)
            units = self._units(pairs)
        for name, tensor in pairs:
            if not self._takes(name, tensor):
                yield name, tensor
                continue
            made = self._quantised(name, self._matrix(name, tensor), units.get(name))
            for own, one in zip(self.scheme.names, made, strict=False):
                yield name.removesuffix("weight") + own, one

    def start_from(self, checkpoint: str | Path) -> None:
        """Holds the scales of a quantised checkpoint: after a restart of the publisher's local one."""
        own = self.scheme.names
        with closing(CheckpointWeights(Path(checkpoint))) as weights:
            found = _copies(weights, tuple(f".{one}" for one in own[1:]))
            held = {name: _tensor(tensor) for name, tensor in found}
        for name in held:
            module = name.removesuffix(own[1])
            if module != name:
                unit = held.get(module + own[2]) if own[2:] else None
                self._last[f"{module}weight"] = _Last(held[name], unit)

    def config(self, matrices: Iterable[str]) -> dict[str, Any]:
        """`quantization_config` for a model with matrices of these names."""
        left = {name.removesuffix(".weight") for name in matrices if self._ignores(name)}
        key = "ignore" if "config_groups" in self.scheme.config else "modules_to_not_convert"
        return {**self.scheme.config, key: sorted({"lm_head", *left})}

    def _ignores(self, name: str) -> bool:
        return any(fnmatchcase(name, glob) for glob in self._ignore)

    def _takes(self, name: str, tensor: Any) -> bool:
        is_matrix = name.endswith(".weight") and len(tensor.shape) == 2 and 0 not in tensor.shape
        return is_matrix and not self._ignores(name) and dtype_of(name, tensor) in FLOATS

    def _matrix(self, name: str, tensor: Any) -> Any:
        if shard_of(name, tensor) is not None:
            raise Refused(
                f"{name} is a shard; its scales need the whole matrix", remedy="give tensor.full_tensor()"
            )
        columns, (high, wide) = int(tensor.shape[1]), self.scheme.block
        if high == 1 and wide and columns % wide:
            raise Refused(
                f"{name}: {columns} columns do not divide into blocks of {wide}",
                remedy="add it to ignore= here and for the base",
            )
        return _tensor(tensor).detach().contiguous()

    def _units(self, pairs: Iterable[tuple[str, Any]]) -> Mapping[str, Any]:
        """Global scales by name: one for matrices that engines join."""
        largest: dict[str, Any] = {}
        keys: dict[str, str] = {}
        for name, tensor in pairs:
            if self._takes(name, tensor):
                parent, _, own = name.removesuffix(".weight").rpartition(".")
                key = keys[name] = f"{parent}.{next((one[0] for one in _FUSED if own in one), own)}"
                found = self._matrix(name, tensor).abs().amax().float()
                largest[key] = torch.maximum(found, largest.get(key, found))
        units: dict[str, Any] = {}
        for name, key in keys.items():
            if key not in units:
                last = self._last.get(name)
                units[key] = self._held(_unit, largest[key], None if last is None else last.unit)
        return {name: units[key] for name, key in keys.items()}

    def _held(self, scale: Callable[[Any], Any], largest: Any, last: Any) -> Any:
        fresh = scale(largest * self._factor)
        if self._factor == 1.0 or last is None or last.shape != fresh.shape:
            return fresh
        ends = scale(largest), scale(largest * self._factor**2)
        stays = (last >= torch.minimum(*ends)) & (last <= torch.maximum(*ends))
        return torch.where(stays, last.to(fresh.device), fresh)

    def _quantised(self, name: str, source: Any, unit: Any) -> tuple[Any, ...]:
        """Codes, scale and global scale."""
        (rows, columns), high = source.shape, self.scheme.block[0]
        step = max(1, _BAND // columns // high) * high
        last = self._last.get(name)
        if last is not None and unit is not None and not (last.unit is not None and unit.equal(last.unit)):
            last = None
        starts = range(0, rows, step)
        on_host = source.device.type == "cpu"
        digests = tuple(_digest(source[at : at + step]) for at in starts) if on_host else ()
        known = () if last is None else last.digests
        same = {at for at, one, other in zip(starts, digests, known, strict=False) if one == other}
        kept = None if last is None else last.codes
        parts = []
        for at in starts:
            blocks = slice(at // high, -(-(at + step) // high))
            if last is not None and kept is not None and at in same:
                parts.append((kept[at : at + step], last.scale[blocks]))
                self.reused += min(step, rows - at) * columns
            else:
                held = None if last is None else self.scheme.load(last.scale[blocks])
                parts.append(self._band(name, source[at : at + step], held, unit))
        if last is not None and kept is not None and len(same) == len(starts):
            codes, scale = kept, last.scale
        else:
            codes, scale = map(torch.cat, zip(*parts, strict=True))
        keep = bool(same) and codes.nbytes <= self._room
        self._room -= codes.nbytes if keep else 0
        self._last[name] = _Last(scale, unit, digests, codes if keep else None)
        return (codes, scale) if unit is None else (codes, scale, unit.clone())

    def _band(self, name: str, source: Any, held: Any, unit: Any) -> tuple[Any, Any]:
        rows, columns = source.shape
        high, wide = self.scheme.block[0], self.scheme.block[1] or columns
        values = torch.nn.functional.pad(source.float(), (0, -columns % wide, 0, -rows % high))
        blocks = values.view(values.shape[0] // high, high, values.shape[1] // wide, wide)
        largest = blocks.abs().amax(dim=(1, 3))
        if not bool(torch.isfinite(largest).all()):
            raise Refused(f"{name} has NaN or infinite values", remedy="check the training run")
        scale = self._held(lambda largest: self.scheme.scale(largest, unit), largest, held)
        divisor = scale if unit is None else scale / unit
        codes = self.scheme.codes((blocks / divisor[:, None, :, None]).view(values.shape))
        return codes[:rows, : columns // self.scheme.packed].contiguous(), self.scheme.store(scale)


def quantise(
    named_tensors: Iterable[tuple[str, Any]] | Mapping[str, Any], scheme: str | Quantiser
) -> Iterator[tuple[str, Any]]:
    """As `Quantiser.__call__`. A name of a scheme: nothing is remembered, scales follow the weights alone."""
    return (Quantiser(scheme, keep_bytes=0) if isinstance(scheme, str) else scheme)(named_tensors)


def quantise_checkpoint(source: str | Path, target: str | Path, scheme: str | Quantiser) -> None:
    """Makes the base of a quantised run in the new directory `target`: the Hugging Face checkpoint `source`,
    quantised in memory, with `quantization_config` in its config.json. Raises Refused as `Quantiser` does."""
    from huggingface_hub import save_torch_state_dict

    quantiser = Quantiser(scheme, keep_bytes=0) if isinstance(scheme, str) else scheme
    target = Path(target)
    if exists(target):
        raise Refused(f"{target} exists", remedy="give a new directory")
    with (
        closing(CheckpointWeights(Path(source))) as weights,
        tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as made,
    ):
        directory = Path(made) / target.name
        directory.mkdir()
        for name, path in side_files(weights.checkpoint).files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, directory / name)
        if "quantization_config" in read_config(directory / CONFIG):
            raise Refused(f"{source} is quantised already", remedy="give a checkpoint in bf16 or fp32")
        matrices = [spec.name for spec in weights.table if len(spec.shape) == 2]
        said = {**read_config(directory / CONFIG), "quantization_config": quantiser.config(matrices)}
        (directory / CONFIG).write_text(json.dumps(said, indent=2) + "\n")
        tensors = {name: _tensor(tensor) for name, tensor in quantiser(_copies(weights))}
        save_torch_state_dict(tensors, directory, max_shard_size=_SHARD_BYTES)
        weights.finish()
        directory.rename(target)


class QuantisedWeights(GivenWeights):
    """A checkpoint as `quantise` makes it, in memory."""

    by_flags = True

    def __init__(self, weights: NewWeights, scheme: str) -> None:
        super().__init__(quantise(_copies(weights), scheme))
        self._weights, self.facts = weights, weights.facts

    def finish(self) -> None:
        self._weights.finish()

    def close(self) -> None:
        super().close()
        self._weights.close()


def _copies(weights: NewWeights, ends: tuple[str, ...] = ("",)) -> Iterator[tuple[str, RawTensor]]:
    for spec in weights.table:
        if spec.name.endswith(ends):
            words = weights.words_in(spec.name, 0, spec.words).copy()
            yield spec.name, RawTensor(spec.dtype, spec.shape, words)


def _tensor(given: Any) -> Any:
    if isinstance(given, CastTensor):
        given = given.made()
    if in_torch(given):
        return given
    dtype, shape = dtype_of("", given), given.shape
    flat = (
        given.flat if isinstance(given, RawTensor) else np.ascontiguousarray(given).reshape(-1).view(np.uint8)
    )
    # torch warns of arrays that may not be written, though it only reads them here
    flat = flat if flat.flags.writeable else flat.copy()
    return torch.from_numpy(flat).view(torch_dtype(dtype)).view(shape)


def _digest(rows: Any) -> bytes:
    return xxhash.xxh3_128_digest(rows.reshape(-1).view(torch.uint8).numpy())
