"""Publishing from several ranks."""
