"""Settings of a daemon: one typed class, filled from flags over environment over a TOML file."""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin

from pydantic import AfterValidator, ByteSize, Field, PositiveInt, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from weightcast.shared.base.errors import USAGE, Refused, WeightcastError
from weightcast.shared.channel.signing import Trust
from weightcast.shared.daemon.environment import PREFIX, hide_queries, is_host, is_token
from weightcast.shared.daemon.threads import MEMORY_BUDGET
from weightcast.shared.files.disk_errors import disk_error
from weightcast.shared.files.paths import at_home

PUBLISHER_PORT = 8340
SUBSCRIBER_PORT = 8341
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


Token = Annotated[SecretStr, AfterValidator(_header_text)]
HostName = Annotated[str, AfterValidator(_listenable)]


VERIFY_RATE = 32 << 20


class ServiceSettings(BaseSettings):
    """What both daemons have. Building an instance directly reads no environment: see `load_settings`."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_ignore_empty=True, enable_decoding=False, extra="forbid", frozen=True
    )

    host: HostName = Field("127.0.0.1", description="Address that the HTTP side listens on.")
    port: int = Field(0, ge=0, le=65535, description="Its port; 0 takes a free one.")
    port_file: Path | None = Field(None, description="File that the real port is written to.")
    token: Token | None = Field(None, description="Bearer token of the HTTP side; required off loopback.")
    trusted_key: tuple[str, ...] = Field(
        (),
        description="Public key (ed25519:...), or file of such lines, repeatable. Unsigned versions are "
        "refused; unset: signatures are not checked.",
    )
    log_format: Literal["console", "json"] = Field("console", description="Log format on stderr.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Minimum log level.")
    memory_budget: ByteSize = Field(
        ByteSize(MEMORY_BUDGET), ge=16 << 20, description="Memory for working buffers, e.g. 512MiB."
    )
    threads: PositiveInt | None = Field(
        None, description="Worker threads (capped by --memory-budget); unset: all usable cores."
    )
    verify_rate: ByteSize = Field(
        ByteSize(VERIFY_RATE),
        ge=0,
        description="Rate limit of the background check of the local checkpoint, bytes per second; 0: off.",
    )
    poll_seconds: float = Field(
        1.0, gt=0, le=3600, allow_inf_nan=False, description="Maximum pause between two polls of the channel."
    )
    stop_seconds: float = Field(
        60.0,
        gt=0,
        le=3600,
        allow_inf_nan=False,
        description="Grace period for the current step after SIGTERM.",
    )
    hook_seconds: float = Field(
        300.0,
        gt=0,
        le=86400,
        allow_inf_nan=False,
        description="Timeout of a hook; it is then killed.",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)

    @field_validator("*", mode="before")
    @classmethod
    def _split_lists(cls, value: object, info: Any) -> object:
        """A list in the environment is separated by white space."""
        field = cls.model_fields[info.field_name]
        return value.split() if isinstance(value, str) and is_list(field) else value

    @field_validator("*", mode="after")
    @classmethod
    def _find_homes(cls, value: object) -> object:
        """Paths may begin with ~/."""
        if isinstance(value, list):
            return [at_home(one) if isinstance(one, Path) else one for one in value]
        return at_home(value) if isinstance(value, Path) else value

    @field_validator("*", mode="after")
    @classmethod
    def _name_paths_in_utf8(cls, value: object) -> object:
        """Every path is shown in JSON, and some are passed to engines."""
        for path in value if isinstance(value, (list, tuple)) else (value,):
            # bytes that are no text cannot be sent
            if isinstance(path, Path) and any(0xD800 <= ord(c) < 0xE000 for c in str(path.absolute())):
                raise ValueError(
                    "the path is not UTF-8: it cannot be passed to engines or shown in the status"
                )
        return value

    def missing(self) -> list[str]:
        """What is wrong with files that these settings name: looks at the disk."""
        found = [problem_of(partial(Trust.load, (key,))) for key in self.trusted_key]
        return [problem for problem in found if problem]


def problem_of(read: Callable[[], object]) -> str:
    """Why a file that is named here cannot be read; empty when it can."""
    try:
        read()
    except WeightcastError as error:
        return str(error)
    except OSError as error:
        return str(disk_error(error, "a file"))
    return ""


S = TypeVar("S", bound=ServiceSettings)


@dataclass(frozen=True)
class Loaded(Generic[S]):
    """`origins`: by name of a setting `flag`, `environment` or `file PATH`; defaults are left out."""

    settings: S
    origins: Mapping[str, str]


def load_settings(cls: type[S], flags: Mapping[str, object], config: Path | None = None) -> S:
    """Flags (None: not given) over environment over the TOML file `config`, whose keys are the flags
    with - or _ between words. Raises BadSettings with every problem and the place it comes from."""
    return trace_settings(cls, flags, config).settings


def trace_settings(cls: type[S], flags: Mapping[str, object], config: Path | None = None) -> Loaded[S]:
    """As `load_settings`, with where each value came from."""
    sources: tuple[tuple[str, Mapping[str, Any]], ...] = (
        (f"file {config}", {} if config is None else _read_toml(config)),
        ("environment", EnvSettingsSource(cls)()),
        ("flag", {name: value for name, value in flags.items() if value is not None}),
    )
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, found in sources:
        values.update(found)
        origins.update(dict.fromkeys(found, origin))
    try:
        settings = cls(**values)
    except ValidationError as error:
        raise _all_problems(cls, error.errors(include_url=False), values, origins) from None
    check_bind(settings)
    return Loaded(settings, origins)


def check_bind(settings: ServiceSettings) -> None:
    """Raises BadSettings for an address that others can reach without a token."""
    problem = _unprotected_host(settings.host, settings.token is not None)
    if problem:
        raise BadSettings(problem, remedy=f"set {PREFIX}TOKEN, or listen on 127.0.0.1")


def _unprotected_host(host: str, has_token: bool) -> str:
    if has_token or is_loopback(host):
        return ""
    return f"host {host} is reachable from other machines and no token is set"


@dataclass(frozen=True)
class EffectiveSetting:
    """One effective setting. `value` as in JSON, a secret masked, addresses without their query;
    `source`: flag, environment, file or default; `place`: the flag, the variable or the file."""

    name: str
    value: object
    source: str
    place: str


def effective_settings(loaded: Loaded[S]) -> list[EffectiveSetting]:
    """Every setting in the order of its definition."""
    values = loaded.settings.model_dump(mode="json")
    return [_effective(name, value, loaded.origins.get(name, "default")) for name, value in values.items()]


def _effective(name: str, value: object, origin: str) -> EffectiveSetting:
    source, _, file = origin.partition(" ")
    return EffectiveSetting(name, _shown(value), source, file or _place(name, origin))


def _shown(value: object) -> object:
    if isinstance(value, list):
        return [_shown(one) for one in value]
    return hide_queries(value) if isinstance(value, str) and "://" in value else value


def _place(name: str, origin: str) -> str:
    places = {"flag": flag_of(name), "environment": PREFIX + name.upper(), "default": ""}
    return places.get(origin, origin)


def require_files(settings: ServiceSettings) -> None:
    """Raises BadSettings with every file named by the settings that a daemon cannot start with."""
    problems = settings.missing()
    if problems:
        raise BadSettings(
            "wrong settings:\n  " + "\n  ".join(problems),
            remedy="correct them where they are set",
        )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class SettingDoc:
    """One setting as documentation shows it. `default` is empty where the setting is required or unset."""

    name: str
    flag: str
    env: str
    type: str
    default: str
    required: bool
    help: str


def describe_settings(cls: type[ServiceSettings]) -> list[SettingDoc]:
    """Every setting of `cls` in the order of its definition. Secrets have no flag (`flag` is empty): a
    command line shows in the process list."""
    return [
        SettingDoc(
            name=name,
            flag="" if is_secret(field) else flag_of(name),
            env=PREFIX + name.upper(),
            type=type_name(field),
            default=_default(field),
            required=field.is_required(),
            help=field.description or "",
        )
        for name, field in cls.model_fields.items()
    ]


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def is_secret(field: FieldInfo) -> bool:
    return SecretStr in _leaves(field.annotation)


def is_list(field: FieldInfo) -> bool:
    return any(get_origin(part) in (list, tuple) for part in _alternatives(field.annotation))


def is_switch(field: FieldInfo) -> bool:
    return field.annotation is bool


def is_size(field: FieldInfo) -> bool:
    return ByteSize in _leaves(field.annotation)


def exact_size(nbytes: int) -> str:
    """As a setting takes it, exactly: 16MiB."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes and nbytes % (1 << power) == 0:
            return f"{nbytes >> power}{unit}"
    return f"{nbytes}B"


