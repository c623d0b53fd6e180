"""The daemon: what it is asked for, what it says of itself."""
