"""What a checkpoint says beside its weights: config.json; tokenizer, chat template, generation and processor
files.

Hosts keep those of the run's base, unless versions carry others. A trainer's config.json must not say
otherwise of what weights compute; but libraries write these files anew with every save, with more members,
fewer, and notes of their own: JSON is compared by what it says (docs/adr/0016).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from weightcast.shared.base.elements import MAIN
from weightcast.shared.base.errors import DamagedFile, Refused, WrongRun
from weightcast.shared.channel.run_files import CARRIED_LIMIT, Base, FileRecord, is_adapter, is_carriable
from weightcast.shared.files import durable
from weightcast.shared.files.hf_checkpoint import ADAPTER_CONFIG, Checkpoint
from weightcast.shared.files.paths import is_file, matching, printable
from weightcast.shared.files.safetensors import START, check_kind

CONFIG = "config.json"
Place = tuple[str, ...]
"""the names that lead to a member"""
_LIMIT = 256 << 20
_REMEDY = "hosts keep the base's: leave the file out, or save the base's own next to the weights"
_NAMED = 5
"""members that a message names"""
_NOTHING = object()
_LIBRARY = ("transformers_version", "_name_or_path", "auto_map", "unsloth_fixed", "unsloth_version")
_WRITTEN = ("architectures", "dtype", "torch_dtype", "use_bfloat16")
"""tensors are checked by their own names, dtypes and shapes; wrapped models are saved under other names"""
_RUNNING = ("_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "torchscript")
_OUTPUTS = ("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache")
_TRAINING = ("initializer_range", "gradient_checkpointing", "router_aux_loss_coef", "router_jitter_noise")
_TASKS = ("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params")
_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_eos_token_id")
_SAMPLING = ("max_length", "min_length", "temperature", "top_k", "top_p", "do_sample", "repetition_penalty")
READ_BY_ENGINES = frozenset((*_TOKENS, *_SAMPLING))
"""what engines take from it for their requests, where generation_config.json does not say it"""
_ASIDE = frozenset((*_LIBRARY, *_WRITTEN, *_RUNNING, *_OUTPUTS, *_TRAINING, *_TASKS, *_TOKENS, *_SAMPLING))
"""what says nothing of what weights compute"""
_ASIDE_ENDS = ("dropout", "pdrop", "drop_rate", "layerdrop")
_UNSAID = (None, "auto")
"""as it follows from the rest; but no window is none"""
_SLIDES, _WINDOWS = "use_sliding_window", ("sliding_window", "max_window_layers")
"""where it says no, a window that was read is written as null"""
_POSITIONS = "max_position_embeddings"
_ROPE, _ROPES = "rope_scaling", ("rope_scaling", "rope_parameters")
_FLOAT, _FLOATS = "__float__", ("Infinity", "-Infinity", "NaN")
_ROPE_TYPES = {"mrope": "default", "su": "longrope"}
"""older names; sections of their own tell multimodal positions"""


def read_config(path: Path) -> dict[str, Any]:
    """Raises FileNotFoundError, and Refused where it is no JSON object."""
    return _parsed(read_bytes(path), path)


def read_bytes(path: Path) -> bytes:
    try:
        return durable.read_file(path, _LIMIT, follow_links=True)
    except DamagedFile as error:
        raise DamagedFile(error.message, remedy=error.remedy or _REMEDY) from error


def _parsed(data: bytes, path: Path) -> dict[str, Any]:
    try:
        # not the strict reader: configurations of some models hold an Infinity
        said = json.loads(data)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        check_kind(data[:START], path)
        raise Refused(f"{path} is not a JSON object", remedy="correct the file")
    return said


def check_config(given: Path, base: Path | None, records: Sequence[FileRecord]) -> None:
    """Raises WrongRun where `given`, a trainer's config.json, says otherwise than the base's of what the
    weights compute, and Refused where it is not JSON. `base`: a directory with the base's own; `records`: of
    its files."""
    recorded = next((record.blake3 for record in records if record.name == CONFIG), None)
    theirs = bytes_of(given)
    if recorded is None or theirs is None or digest_of(theirs) == recorded:
        return
    own = None if base is None else bytes_of(base / CONFIG)
    if base is None or own is None or digest_of(own) != recorded:
        raise WrongRun(f"{given} differs from the run's config, which is not available here", remedy=_REMEDY)
    try:
        found = sorted(_differing(_parsed(own, base / CONFIG), _parsed(theirs, given)))
    except RecursionError as error:
        raise Refused(f"{given} is nested too deeply", remedy=_REMEDY) from error
    if found:
        more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        names = ", ".join(found[:_NAMED]) + more
        raise WrongRun(f"{given} contradicts the run's base: {names}", remedy=_REMEDY)


def bytes_of(path: Path) -> bytes | None:
    try:
        return read_bytes(path)
    except FileNotFoundError:
        return None


def digest_of(data: bytes) -> str:
    return blake3(data).hexdigest()


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """Members that both have, with different values: one alone is a default that one release writes out. In
    the same place, or where they are the only ones of their name: releases move members into others."""
    left, right = _plain(one), _plain(other)
    _complete_ropes(left, right)
    ours, theirs = dict(_members(left)), dict(_members(right))
    once, elsewhere = _only(ours), _only(theirs)
    for place in {**ours, **theirs}:
        says, said = _at(left, place), _at(right, place)
        if said is _NOTHING and place[-1] in once and place[-1] in elsewhere:
            said = theirs[elsewhere[place[-1]]]
        if _NOTHING not in (says, said) and not _alike(place[-1], says, said):
            yield f"{'.'.join(place)} ({_shown(says)}, base, and {_shown(said)})"


def _plain(config: Mapping[str, Any], slides: object = None) -> dict[str, Any]:
    """In one way of saying it, without what is aside. `slides`: as the object around it says."""
    slides = config.get(_SLIDES, slides)
    found: dict[str, Any] = {}
    for name, value in config.items():
        aside = name in _ASIDE or name.endswith(_ASIDE_ENDS) or (slides is False and name in _WINDOWS)
        if aside or name in _ROPES:
            continue
        if not isinstance(value, dict) or value.keys() == {_FLOAT}:
            found[name] = _value(value)
        elif inner := _plain(value, slides):
            found[name] = inner
    return found | _rope_of(config)


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [_value(one) for one in value]
    if isinstance(value, dict) and value.keys() == {_FLOAT} and value[_FLOAT] in _FLOATS:
        return float(value[_FLOAT])
    return value


def _rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """How positions are turned: `rope_scaling` of older releases and `rope_parameters` of newer ones."""
    said = [config[name] or {} for name in _ROPES if name in config]
    if not said:
        return {}
    if not all(isinstance(one, dict) for one in said):
        return {name: config[name] for name in _ROPES if name in config}
    merged = {name: value for one in reversed(said) for name, value in one.items()}
    if merged and all(isinstance(value, dict) for value in merged.values()):  # one for each type of layers
        return {_ROPE: {name: _turned(value) for name, value in merged.items()}}
    theta = (
        {} if "rope_theta" in config or "rope_theta" not in merged else {"rope_theta": merged["rope_theta"]}
    )
    return {_ROPE: _turned({name: value for name, value in merged.items() if name != "rope_theta"}), **theta}


def _turned(rope: Mapping[str, Any]) -> dict[str, Any]:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    rest = {name: value for name, value in rope.items() if name not in ("type", "rope_type")}
    return {**rest, "rope_type": _ROPE_TYPES.get(kind, kind) if isinstance(kind, str) else kind}


def _complete_ropes(left: dict[str, Any], right: dict[str, Any]) -> None:
    """Where a whole configuration says nothing of how positions are scaled, they are not."""
    for one, other in ((left, right), (right, left)):
        names = {name for place, _ in _members(one) for name in place}
        if _ROPE in other and _POSITIONS in names and _ROPE not in names:
            one[_ROPE] = _turned({})


def _members(config: Mapping[str, Any], within: Place = ()) -> Iterator[tuple[Place, Any]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _members(value, (*within, name))
        else:
            yield (*within, name), value


def _at(config: Mapping[str, Any], place: Place) -> Any:
    found: Any = config
    for name in place:
        found = found.get(name, _NOTHING) if isinstance(found, dict) else _NOTHING
    return found


def _only(members: Mapping[Place, Any]) -> dict[str, Place]:
    """Places of those that are the only ones of their name."""
    counts = Counter(place[-1] for place in members)
    return {place[-1]: place for place in members if counts[place[-1]] == 1}


def _alike(name: str, left: object, right: object) -> bool:
    if name not in _WINDOWS and (left in _UNSAID or right in _UNSAID):
        return True
    if left != left and right != right:  # not a number, both
        return True
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def _shown(value: object, longest: int = 40) -> str:
    text = json.dumps(value)
    return text if len(text) <= longest else f"{text[:longest]}..."


AdapterConfig = Mapping[str, Any] | str | Path | None
"""peft's, or a draft model's, as a mapping or a file; None: that of the previous version"""


def config_of(component: str) -> str:
    """Name of the file with the configuration of a component other than main."""
    return ADAPTER_CONFIG if is_adapter(component) else CONFIG


def component_config(config: AdapterConfig, component: str) -> Mapping[str, bytes]:
    """What a component's version carries, whose tensors are given with this configuration. Raises Refused."""
    if config is None:
        return {}
    try:
        said = config if isinstance(config, Mapping) else read_config(Path(config))
        return {config_of(component): json.dumps(said, indent=2, sort_keys=True, default=_plainly).encode()}
    except (TypeError, FileNotFoundError) as error:
        raise Refused(
            f"config=: {error}", remedy="give peft_config.to_dict(), or the path of peft's file"
        ) from error


