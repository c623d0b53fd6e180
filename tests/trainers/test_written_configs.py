"""config.json of published models, as other releases wrote it: what this one makes of it says the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="make test-trainers")

from transformers import AutoConfig

from weightcast.publisher.weights.config import CONFIG, check_config
from weightcast.shared.base.errors import WrongRun
from weightcast.shared.channel.index import file_record

pytestmark = pytest.mark.trainers
RELEASED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "released_configs.json").read_text()
)


@pytest.mark.parametrize("model", RELEASED)
def test_what_is_saved_says_the_same(model: str, tmp_path: Path) -> None:
    base, saved = tmp_path / "base", tmp_path / "saved"
    base.mkdir()
    (base / CONFIG).write_text(json.dumps(RELEASED[model], indent=2))
    records = [file_record(base / CONFIG)]
    AutoConfig.from_pretrained(base).save_pretrained(saved)
    assert (saved / CONFIG).read_bytes() != (base / CONFIG).read_bytes()
    check_config(saved / CONFIG, base, records)

    eps = "layer_norm_epsilon" if model == "gpt2" else "rms_norm_eps"
    said = json.loads((saved / CONFIG).read_text())
    if eps in said:  # a model of several parts has moved it into one of them
        (saved / CONFIG).write_text(json.dumps({**said, eps: 0.5}))
        with pytest.raises(WrongRun, match=eps):
            check_config(saved / CONFIG, base, records)
