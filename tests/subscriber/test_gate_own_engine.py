"""The engine that docs/engines.md shows serves behind a real gate and takes updates there."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from subprocess import Popen
from types import SimpleNamespace
from typing import Any

from gate_kit import Gateway, Host, gates_of
from hosts import Run, Site
from ports import free_port

DOCUMENT = Path(__file__).parents[2] / "docs" / "engines.md"


def test_the_engine_of_the_page_serves_behind_a_gate(site: Site, run: Run) -> None:
    [source] = re.findall(r"```python\n(# engine\.py.*?)```", DOCUMENT.read_text(), re.DOTALL)
    script, port = site.root / "engine.py", free_port()
    script.write_text(source)
    process = Popen([sys.executable, script, str(port)])
    site.stack.callback(process.wait)
    site.stack.callback(process.kill)
    engine: Any = SimpleNamespace(kind="sglang", url=f"http://127.0.0.1:{port}")
    host = Host(site, run, engine, options=("--adapters", "none"))
    for version in (1, 2):
        assert host.publish() == version
        found = host.generate(4)
        assert found.status_code == 200, found.text
        answer = found.json()
        assert answer["output_ids"] == [0, 1, 2, 3]
        assert answer["weightcast"] == {"version": version, "last_version": version}
        assert found.headers["weightcast-version"] == str(version)
    assert host.mislabeled() == 0
    gateway = Gateway(site, *gates_of(host))
    gateway.wait_for(2)
    body = {"text": "p", "weightcast": {"min_version": 3}}
    assert gateway.client.post("/generate", json=body).status_code == 409
    [line] = host.status()["engines"]
    assert (line["state"], line["confirmed_by"], line["version"]) == ("serving", "label", 2)
    assert line["process"] is not None
