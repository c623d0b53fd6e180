"""The subscriber's daemon."""
