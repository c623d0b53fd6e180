"""Making a channel from its base checkpoint. `channel.json` is the commit point."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightcast.publisher.publish.commit import Signer
from weightcast.publisher.weights.config import CONFIG, read_config
from weightcast.shared.base.errors import Refused, WrongRun
from weightcast.shared.channel.channel import Channel, may_lie_before
from weightcast.shared.channel.claims import require_fences
from weightcast.shared.channel.directory_store import mounted, open_store
from weightcast.shared.channel.layout import BASE_JSON, CHANNEL_JSON, LATEST, version_of
from weightcast.shared.channel.run_files import (
    BASE_LIMIT,
    Base,
    ChannelFile,
    parse_base,
    write_base,
    write_channel_file,
)
from weightcast.shared.channel.signing import PrivateKey, signature_key, stated_by_base, write_signature
from weightcast.shared.channel.store import AlreadyExists, Store
from weightcast.shared.checkpoint.update.sources import open_base, remember_base
from weightcast.shared.checkpoint.verify.seed import describe
from weightcast.shared.files.hf_checkpoint import Checkpoint
from weightcast.shared.files.paths import exists, require_directory, require_no_overlap
from weightcast.shared.files.probes import CHANNEL_NEEDS, require

_HEAD = "lm_head.weight"
_EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "transformer.wte.weight",
    "gpt_neox.embed_in.weight",
)
"""as transformers names them"""
_NAMED = 3
"""entries that a message names"""


def init_channel(
    channel: str | Path | Store,
    base: str | Path,
    *,
    frozen: Sequence[str] = (),
    aliases: Mapping[str, str] | None = None,
    run_id: str | None = None,
    threads: int = 1,
    advance: Callable[[int], None] | None = None,
    unfenced: bool = False,
    sign_key: str | Path | None = None,
    trusted_keys: Sequence[str | Path] = (),
) -> ChannelFile:
    """Makes a channel for runs that start from the checkpoint directory `base`.

    Args:
        channel: Where to make it.
        base: The checkpoint that trainer and hosts start from.
        frozen: Globs of tensors that never change.
        aliases: Tied tensors, by name: the name of the tensor that they equal.
        run_id: A random one if not given.
        threads: That hash the base.
        advance: Called with the bytes hashed.
        sign_key: File of the key that signs the base.
        trusted_keys: Further keys, as text or files.
        unfenced: As of PublisherOptions.

    Returns:
        The channel's file; of an existing channel, if it was made from the same base.

    Raises:
        Refused: The directory holds anything else, or is in the base.
        WrongRun: The channel was made from another base.
        Untrusted: None of the keys signed the existing channel's base.
    """
    store, base = open_store(channel), Path(base)
    signer = Signer.load(sign_key, trusted_keys)
    checkpoint = open_base(base)
    _make_directory(store, base)
    if _is_made(store):
        made = Channel.open(store, signer.trust)
        _check_rules(made, frozen, aliases or {})
        return _same(made, checkpoint, threads, advance)
    _refuse_foreign(store)
    require_fences(store, unfenced=unfenced)
    described = describe(
        checkpoint, run_id or f"run-{secrets.token_hex(6)}", threads=threads, advance=advance
    )
    ties = {**ties_of(base, checkpoint), **(aliases or {})}
    _check_aliases(ties, described)
    described = _put_base(store, described, run_id)
    file = ChannelFile(described.run_id, time.time(), tuple(frozen), ties, 0)
    if not _is_made(store):
        _sign_base(store, described, signer.key)
    try:
        store.create(CHANNEL_JSON, write_channel_file(file))
    except AlreadyExists:
        # by somebody else meanwhile
        made = Channel.open(store, signer.trust)
        _check_rules(made, frozen, aliases or {})
        return made.require_ours()[0]
    remember_base(file.run_id, base)
    return file


def _make_directory(store: Store, base: Path) -> None:
    """Of a channel that will be in a local directory; other stores need none."""
    directory = mounted(store)
    if directory is None:
        return
    require_directory("--channel", directory)
    if not _is_made(store):
        require_no_overlap("--channel", directory, "--base", base)
        require("--channel", directory, CHANNEL_NEEDS)
    directory.mkdir(parents=True, exist_ok=True)


def _is_made(store: Store) -> bool:
    return store.stat(CHANNEL_JSON) is not None


def _put_base(store: Store, described: Base, run_id: str | None) -> Base:
    """`described`, or what lies there from an attempt that came to nothing or is under way: that of the same
    base is taken over, its run included. Nothing that somebody may have read already is replaced."""
    try:
        store.create(BASE_JSON, write_base(described))
        return described
    except AlreadyExists:
        found = parse_base(store.read(BASE_JSON, BASE_LIMIT))
    same = found.root == described.root and not _differing_files(described, found)
    if not same or run_id not in (None, found.run_id):
        raise WrongRun(
            f"{store.place(BASE_JSON)} belongs to another base or run, and {store.place()} is not a channel "
            "yet",
            remedy="wait for the other init; if there is none, remove the file",
        )
    return found


def _sign_base(store: Store, base: Base, key: PrivateKey | None) -> None:
    if key is None:
        # of an attempt that came to nothing
        store.delete(signature_key(BASE_JSON))
    else:
        store.replace(signature_key(BASE_JSON), write_signature(stated_by_base(base, time.time()), key))


def _refuse_foreign(store: Store) -> None:
    names = sorted(store.names())
    if LATEST in names or any(version_of(name) is not None for name in names):
        raise Refused(
            f"{store.place()} holds versions and no channel.json: another system publishes there",
            remedy="use a directory of its own",
        )
    # of an init that came to nothing or is under way
    ours = (BASE_JSON, signature_key(BASE_JSON))
    others = [name for name in names if not may_lie_before(name) and name not in ours]
    if others:
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        raise Refused(
            f"{store.place()} is not empty: it holds {', '.join(others[:_NAMED])}{more}",
            remedy="make a channel in a directory of its own",
        )


def _same(
    channel: Channel, checkpoint: Checkpoint, threads: int, advance: Callable[[int], None] | None
) -> ChannelFile:
    file, known = channel.require_ours()
    described = describe(checkpoint, known.run_id, threads=threads, advance=advance)
    files = _differing_files(described, known)
    if described.root != known.root or files:
        named = f": {', '.join(files[:_NAMED])}" if files else ""
        raise WrongRun(
            f"{channel.place} was made from another base than {checkpoint.directory}{named}",
            remedy="give the base that the channel was made from, or make another channel",
        )
    remember_base(file.run_id, checkpoint.directory)
    return file


def _differing_files(described: Base, known: Base) -> list[str]:
    """Names of files next to the weights that one has not, or has with other bytes."""
    return sorted({record.name for record in set(described.all_files) ^ set(known.all_files)})


def _check_rules(made: Channel, frozen: Sequence[str], aliases: Mapping[str, str]) -> None:
    """What is asked for again must be what the channel was made with; what is not asked for stays."""
    file, _ = made.require_ours()
    others = [f"alias {a}={b}" for a, b in aliases.items() if file.aliases.get(a) != b]
    if frozen and set(frozen) != set(file.frozen):
        others.append(f"frozen {', '.join(frozen)}")
    if others:
        raise Refused(
            f"{made.place} was made without {'; '.join(others)}",
            remedy="leave them out, or make another channel: they are fixed for a run",
        )


def ties_of(base: Path, checkpoint: Checkpoint) -> dict[str, str]:
    """What `tie_word_embeddings` says: the head is the embedding. Where neither config.json nor the weights
    know of a head, one that is given must be the embedding too."""
    config, names = base / CONFIG, checkpoint.table.numbers
    embedding = next((name for name in _EMBEDDINGS if name in names), None)
    if not exists(config) or embedding is None:
        return {}
    said = _says_tied(read_config(config))
    tied = said if said is not None else _HEAD not in names
    return {_HEAD: embedding} if tied else {}


def _says_tied(config: Mapping[str, Any]) -> bool | None:
    """Of the model, or of its text part where it has several; None: nothing."""
    for part in (config, config.get("text_config")):
        said = part.get("tie_word_embeddings") if isinstance(part, dict) else None
        if isinstance(said, bool):
            return said
    return None


def _check_aliases(aliases: Mapping[str, str], base: Base) -> None:
    for alias, name in aliases.items():
        if name not in base.table.numbers or name in aliases:
            raise Refused(
                f"alias {alias}={name}: {name} is not a tensor of the base",
                remedy="give A=B with B as the base's files name it",
            )
