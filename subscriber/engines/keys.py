"""Keys of engines: which one goes with which request, and what a refusal says about it.

SGLang takes `--api-key` for its user and info routes and `--admin-api-key`, where it has one, for its control
routes. As far as adapters call them, its info routes are GET and its control routes POST.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import httpx

from weightcast.subscriber.engines.base import BadEngineOption, EngineSpec, KeyRefused, Kind

DENIED = frozenset({401, 403, 407})
"""The request was refused for its credentials, in front of the handler: it had no effect."""
ADMIN_LOOK, READ_LOOK = "/get_weights_by_name", "/get_weights_by_name?"
"""A control route of SGLang by GET, with either key; without a name it says only whether the key fits."""
_PROXY = "use the engine's own address, or let the proxy pass this host"
_GIVE = "give it by api_key_env=VARIABLE"
_GIVE_TWO = f"{_GIVE}, and that of --admin-api-key by admin_api_key_env=VARIABLE"
_WANTED: Mapping[Kind, str] = {
    "sglang": "the server's --api-key",
    "vllm": "the server's --api-key",
    "webhook": "the token that the receiver accepts",
}


@dataclass(frozen=True)
class Key:
    """`value`: empty where no key is given; `place`: where it comes from; `remedy`: when it is refused."""

    value: str = ""
    place: str = ""
    remedy: str = _GIVE


@dataclass(frozen=True)
class Keys:
    read: Key = Key()
    control: Key = Key()

    @property
    def are_one(self) -> bool:
        return self.read.value == self.control.value

    def of(self, method: str, path: str) -> Key:
        return self.control if method == "POST" or path == ADMIN_LOOK else self.read


def one_key(value: str | None, variable: str) -> Keys:
    """The same for every request, from the variable alone."""
    key = Key(value or "", variable, f"set {variable} to the token of that daemon")
    return Keys(key, key)


def keys_of(spec: EngineSpec, environ: Mapping[str, str]) -> Keys:
    """Raises BadEngineOption for a variable that is not set to a key."""
    api = _key(spec, "api_key_env", spec.api_key_env, _WANTED[spec.kind], environ)
    admin = _key(spec, "admin_api_key_env", spec.admin_api_key_env, "the server's --admin-api-key", environ)
    if spec.kind != "sglang":
        return Keys(api, api)
    if api.value and admin.value:
        swapped = "; check that the two are not swapped"
        return Keys(replace(api, remedy=api.remedy + swapped), replace(admin, remedy=admin.remedy + swapped))
    if admin.value:
        remedy = "info routes take the server's --api-key: give it by api_key_env=VARIABLE"
        return Keys(replace(admin, remedy=remedy), admin)
    if api.value:
        remedy = f"{api.remedy}; if it has an --admin-api-key, give that by admin_api_key_env=VARIABLE"
        return Keys(api, replace(api, remedy=remedy))
    return Keys(api, Key(remedy=_GIVE_TWO))


def _key(spec: EngineSpec, option: str, variable: str | None, wanted: str, environ: Mapping[str, str]) -> Key:
    if variable is None:
        return Key()
    value = environ.get(variable, "")
    if not value or not value.isascii() or not value.isprintable() or value != value.strip():
        fault = (
            "holds line breaks, spaces or characters outside ASCII" if value else "is not set to an API key"
        )
        raise BadEngineOption(
            f"engine {spec.name}: {option}: the variable {variable} {fault}", remedy=f"set it to {wanted}"
        )
    return Key(value, f"{variable} ({option}=)", f"set {variable} to {wanted}")


def refusal(url: str, response: httpx.Response, key: Key) -> KeyRefused | None:
    """What an answer says about the request's key; None: nothing. `url`: as it may be shown."""
    status = response.status_code
    if status not in DENIED:
        return None
    scheme = response.headers.get("WWW-Authenticate", "").partition(" ")[0].lower()
    if status == httpx.codes.PROXY_AUTHENTICATION_REQUIRED:
        return KeyRefused(f"{url} answered {status}: a proxy wants credentials of its own", remedy=_PROXY)
    if scheme.isalpha() and scheme != "bearer":
        wants = f"{scheme[:20].title()} credentials, not an engine's key"
        return KeyRefused(f"{url} answered {status}: a proxy wants {wants}", remedy=_PROXY)
    if not key.value:
        return KeyRefused(f"{url} answered {status}: it wants a key and got none", remedy=key.remedy)
    return KeyRefused(f"{url} answered {status}: it refused the key in {key.place}", remedy=key.remedy)
