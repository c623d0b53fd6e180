"""Command lines that the help of each command shows."""

from __future__ import annotations

_CHANNEL = "--channel /shared/run7"
_BASE = f"{_CHANNEL} --base /models/base"
_ON = " \\\n      "
_HOST, _PUBLISHER = f"{_BASE}{_ON}--local /data/policy", f"{_BASE}{_ON}--local /data/publisher"
EXAMPLES: dict[str, tuple[str, ...]] = {
    "publisher run": (
        f"publisher run {_PUBLISHER} --watch /scratch/exports --consume",
        "publisher run --channel s3://bucket/run7 --base /models/base \\\n      --local /data/publisher",
    ),
    "subscriber run": (
        f"subscriber run {_HOST} --engine sglang=http://127.0.0.1:30000",
        f"subscriber run {_HOST} --draft /nvme/run7-draft{_ON}--engine vllm=http://127.0.0.1:8000,via=live",
        f"subscriber run {_HOST} --gate 8350{_ON}--engine vllm=http://127.0.0.1:8000,via=live",
    ),
    "gateway run": (
        f"gateway run {_CHANNEL}",
        "gateway run --gates http://host-a:8350 --gates http://host-b:8350",
    ),
    "mirror run": (
        "mirror run --from s3://bucket/run7 --to /shared/copy7",
        "mirror run --from s3://bucket/run7 --to /dev/shm/run7 --serve",
    ),
    "mirror sync": ("mirror sync --from /shared/run7 --to s3://bucket/run7 --verify",),
    "publish": (
        f"publish /scratch/exports/step_12 --step 12{_ON}{_PUBLISHER}",
        f"publish /scratch/drafter_12 --component draft{_ON}{_PUBLISHER}",
    ),
    "sync": (
        f"sync {_HOST}",
        f"sync {_HOST} --target 8 --engine sglang=http://127.0.0.1:30000",
    ),
    "status": ("status 8341", "status https://trainer:8340 --ca authority.pem --verbose"),
    "wake": ("wake 8341",),
    "fleet": (
        f"fleet {_CHANNEL} --watch",
        "fleet --url 127.0.0.1:8340 --forget host-a",
        f"fleet {_CHANNEL} --format haproxy",
    ),
    "wait": (
        f"wait {_CHANNEL} --version 8 --fraction 0.9",
        "wait --url 127.0.0.1:8340 --version 8 --min-hosts 4",
    ),
    "run-engine": (
        f"run-engine --local /data/policy{_ON}--engine vllm=http://127.0.0.1:8000{_ON}"
        "-- vllm serve /data/policy",
    ),
    "doctor": (
        f"doctor {_CHANNEL} --local /data/policy",
        "doctor --tls-cert daemon.pem --ca authority.pem",
        "doctor --plan /models/base --density 0.01 --interval 30",
    ),
    "channel init": (f"channel init {_CHANNEL} --base /models/base",),
    "channel log": (f"channel log {_CHANNEL} --last 20",),
    "channel show": (f"channel show 8 {_CHANNEL}",),
    "channel verify": (f"channel verify {_CHANNEL}",),
    "channel repair": (f"channel repair {_CHANNEL}",),
    "channel anchor": (f"channel anchor {_CHANNEL}",),
    "channel sign": (f"channel sign {_CHANNEL} --sign-key weightcast.key",),
    "channel prune": (f"channel prune {_CHANNEL} --keep-versions 9 --dry-run",),
    "channel component add": (f"channel component add adapter/math {_CHANNEL}{_ON}--like /scratch/step_12",),
    "channel component retire": (f"channel component retire adapter/math {_CHANNEL}",),
    "channel component log": (f"channel component log {_CHANNEL}",),
    "channel keep": (f"channel keep 8 {_CHANNEL}",),
    "channel unkeep": (f"channel unkeep 8 {_CHANNEL}",),
    "channel tag": (
        f"channel tag stable 8 {_CHANNEL}",
        f"channel tag stable --delete {_CHANNEL}",
        f"channel tag {_CHANNEL}",
    ),
    "channel rollback": (f"channel rollback --to 8 {_CHANNEL}",),
    "channel resume": (f"channel resume {_CHANNEL}",),
    "local verify": (
        "local verify --local /data/policy",
        f"local verify {_HOST} --repair",
    ),
    "quantise": ("quantise /models/base /models/base-fp8 --scheme fp8-block",),
    "keygen": ("keygen --out /etc/weightcast",),
    "config show publisher": (f"config show publisher --changed{_ON}{_PUBLISHER}",),
    "config show subscriber": (f"config show subscriber --changed{_ON}{_HOST}",),
    "config show gateway": (f"config show gateway {_CHANNEL}",),
    "config show mirror": ("config show mirror --from /shared/run7 --to /shared/copy7",),
    "bench": ("bench --quick",),
}
"""by command, without the program's name; a line that goes on ends with a backslash"""
