"""Settings of a daemon: one typed class, filled from flags over environment over a TOML file."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, get_origin
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    PositiveInt,
    SecretStr,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from weightcast.shared.base.errors import USAGE, Refused, WeightcastError
from weightcast.shared.daemon.environment import (
    MEMORY_BUDGET,
    PREFIX,
    address_of,
    hide_queries,
    is_host,
    is_server_url,
    is_token,
)
from weightcast.shared.files.disk_errors import disk_error
from weightcast.shared.files.paths import ChannelAddress, at_home, channel_address

if TYPE_CHECKING:
    import ssl

PUBLISHER_PORT = 8340
SUBSCRIBER_PORT = 8341
MIRROR_PORT = 8342
GATEWAY_PORT = 8343
CONFIG_LIMIT = 1 << 20


class BadSettings(Refused):
    """A usage error: the message lists every problem at once."""

    exit_code = USAGE


def _header_text(token: SecretStr) -> SecretStr:
    if not is_token(token.get_secret_value()):
        raise ValueError("must be printable ASCII without spaces: it travels in an HTTP header")
    return token


def _listenable(host: str) -> str:
    if not is_host(host):
        raise ValueError("must be an address or a host name")
    return host


def _server_url(url: str) -> str:
    if not is_server_url(url):
        raise ValueError("give http://HOST:PORT or https://HOST:PORT, nothing more")
    return url.rstrip("/")


Token = Annotated[SecretStr, AfterValidator(_header_text)]
ServerUrl = Annotated[str, AfterValidator(_server_url)]
HostName = Annotated[str, AfterValidator(_listenable)]
Size = Annotated[ByteSize, WithJsonSchema({"type": "size"})]
ChannelPlace = Annotated[
    ChannelAddress, BeforeValidator(channel_address), WithJsonSchema({"type": "channel"})
]


class DaemonSettings(BaseModel):
    """What all daemons have: see `load_settings`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    host: HostName = "127.0.0.1"
    """Address that the HTTP side listens on."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the HTTP side; 0 takes a free one."""
    port_file: Path | None = None
    """File to write the port to."""
    token: Token | None = Field(None, validate_default=True)
    """Bearer token of the HTTP side; required off loopback."""
    tls_cert: Path | None = None
    """PEM file with this daemon's certificate and chain: it serves HTTPS only. Daemons that require client
    certificates are shown it too."""
    tls_key: Path | None = None
    """PEM file with the private key of --tls-cert; unset: in the same file."""
    tls_client_ca: Path | None = None
    """PEM file with authorities: callers must show a certificate of one of them."""
    ca: Path | None = None
    """PEM file with authorities that other daemons' certificates must come from; unset: the system's."""
    trusted_key: tuple[str, ...] = ()
    """Public key (ed25519:...), or file of such lines, repeatable. Unsigned versions are refused; unset:
    signatures are not checked."""
    log_format: Literal["console", "json"] = "console"
    """Log format on stderr."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum log level."""
    poll_seconds: float = Field(1.0, gt=0, le=3600)
    """Seconds between two polls of the channel, at most."""
    stop_seconds: float = Field(60.0, gt=0, le=3600)
    """Seconds that the current step may take after SIGTERM."""

    @field_validator("*", mode="before")
    @classmethod
    def _split_lists(cls, value: object, info: ValidationInfo) -> object:
        """A list in the environment is separated by white space."""
        is_list = get_origin(cls.model_fields[str(info.field_name)].annotation) in (list, tuple)
        return value.split() if isinstance(value, str) and is_list else value

    @field_validator("*", mode="after")
    @classmethod
    def _complete_paths(cls, value: object) -> object:
        return [_complete(one) for one in value] if isinstance(value, list) else _complete(value)

    @field_validator("token", mode="after")
    @classmethod
    def _is_required_off_loopback(cls, token: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        # What is wrong with `host` itself is said elsewhere, and it is then absent here.
        host = info.data.get("host", "localhost")
        if token is None and not is_loopback(host):
            raise ValueError(
                f"host {host} is reachable from other machines and no token is set; set {PREFIX}TOKEN, or "
                "listen on 127.0.0.1"
            )
        return token

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if self.tls_cert is None and (self.tls_key or self.tls_client_ca):
            raise ValueError("tls_key, tls_client_ca: mean nothing without --tls-cert")
        return self

    def server_tls(self) -> ssl.SSLContext | None:
        """None: plain HTTP. Raises BadTls."""
        if self.tls_cert is None:
            return None
        from weightcast.shared.daemon.tls import server_context

        return server_context(self.tls_cert, self.tls_key, self.tls_client_ca)

    def client_tls(self, url: str) -> ssl.SSLContext:
        """For another daemon. Raises BadTls."""
        from weightcast.shared.daemon.tls import client_context

        return client_context(url, self.ca, self.tls_cert, self.tls_key)

    def missing(self) -> list[str]:
        """What is wrong with files that these settings name: looks at the disk."""
        # imports numpy, which help can do without
        from weightcast.shared.channel.signing import Trust

        found = [problem_of(partial(Trust.load, (key,))) for key in self.trusted_key]
        found.append(problem_of(self.server_tls))
        if self.ca is not None:
            found.append(problem_of(partial(self.client_tls, "https:")))
        return [problem for problem in found if problem]


class ServiceSettings(DaemonSettings):
    """What publisher and subscriber have."""

    memory_budget: Size = Field(ByteSize(MEMORY_BUDGET), ge=16 << 20)
    """Memory for working buffers, e.g. 512MiB."""
    threads: PositiveInt | None = None
    """Worker threads (capped by --memory-budget); unset: all usable cores."""
    verify_rate: Size = Field(ByteSize(32 << 20), ge=0)
    """Rate limit of the background check of the local checkpoint, bytes per second; 0: off."""
    hook_seconds: float = Field(300.0, gt=0, le=86400)
    """Seconds that a hook may run before it is killed."""


class ReportSettings(DaemonSettings):
    """What those have that report."""

    report: bool = True
    """Write reports to the channel that is followed, for `weightcast fleet`."""
    report_to: str | None = Field(None, max_length=2048)
    """URL of the publisher that reports are posted to, where the channel is read-only here."""
    report_token: Token | None = None
    """Bearer token for hosts' reports to the publisher, no more; unset: WEIGHTCAST_TOKEN."""
    report_seconds: float = Field(30.0, ge=0.5, le=3600)
    """Seconds between two reports while nothing changes."""

    @model_validator(mode="after")
    def _check_report_to(self) -> Self:
        if self.report_to is None:
            return self
        if not self.report:
            raise ValueError("report_to: means nothing without reports (--no-report)")
        token = self.secret(self.report_token)
        require_reachable("report_to", self.report_to, token, f"{PREFIX}REPORT_TOKEN")
        return self

    def secret(self, own: Token | None) -> str | None:
        """Unset: the daemon's token."""
        return text_of(self.token if own is None else own)


def text_of(token: Token | None) -> str | None:
    return None if token is None else token.get_secret_value()


def require_reachable(name: str, url: str, token: str | None, variable: str) -> None:
    """Raises ValueError for anything but `http(s)://host[:port]`, and without the token that it needs."""
    if not is_server_url(url):
        raise ValueError(f"{name}: give http://HOST:PORT or https://HOST:PORT, nothing more")
    if token is None and not is_loopback(urlsplit(url).hostname or ""):
        raise ValueError(f"{name}: other machines ask for a token; set {variable}")


def _complete(value: object) -> object:
    """A path may begin with ~/. Every path is shown in JSON, and some are passed to engines."""
    if not isinstance(value, Path):
        return value
    path = at_home(value)
    # bytes that are no text cannot be sent
    if any(0xD800 <= ord(c) < 0xE000 for c in str(path.absolute())):
        raise ValueError("the path is not UTF-8: it cannot be passed to engines or shown in the status")
    return path


def problem_of(read: Callable[[], object]) -> str:
    """Why a file that is named here cannot be read; empty when it can."""
    try:
        read()
    except WeightcastError as error:
        return str(error)
    except OSError as error:
        return str(disk_error(error, "a file"))
    return ""


S = TypeVar("S", bound=DaemonSettings)


def load_settings(cls: type[S], flags: Mapping[str, object], config: Path | None = None) -> S:
    """Flags (None or empty: not given) over environment over the TOML file `config`, whose keys are the flags
    with - or _ between words. Raises BadSettings with every problem and the place it comes from."""
    return trace_settings(cls, flags, config)[0]


def trace_settings(
    cls: type[S], flags: Mapping[str, object], config: Path | None = None
) -> tuple[S, Mapping[str, str]]:
    """As `load_settings`, with where values came from by name of a setting: `flag`, `environment` or `file
    PATH`; defaults are left out."""
    sources: tuple[tuple[str, Mapping[str, Any]], ...] = (
        (f"file {config}", {} if config is None else _read_toml(config)),
        ("environment", _read_environment(cls)),
        ("flag", {name: value for name, value in flags.items() if value not in (None, ())}),
    )
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, found in sources:
        values.update(found)
        origins.update(dict.fromkeys(found, origin))
    try:
        settings = cls(**values)
    except ValidationError as error:
        # Messages only: a rejected value may be a secret in the wrong place.
        lines = [_problem(cls, one, origins) for one in error.errors(include_url=False)]
        raise BadSettings(
            "wrong settings:\n  " + "\n  ".join(lines),
            remedy="correct them; flags take precedence over the environment, the environment over the file",
        ) from None
    return settings, origins


def effective_settings(settings: DaemonSettings, origins: Mapping[str, str]) -> list[dict[str, Any]]:
    """Every setting in the order of its definition. `value` as in JSON, a secret masked, addresses without
    their query; `source`: flag, environment, file or default; `place`: the flag, the variable or the file."""
    found = []
    for name, value in settings.model_dump(mode="json").items():
        source, _, file = origins.get(name, "default").partition(" ")
        place = file or _place(name, source)
        found.append({"name": name, "value": _shown(value), "source": source, "place": place})
    return found


def _shown(value: object) -> object:
    if isinstance(value, list):
        return [_shown(one) for one in value]
    return hide_queries(value) if isinstance(value, str) and "://" in value else value


def _place(name: str, origin: str) -> str:
    places = {"flag": flag_of(name), "environment": PREFIX + name.upper(), "default": ""}
    return places.get(origin, origin)


def require_files(settings: DaemonSettings) -> None:
    """Raises BadSettings with every file named by the settings that a daemon cannot start with."""
    problems = settings.missing()
    if problems:
        raise BadSettings(
            "wrong settings:\n  " + "\n  ".join(problems),
            remedy="correct them where they are set",
        )


def is_loopback(host: str) -> bool:
    address = address_of(host)
    return host == "localhost" if address is None else address.is_loopback


@dataclass(frozen=True)
class SettingDoc:
    """One setting as documentation shows it. Empty: `default` where the setting is required or unset, `flag`
    of secrets, as a command line shows in the process list."""

    name: str
    flag: str
    env: str
    type: str
    default: str
    required: bool
    help: str


def describe_settings(cls: type[DaemonSettings]) -> list[SettingDoc]:
    """Every setting of `cls` in the order of its definition."""
    schema = cls.model_json_schema()
    required = schema.get("required", ())
    return [_describe(name, one, name in required) for name, one in schema["properties"].items()]


def _describe(name: str, schema: Mapping[str, Any], required: bool) -> SettingDoc:
    kind, default = _kind(schema), schema.get("default", "")
    return SettingDoc(
        name=name,
        flag="" if kind == "secret" else flag_of(name),
        env=PREFIX + name.upper(),
        type=kind,
        default=exact_size(default) if kind == "size" else value_text(default),
        required=required,
        help=" ".join(schema["description"].split()),
    )


def _kind(schema: Mapping[str, Any]) -> str:
    """The type of a setting, of its JSON schema, in words."""
    one = next(each for each in schema.get("anyOf", [schema]) if each.get("type") != "null")
    if "enum" in one:
        return "|".join(one["enum"])
    name: str = one.get("format", one["type"])
    return {"boolean": "true|false", "array": "list", "string": "text", "password": "secret"}.get(name, name)


def value_text(value: object) -> str:
    if isinstance(value, list):
        return " ".join(value)
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def exact_size(nbytes: int) -> str:
    """As a setting takes it, exactly: 16MiB."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes and nbytes % (1 << power) == 0:
            return f"{nbytes >> power}{unit}"
    return f"{nbytes}B"


def _read_environment(cls: type[DaemonSettings]) -> dict[str, str]:
    """Names in any case; what is empty is unset."""
    upper = {variable.upper(): value for variable, value in os.environ.items() if value}
    names = {PREFIX + name.upper(): name for name in cls.model_fields}
    return {name: upper[variable] for variable, name in names.items() if variable in upper}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(CONFIG_LIMIT + 1)
        if len(data) > CONFIG_LIMIT:
            raise BadSettings(
                f"configuration file {path} exceeds the {CONFIG_LIMIT}-byte limit",
                remedy="give a TOML file of settings",
            )
        return {name.replace("-", "_"): value for name, value in tomllib.loads(data.decode()).items()}
    except OSError as error:
        raise BadSettings(
            f"configuration file {path} cannot be read: {error.strerror}",
            remedy="correct --config, or its owner and mode",
        ) from error
    except (ValueError, RecursionError) as error:
        raise BadSettings(
            f"configuration file {path} is not TOML: {error}",
            remedy='one setting a line, texts in quotes: local = "/data/policy"',
        ) from error


_OF_KUBERNETES = (
    "set by Kubernetes for a service called weightcast; give the pod `enableServiceLinks: false`, or the "
    "service another name"
)


def _problem(cls: type[DaemonSettings], error: ErrorDetails, origins: Mapping[str, str]) -> str:
    if not error["loc"]:
        # of several settings together, which the message names
        return error["msg"].removeprefix("Value error, ")
    name = str(error["loc"][0])
    if error["type"] == "missing":
        return f"{name}: required; set {flag_of(name)} or {PREFIX}{name.upper()}"
    if name not in cls.model_fields:
        return f"{name}: unknown setting ({origins.get(name, 'unknown')})"
    place = _place(name, origins.get(name, "default")) or "default"
    if name == "port" and str(error["input"]).startswith("tcp://"):
        return f"{name}: {_OF_KUBERNETES} ({place})"
    if cls.model_fields[name].annotation is ByteSize and error["type"] == "greater_than_equal":
        return f"{name}: give at least {exact_size(error['ctx']['ge'])} ({place})"
    return f"{name}: {error['msg'].removeprefix('Value error, ')} ({place})"