def type_name(field: FieldInfo) -> str:
    if is_list(field):
        return "list"
    names = {
        bool: "true|false",
        int: "integer",
        float: "number",
        str: "text",
        Path: "path",
        ByteSize: "size",
        SecretStr: "secret",
    }
    leaves = _leaves(field.annotation)
    choices = [leaf for leaf in leaves if isinstance(leaf, str)]
    return "|".join(choices) if choices else "|".join(names.get(leaf, str(leaf)) for leaf in leaves)


def _alternatives(annotation: Any) -> list[Any]:
    """The members of a union without None."""
    if annotation is type(None):
        return []
    if get_origin(annotation) in (None, list, tuple, Annotated, Literal):
        return [annotation]
    return [leaf for part in get_args(annotation) for leaf in _alternatives(part)]


def _leaves(annotation: Any) -> list[Any]:
    """Types, or the values of a Literal, behind unions and Annotated."""
    leaves: list[Any] = []
    for part in _alternatives(annotation):
        origin = get_origin(part)
        if origin is Annotated:
            leaves += _leaves(get_args(part)[0])
        elif origin is Literal:
            leaves += get_args(part)
        else:
            leaves.append(part)
    return leaves


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        made = field.default_factory() if field.default_factory is not None else None  # type: ignore[call-arg]
        return _value_text(made)
    if isinstance(field.default, ByteSize):
        return exact_size(field.default)
    return _value_text(field.default)


def _value_text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


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


def _all_problems(
    cls: type[ServiceSettings],
    errors: list[ErrorDetails],
    values: Mapping[str, Any],
    origins: Mapping[str, str],
) -> BadSettings:
    # Messages only: a rejected value may be a secret in the wrong place.
    lines = [_problem(cls, error, origins) for error in errors]
    if not any(error["loc"][:1] in (("host",), ("token",)) for error in errors):
        host = values.get("host", cls.model_fields["host"].default)
        lines += filter(None, [_unprotected_host(str(host), values.get("token") is not None)])
    return BadSettings(
        "wrong settings:\n  " + "\n  ".join(lines),
        remedy="correct them; flags take precedence over the environment, the environment over the file",
    )


_OF_KUBERNETES = (
    "set by Kubernetes for a service called weightcast; give the pod `enableServiceLinks: false`, or the "
    "service another name"
)


def _problem(cls: type[ServiceSettings], error: ErrorDetails, origins: Mapping[str, str]) -> str:
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
    if is_size(cls.model_fields[name]) and error["type"] == "greater_than_equal":
        return f"{name}: give at least {exact_size(error['ctx']['ge'])} ({place})"
    return f"{name}: {error['msg'].removeprefix('Value error, ')} ({place})"
