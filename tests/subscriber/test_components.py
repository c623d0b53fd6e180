"""LoRA adapters and draft models: the word is reserved, and refused by name on both sides."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hosts import Run, SGLang, Site

from weightcast.publisher.api import Publisher
from weightcast.shared.base.errors import Refused

INDEX = "model.safetensors.index.json"


def rename(path: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    members = json.loads(path.read_text())
    edit(members)
    path.write_text(json.dumps(members))


def test_a_host_refuses_a_version_of_a_draft_model(site: Site, run: Run) -> None:
    engine = SGLang()
    host = site.host(run, engine)
    host.step()
    engine.calls.clear()
    run.publish()
    rename(
        run.channel / "weight_v000001" / INDEX, lambda index: index["weightcast"].update(component="draft")
    )
    with pytest.raises(Refused, match="expected component 'main', found 'draft'"):
        host.step()
    assert host.at(run, 0) and engine.paths() == [] and host.status.ready


def test_both_sides_refuse_a_channel_of_adapters(site: Site, run: Run) -> None:
    run.close()
    rename(run.channel / "base.json", lambda base: base.update(component="lora"))
    host = site.host(run)
    with pytest.raises(Refused, match="component 'lora' is not handled"):
        host.step()
    assert not list(host.local.glob("*.safetensors"))
    with (
        pytest.raises(Refused, match="component 'lora' is not handled"),
        Publisher.open(run.channel, local=run.root / "publisher", base=run.base_dir),
    ):
        pass
