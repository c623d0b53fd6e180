"""What runs here. Written out, for asking the installed package costs more than a small command has."""

VERSION = "0.1.0"
"""as in pyproject.toml"""
SOFTWARE = f"weightcast {VERSION}"
"""what a daemon says that it is"""
