"""Adapters of a run on a host: each follows a channel of its own, within the run's; engines load finished
versions under names of their own. `Adapters._bring` is the order.

An adapter is loaded only into an engine that holds the main weights it was trained on. Before an engine is
paused for other main weights, its adapters are taken from it. What an engine's process has loaded is recorded
durably after it was loaded, and forgotten before it is unloaded: a name that is not recorded is not trusted,
and unloaded when seen.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial

from weightcast.shared.base.errors import (
    DamagedFile,
    EngineFailed,
    NeedsReseed,
    RetryLater,
    Stopped,
    WeightcastError,
)
from weightcast.shared.base.failpoints import failpoint
from weightcast.shared.channel.channel import Channel
from weightcast.shared.channel.components import ADAPTER, component_store, open_component, read_components
from weightcast.shared.channel.index import Index
from weightcast.shared.channel.store import Store
from weightcast.shared.checkpoint.local_updater import LocalUpdater, UpdaterOptions
from weightcast.shared.checkpoint.state.state import LocalState
from weightcast.shared.daemon.timing import Backoff
from weightcast.shared.files import durable
from weightcast.shared.files.disk_errors import disk_error
from weightcast.shared.files.strict_json import Members, parse_object, write_object
from weightcast.subscriber.adapters.exported import Exported, ExportedAdapters
from weightcast.subscriber.engines.host import Engines, HostEngine
from weightcast.subscriber.status import AdapterStatus
from weightcast.subscriber.sync.options import SyncOptions
