"""Prints deploy/weightcast.env: every setting of both daemons as the code describes it.

python deploy/make_env.py > deploy/weightcast.env
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap

from weightcast.publisher.daemon.settings import PublisherSettings
from weightcast.shared.daemon.settings import ServiceSettings, SettingDoc, describe_settings
from weightcast.subscriber.daemon.settings import SubscriberSettings

WIDTH = 110
HEAD = """\
# Settings of weightcast's daemons, for the units in deploy/systemd. Copy it to /etc/weightcast/weightcast.env
# and let root alone read it (0600): the token is a secret. What differs between daemons on one machine goes
# into /etc/weightcast/publisher.env and /etc/weightcast/subscriber-NAME.env, which win over this file.
#
# A line with # in front shows the default, or nothing where there is none. Flags win over the environment.
# A list is separated by spaces. A size may carry a unit (512MiB). The units themselves set WEIGHTCAST_LOCAL.
"""
PLACES = {"channel": "/srv/weightcast/channel", "base": "/srv/weightcast/base"}
"""what both daemons need and each describes in its own words"""


def env_file() -> str:
    publisher, subscriber = _settings(PublisherSettings), _settings(SubscriberSettings)
    both = [name for name, doc in publisher.items() if subscriber.get(name) == doc]
    places = [_place(publisher[name], subscriber[name], path) for name, path in PLACES.items()]
    return HEAD + "".join(
        (
            _section("Both daemons", [*places, *(_entry(publisher[name]) for name in both)]),
            _section("The publisher", _others(publisher, both)),
            _section("The subscriber", _others(subscriber, both)),
        )
    )


def _settings(cls: type[ServiceSettings]) -> Mapping[str, SettingDoc]:
    return {doc.name: doc for doc in describe_settings(cls)}


def _others(docs: Mapping[str, SettingDoc], both: Sequence[str]) -> list[str]:
    return [_entry(doc) for name, doc in docs.items() if name not in both and name not in PLACES]


def _section(title: str, entries: Sequence[str]) -> str:
    rule = "#" * 20
    return f"\n{rule} {title} {rule}\n" + "".join(entries)


def _place(publisher: SettingDoc, subscriber: SettingDoc, path: str) -> str:
    texts = (f"Publisher: {_facts(publisher)}", f"Subscriber: {_facts(subscriber)}")
    return f"\n{_comment(texts[0])}\n{_comment(texts[1])}\n{publisher.env}={path}\n"


def _entry(doc: SettingDoc) -> str:
    return f"\n{_comment(_facts(doc))}\n#{doc.env}={doc.default}\n"


def _facts(doc: SettingDoc) -> str:
    return f"{doc.help} ({doc.type}{', required' if doc.required else ''})"


def _comment(text: str) -> str:
    return "\n".join(f"# {line}" for line in wrap(text, WIDTH))


if __name__ == "__main__":
    print(env_file(), end="")
