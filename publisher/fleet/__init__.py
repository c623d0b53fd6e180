"""Hosts and versions for people who look: API, figures, page."""
