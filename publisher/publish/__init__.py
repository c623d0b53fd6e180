"""One version, from comparison to the pointer."""
