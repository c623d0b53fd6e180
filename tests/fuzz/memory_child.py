"""memory_child.py KIND: reads an index as large as one may be that means harm, in 1.5 GiB of memory."""

import resource
import sys
from pathlib import Path

from weightcast.shared.base.elements import TensorSpec, TensorTable
from weightcast.shared.base.errors import WeightcastError
from weightcast.shared.channel.index import INDEX_LIMIT, parse_index

PIECES = {
    "lists": b"[],",
    "objects": b"{},",
    "numbers": b"1e9,",
    "strings": b'"x",',
    "deep": b"[",
    "wide text": "\U0001f600".encode(),
}
piece = PIECES[sys.argv[1]]
head, tail = (b'{"a":"', b'"}') if sys.argv[1] == "wide text" else (b'{"a":[', b"1]}")
data = head + piece * ((INDEX_LIMIT - 16) // len(piece)) + tail
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + (3 << 29)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    parse_index(data, TensorTable.of([TensorSpec("a", "U8", (1,), 1)]))
except WeightcastError:
    print("refused")
