"""The publisher's daemon."""
