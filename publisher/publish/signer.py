"""Which key signs what is published, and whose versions are continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weightcast.shared.base.errors import Refused
from weightcast.shared.channel.layout import Layout
from weightcast.shared.channel.signing import (
    PrivateKey,
    Trust,
    load_private_key,
    signature_path,
    trusted_keys,
)
from weightcast.shared.files.paths import exists


@dataclass(frozen=True)
class Vouching:
    """`trust` holds the publisher's own key too. None: nothing is signed, nothing is checked."""

    key: PrivateKey | None = None
    trust: Trust | None = None

    @classmethod
    def load(cls, sign_key: str | Path | None, trusted: Sequence[str | Path] = ()) -> Vouching:
        """Raises Refused for files that are no keys."""
        if sign_key is None:
            return cls(None, Trust.load(trusted))
        key = load_private_key(Path(sign_key))
        others = [other for text in trusted for other in trusted_keys(text)]
        return cls(key, Trust.of([key.public, *others]))

    def check_owner(self, layout: Layout) -> None:
        """Raises Refused where hosts would refuse what this publisher writes, or it what it wrote itself."""
        if self.key is not None:
            return
        if self.trust is not None:
            raise Refused(
                "a publisher with trusted keys and none to sign with would refuse its own versions",
                remedy="give --sign-key, or leave out --trusted-key",
            )
        signature = signature_path(layout.base_json)
        if exists(signature):
            raise Refused(
                f"{layout.channel} is signed ({signature.name}), and no key is given to sign with",
                remedy="give --sign-key; to sign no longer, remove that file and the hosts' --trusted-key",
            )


UNSIGNED = Vouching()
