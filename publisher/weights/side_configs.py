"""Tokenizer, chat template, generation and processor files of an export that are not the base's.

Hosts keep the base's: weights alone are published. Libraries write some of these files anew with every save,
so JSON is compared by what it says, without the release and the paths that wrote it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from weightcast.publisher.weights.config import CONFIG, READ_BY_ENGINES, bytes_of, digest_of, read_bytes
from weightcast.shared.base.errors import Refused
from weightcast.shared.channel.run_files import CARRIED_LIMIT, Base, is_carriable
from weightcast.shared.files.hf_checkpoint import Checkpoint
from weightcast.shared.files.paths import is_file, matching, printable

_TEMPLATE, _TEMPLATES = "chat_template.jinja", "additional_chat_templates"
_TOKENIZER = "tokenizer_config.json"
_CONFIG = re.compile(
    r"config\.json|(.*/)?((.*tokenizer.*|vocab.*|merges|added_tokens|special_tokens_map|chat_template.*|generation_config"
    r"|.*processor.*|.*feature_extractor.*)\.(json|txt)|(.*chat_template.*|.*)\.jinja"
    r"|(.*tokenizer.*|spiece|sentencepiece.*)\.model|.*\.tiktoken)"
)
CARRY_CONFIG = "Versions carry changed tokenizer, chat template, generation and processor files to hosts."
CONFIG_REMEDY = "publish with --carry-config to give them to hosts; all but config.json"
_ASIDE = frozenset(
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
    aside = _ASIDE
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


def carried_bytes(export: Path, configs: Mapping[str, str]) -> Mapping[str, bytes]:
    """The files that differ and may be carried. Raises Refused for more than a version may carry, and where
    one changed since."""
    names = [name for name, digest in configs.items() if digest and is_carriable(name)]
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
    try:
        return ours is not None and digest_of(ours) == digest and _alike(name, data, ours, aside)
    except (ValueError, RecursionError):
        return False


def _alike(name: str, data: bytes, ours: bytes, aside: frozenset[str]) -> bool:
    said, base = json.loads(data), json.loads(ours)
    if name == CONFIG and isinstance(said, dict) and isinstance(base, dict):
        # what the weights compute is compared by check_config
        return all(said[member] == base[member] for member in READ_BY_ENGINES & said.keys() & base.keys())
    if isinstance(said, dict) and isinstance(base, dict):
        said, base = ({n: each for n, each in one.items() if n not in aside} for one in (said, base))
    return bool(said == base)
