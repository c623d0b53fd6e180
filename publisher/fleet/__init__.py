"""Hosts and versions for people who look: API, metrics, page."""
