"""config.json: what a checkpoint says of its model beside the weights.

Hosts keep the one of the run's base. A trainer's must not say otherwise of what weights compute; but
libraries write it anew with each of their releases, with more members, fewer, and notes of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightcast.shared.channel.file_record import file_record
from weightcast.shared.channel.records import FileRecord
from weightcast.shared.errors import Refused, WrongRun
from weightcast.shared.files import durable
from weightcast.shared.files.entries import exists

CONFIG = "config.json"
Place = tuple[str, ...]
"""the names that lead to a member"""
_LIMIT = 64 << 20
_REMEDY = "hosts keep the base's: leave the file out, or save the base's own beside the weights"
_NOTHING = object()
_NAMED = 5
"""members that a message names"""
_LIBRARY = ("transformers_version", "_name_or_path", "auto_map", "unsloth_fixed", "unsloth_version")
_WRITTEN = ("architectures", "dtype", "torch_dtype", "use_bfloat16")
"""tensors are checked by their own names, dtypes and shapes; wrapped models are saved under other names"""
_RUNNING = ("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "torchscript")
_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache")
_TRAINING = ("initializer_range", "gradient_checkpointing", "router_aux_loss_coef", "router_jitter_noise")
_TASKS = ("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params")
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_eos_token_id")
_SAMPLING = ("max_length", "min_length", "temperature", "top_k", "top_p", "do_sample", "repetition_penalty")
_ASIDE = frozenset((*_LIBRARY, *_WRITTEN, *_RUNNING, *_OUTPUTS, *_TRAINING, *_TASKS, *_TOKENS, *_SAMPLING))
"""what says nothing of what weights compute"""
_SLIDES, _WINDOWS = "use_sliding_window", ("sliding_window", "max_window_layers")
"""Where it says no, transformers writes null for the window that it read."""
_ROPE_TYPES, _PLAIN_ROPES = ("type", "rope_type"), ("mrope", "default")
"""transformers writes one for the other; sections of their own tell multimodal positions"""
_ASIDE_ENDS = ("dropout", "pdrop", "drop_rate", "layerdrop")


def read_config(path: Path) -> dict[str, Any]:
    """Raises FileNotFoundError, and Refused where it is no JSON object."""
    try:
        # not the strict reader: configurations of some models hold an Infinity
        said = json.loads(durable.read_file(path, _LIMIT, follow_links=True))
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        raise Refused(f"{path} is not a JSON object", remedy="give an HF checkpoint directory")
    return said


def check_config(given: Path, base: Path | None, records: Sequence[FileRecord]) -> None:
    """Raises WrongRun where `given`, a trainer's config.json, says otherwise than the base's of what the
    weights compute, and Refused where it is not JSON. `base`: a directory with the base's own; `records`: of
    its files."""
    recorded = next((record for record in records if record.name == CONFIG), None)
    if recorded is None or not exists(given) or file_record(given).blake3 == recorded.blake3:
        return
    own = None if base is None else base / CONFIG
    if own is None or not exists(own) or file_record(own).blake3 != recorded.blake3:
        raise WrongRun(f"{given} is different from the run's, which is not here to compare", remedy=_REMEDY)
    found = sorted(_differing(read_config(own), read_config(given)))
    if found:
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        names = ", ".join(found[:_NAMED]) + more
        raise WrongRun(f"{given} says otherwise than the run's base: {names}", remedy=_REMEDY)


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """Members that both have, with different values: one alone is a default that one release writes out. In
    the same place, or where they are the only ones of their name: releases move members into others."""
    left, right = _members(one), _members(other)
    windows = one.get(_SLIDES) or other.get(_SLIDES) or _SLIDES not in one
    for place in {**left, **right}:
        name = place[-1]
        if name in _ASIDE or name.endswith(_ASIDE_ENDS) or (name in _WINDOWS and not windows):
            continue
        says, said = _at(one, place), _at(other, place)
        if said is _NOTHING and place in left:
            said = right.get(_only(name, left, right), _NOTHING)
        if _NOTHING not in (says, said) and not _alike(name, says, said):
            yield f"{'.'.join(place)} ({_shown(says)}, base, and {_shown(said)})"


def _members(config: Mapping[str, Any], within: Place = ()) -> dict[Place, Any]:
    """Of objects what they hold, but for empty ones."""
    found: dict[Place, Any] = {}
    for name, value in config.items():
        place = (*within, name)
        found |= _members(value, place) if isinstance(value, dict) and value else {place: value}
    return found


def _at(config: Mapping[str, Any], place: Place) -> Any:
    found: Any = config
    for name in place:
        found = found.get(name, _NOTHING) if isinstance(found, dict) else _NOTHING
    return found


def _only(name: str, left: Iterable[Place], right: Iterable[Place]) -> Place:
    """The place of the one member of that name on the right, if the left has no more than one either."""
    places = [place for place in right if place[-1] == name]
    return places[0] if len(places) == 1 == sum(place[-1] == name for place in left) else ()


def _alike(name: str, left: object, right: object) -> bool:
    if name in _ROPE_TYPES and left in _PLAIN_ROPES and right in _PLAIN_ROPES:
        return True
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def _shown(value: object, longest: int = 40) -> str:
    text = json.dumps(value)
    return text if len(text) <= longest else f"{text[:longest]}..."
