"""Hosts that read one engine together: what they say to each other."""
