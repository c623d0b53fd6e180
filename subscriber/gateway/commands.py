"""Command `gateway run`."""

from __future__ import annotations

from weightcast.shared.cli.settings_options import settings_command, show_settings_command
from weightcast.shared.daemon.logs import setup_logs
from weightcast.subscriber.gateway.settings import GatewaySettings

show_settings = show_settings_command("gateway", GatewaySettings)


@settings_command(GatewaySettings, "Answer requests by the engines of all hosts, until stopped.")
def run(settings: GatewaySettings) -> None:
    # the web framework costs a second of start-up that one-shots need not pay
    from weightcast.subscriber.gateway.daemon import GatewayDaemon

    setup_logs(settings.log_format, settings.log_level)
    GatewayDaemon(settings).run()
