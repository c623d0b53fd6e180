"""Coverage-guided fuzzing of one reader: python guided.py NAME CORPUS [libFuzzer options]. Needs atheris."""

import sys

import atheris

with atheris.instrument_imports(include=["weightcast"]):
    from fuzz_targets import TARGETS
    from test_fuzz_parsers import tolerates

good, read = TARGETS[sys.argv.pop(1)]


def one(data: bytes) -> None:
    tolerates(read, data)


atheris.Setup(sys.argv, one)
atheris.Fuzz()
