"""The plugin inside SGLang."""
