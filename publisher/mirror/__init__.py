"""A mirror: a channel copied, verified, into another one. docs/adr/0023."""
