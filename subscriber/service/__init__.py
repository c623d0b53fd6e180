"""The daemon: what it is told, what it says of its host."""
