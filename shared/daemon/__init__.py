"""What both daemons share: loop, HTTP, settings, logs, metrics, the fleet view."""
