"""Prints docs/settings.md from the code: python docs/make_settings.py > docs/settings.md"""

from __future__ import annotations

from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.publisher.mirror.settings import MirrorSettings
from weightcast.shared.daemon.settings import DaemonSettings, SettingDoc, describe_settings
from weightcast.subscriber.daemon.settings import SubscriberSettings
from weightcast.subscriber.gateway.settings import GatewaySettings

TOP = """\
# Settings

Made from the code by `python docs/make_settings.py`. A flag wins over the environment, the
environment over `--config FILE` (TOML, for example `anchor-every = 100`). Paths may begin with
`~/`. `deploy/weightcast.env` has the same as a template.

```sh
weightcast config show subscriber --local /data/policy --channel /shared/run7
```
prints the effective settings and their source (flag, environment, file, default), with secrets
masked and URLs without their query. Unknown flags and names in files are errors. An environment
variable `WEIGHTCAST_...` that nothing reads is reported on stderr at the start, with the nearest
known name.
"""
HEAD = "| flag | environment | default | |\n|---|---|---|---|\n"


def table(cls: type[DaemonSettings], *, leave_out: frozenset[str] = frozenset()) -> str:
    return HEAD + "".join(_row(doc) for doc in describe_settings(cls) if doc.name not in leave_out)


def _row(doc: SettingDoc) -> str:
    flag = f"`{doc.flag}`" if doc.flag else "(no flag)"
    default = "required" if doc.required else f"`{doc.default}`" if doc.default else ""
    return f"| {flag} | `{doc.env}` | {default} | {doc.help} |\n"


def document() -> str:
    """The page: settings of publisher and subscriber, then those of one daemon."""
    publisher = {doc.name: doc for doc in describe_settings(PublisherSettings)}
    subscriber = {doc.name: doc for doc in describe_settings(SubscriberSettings)}
    shared = frozenset(name for name, doc in publisher.items() if subscriber.get(name) == doc)
    own = frozenset(set(subscriber) - shared)
    of_all = frozenset(DaemonSettings.model_fields) - {"port"}
    as_above = f"And, as above, {', '.join(f'`{name}`' for name in sorted(of_all))}.\n"
    return "\n".join(
        (
            TOP,
            "## Publisher and subscriber\n",
            table(SubscriberSettings, leave_out=own),
            "## weightcast publisher run\n",
            table(PublisherSettings, leave_out=shared),
            "## weightcast subscriber run\n",
            table(SubscriberSettings, leave_out=shared),
            "## weightcast mirror run\n",
            as_above,
            table(MirrorSettings, leave_out=of_all),
            "## weightcast gateway run\n",
            as_above,
            table(GatewaySettings, leave_out=of_all),
        )
    )


if __name__ == "__main__":
    print(document(), end="")
