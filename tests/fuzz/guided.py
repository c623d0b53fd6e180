"""Coverage-guided fuzzing of one reader: python guided.py NAME CORPUS [libFuzzer options]. Needs atheris."""

import sys

import atheris

with atheris.instrument_imports(include=["weightcast"]):
    from fuzz_targets import TARGETS

    from weightcast.shared.errors import WeightcastError
    from weightcast.shared.files.paths import is_plain

good, read = TARGETS[sys.argv.pop(1)]


def one(data: bytes) -> None:
    try:
        read(data)
    except WeightcastError as error:
        assert all(is_plain(line) for line in error.message.split("\n"))


atheris.Setup(sys.argv, one)
atheris.Fuzz()
