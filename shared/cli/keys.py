"""Verbs about keys: `keygen`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weightcast.shared.base.errors import Refused
from weightcast.shared.channel.signing import PrivateKey, write_private_key
from weightcast.shared.cli.app import JsonOption
from weightcast.shared.cli.output import Output
from weightcast.shared.files import durable
from weightcast.shared.files.paths import exists, is_directory, is_file, is_link

_NAME = "weightcast.key"


def register_keys(app: typer.Typer) -> None:
    app.command("keygen")(keygen)


def keygen(
    out: Annotated[Path, typer.Option("--out", help="File for the private key, or a directory for both.")],
    as_json: JsonOption = False,
) -> None:
    """Make a key that signs versions: the private one for the publisher, FILE.pub for the hosts."""
    path = out / _NAME if is_directory(out) else out
    key = make_key(path)
    facts = {
        "key_id": key.public.id,
        "public_key": str(key.public),
        "sign_key": str(path),
        "trusted_key": str(_public_path(path)),
    }
    Output(json=as_json).result(facts, lambda console: console.print(str(key.public), soft_wrap=True))


def make_key(path: Path) -> PrivateKey:
    """Writes `path`, for its owner alone, and `path`.pub. Raises Refused when one of them is there."""
    key = PrivateKey.generate()
    public = _public_path(path)
    try:
        _refuse_present(public)
        write_private_key(path, key)
        line = f"{key.public}\n".encode()
        try:
            durable.create(public, line)
        except BaseException:
            # nobody has it yet, and the next try is to find neither of the two
            path.unlink()
            if is_file(public) and public.read_bytes() == line:
                public.unlink()
            raise
    except FileExistsError as error:
        raise Refused(f"{path} is there already", remedy="keys are never overwritten") from error
    except OSError as error:
        where = error.filename or path
        raise Refused(f"{where}: {error.strerror}", remedy="check the directory and its space") from error
    return key


def _public_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.pub")


def _refuse_present(path: Path) -> None:
    if exists(path) or is_link(path):
        raise Refused(f"{path} is there already", remedy="keys are never overwritten")