def _plainly(value: object) -> object:
    """peft has sets, and enums, which are text."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


_TEMPLATE, _TEMPLATES = "chat_template.jinja", "additional_chat_templates"
_TOKENIZER = "tokenizer_config.json"
_CONFIG = re.compile(
    r"config\.json|(.*/)?((.*tokenizer.*|vocab.*|merges|added_tokens|special_tokens_map|chat_template.*|generation_config"
    r"|.*processor.*|.*feature_extractor.*)\.(json|txt)|(.*chat_template.*|.*)\.jinja"
    r"|(.*tokenizer.*|spiece|sentencepiece.*)\.model|.*\.tiktoken)"
)
CONFIG_REMEDY = "publish with --carry-config to give them to hosts; all but config.json"
_WRITTEN_BY = frozenset(
    ("transformers_version", "_from_model_config", "name_or_path", "_name_or_path", "tokenizer_file",
     "special_tokens_map_file", "vocab_file", "merges_file", "added_tokens_file")
)  # fmt: skip
"""members that say who wrote the file, and where"""


def is_config(name: str) -> bool:
    """Whether a file of this name, relative to its checkpoint, is compared with the base's."""
    return _CONFIG.fullmatch(name) is not None


def config_text(changed: tuple[str, ...]) -> str:
    return f"{printable(', '.join(changed))} (hosts keep the base's; {CONFIG_REMEDY})"


