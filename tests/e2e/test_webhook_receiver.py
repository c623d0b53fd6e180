"""The receiver that docs/engines.md shows takes versions from a real `weightcast sync`."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
from core_cases import every_dtype, some_changed, write_checkpoint
from ports import free_port
from waiting import wait_until

DOCUMENT = Path(__file__).parents[2] / "docs" / "engines.md"
COMMAND = Path(sys.executable).parent / "weightcast"


def weightcast(*arguments: object) -> dict[str, object]:
    done = subprocess.run(
        [COMMAND, *map(str, arguments), "--json"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_the_receiver_of_the_page_serves(tmp_path: Path) -> None:
    [source] = re.findall(r"```python\n(# receiver\.py.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (tmp_path / "receiver.py").write_text(source)
    rng = np.random.default_rng(3)
    base, run, host = tmp_path / "base", tmp_path / "run", tmp_path / "host"
    model = every_dtype(rng)
    write_checkpoint(base, model)
    weightcast("channel", "init", "--channel", run, "--base", base)
    port = free_port()
    receiver = subprocess.Popen([sys.executable, tmp_path / "receiver.py", str(port)])
    try:
        wait_until(lambda: socket.create_connection(("127.0.0.1", port)), passing=(OSError,)).close()
        engine = ("--engine", f"webhook=http://127.0.0.1:{port}")
        places = ("--channel", run, "--base", base)
        assert weightcast("sync", *places, "--local", host, *engine)["local_version"] == 0
        write_checkpoint(tmp_path / "new", some_changed(model, rng))
        weightcast("publish", tmp_path / "new", *places, "--local", tmp_path / "publisher")
        found = weightcast("sync", *places, "--local", host, *engine)
        assert (found["local_version"], found["served_version"], found["ready"]) == (1, 1, True)
    finally:
        receiver.kill()
        receiver.wait()
