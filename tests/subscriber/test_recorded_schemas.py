"""What the vLLM adapter sends is what releases take: their schemas are recorded in tests/engines/schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from doubles import Call, VLLMDouble, serve

from weightcast.subscriber.engines.base import parse_engine
from weightcast.subscriber.engines.host import HostEngine
from weightcast.subscriber.engines.kinds import open_engine
from weightcast.subscriber.engines.reload import EngineReload

SCHEMAS = sorted((Path(__file__).parents[1] / "engines" / "schemas").glob("vllm-*.json"))
LABEL_ROUTES = {"/update_weight_version", "/weight_info"}


def fits(call: Call, routes: dict[str, Any]) -> bool:
    route = routes.get(f"{call.method} {call.path}")
    if route is None:
        return False
    modes = route["query"].get("mode") or [call.query.get("mode")]
    body = route["body"] or {"properties": list(call.body or ()), "required": []}
    return (
        set(call.query) <= set(route["query"])
        and call.query.get("mode") in modes
        and set(body["required"]) <= set(call.body or ()) <= set(body["properties"])
    )


class Unnoted:
    """Nothing is known of the engine, and nothing is kept."""

    suspects = serving = frozenset[str]()

    def note(self, name: str, mark: object) -> None:
        pass


@pytest.mark.parametrize("policy", ["recompute", "wait", "abort"])
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda path: path.stem)
def test_calls_fit_the_release(tmp_path: Path, schema: Path, policy: str) -> None:
    routes = json.loads(schema.read_text())["routes"]
    recorded = {route.split()[1] for route in routes}
    (tmp_path / "weights").write_text("new")
    double = VLLMDouble()
    double.missing = LABEL_ROUTES - recorded
    with serve(double) as url:
        engine = HostEngine(open_engine(parse_engine(f"vllm={url},policy={policy}", tmp_path)))
        try:
            reload = EngineReload(engine, 8, Unnoted())  # type: ignore[arg-type]
            result = reload.pause() or reload.reload()
        finally:
            engine.adapter.close()
    assert (result.state, double.held, double.paused) == ("served", "new", False)
    assert result.confirmed_by == ("label" if recorded >= LABEL_ROUTES else "status-only")
    changing = [call for call in double.calls if call.method == "POST" and call.path not in double.missing]
    assert [call.path for call in changing][:2] == ["/pause", "/collective_rpc"]
    assert all(fits(call, routes) for call in changing)


def test_releases_are_recorded() -> None:
    assert {"vllm-0.16.0", "vllm-0.32.0"} <= {path.stem for path in SCHEMAS}
