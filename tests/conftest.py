"""Makes the modules of this folder importable from the tests of every room."""

import os

from hypothesis import HealthCheck, settings

# how fast inputs are drawn says more about the machine's other work than about a strategy
settings.register_profile("shared-machine", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("shared-machine")

# set in the processes of pytest-xdist: what goes into a pipe would be wrapped as on a small terminal
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