def changed_configs(export: Checkpoint, own: Path | None, base: Base) -> Mapping[str, str]:
    """BLAKE3 hex by name of the files; empty where one says what the base's says. `own`: a directory with the
    base's; without it every other byte counts."""
    known = {record.name: record.blake3 for record in base.all_files}
    found: dict[str, str] = {}
    aside = _WRITTEN_BY
    if own is not None and _template(own) == _template(export.directory):
        # releases of transformers moved it from one of the two files into the other
        aside = aside | {"chat_template"}
        known = {**known, _TEMPLATE: digest_of(bytes_of(export.directory / _TEMPLATE) or b"")}
        if _template(own) is not None:
            found[_TEMPLATE] = ""
    for name in sorted(set(_names(export, known))):
        data = read_bytes(export.directory / name)
        digest = digest_of(data)
        same = digest == known.get(name) or _says_the_same(name, data, own, known.get(name), aside)
        found[name] = "" if same else digest
    return found


def carried_bytes(export: Path, configs: Mapping[str, str], component: str = MAIN) -> Mapping[str, bytes]:
    """The files that differ and may be carried. Raises Refused for more than a version may carry, and where
    one changed since."""
    names = [name for name, digest in configs.items() if digest and is_carriable(name, component)]
    data = {name: read_bytes(export / name) for name in names}
    for name in names:
        if digest_of(data[name]) != configs[name]:
            raise Refused(
                f"{export / name} changed while it was read", remedy="publish it after it is written"
            )
    if (nbytes := sum(map(len, data.values()))) > CARRIED_LIMIT:
        raise Refused(
            f"{export}: {nbytes} bytes of changed config files, a version carries {CARRIED_LIMIT} at most",
            remedy="publish without --carry-config; make a channel from a base with these files",
        )
    return data


def _names(export: Checkpoint, known: Mapping[str, str]) -> Iterator[str]:
    for path in (*export.other_files, *matching(export.directory / _TEMPLATES, "*.jinja")):
        name = path.relative_to(export.directory).as_posix()
        if is_config(name):
            yield name
    yield from (name for name in known if is_config(name) and is_file(export.directory / name))


def _template(directory: Path) -> object:
    """The chat template, wherever it is written."""
    template = bytes_of(directory / _TEMPLATE)
    if template is not None:
        return template.decode(errors="replace")
    try:
        said = json.loads(read_bytes(directory / _TOKENIZER))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return said.get("chat_template") if isinstance(said, dict) else None


def _says_the_same(
    name: str, data: bytes, own: Path | None, digest: str | None, aside: frozenset[str]
) -> bool:
    ours = None if own is None or not name.endswith(".json") else bytes_of(own / name)
    if ours is None or digest_of(ours) != digest:
        return False
    try:
        said, base = json.loads(data), json.loads(ours)
        if isinstance(said, dict) and isinstance(base, dict):
            if name == CONFIG:
                # what the weights compute is compared by check_config
                return all(said[one] == base[one] for one in READ_BY_ENGINES & said.keys() & base.keys())
            said, base = ({n: each for n, each in one.items() if n not in aside} for one in (said, base))
        return bool(said == base)
    except (ValueError, RecursionError):
        return False
