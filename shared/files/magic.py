"""What a file is that is not what its name says: the wrong files that people have most often."""

from __future__ import annotations

from pathlib import Path

from weightcast.shared.errors import DamagedFile

START = 512
"""bytes from the beginning of a file by which its kind is recognised"""
_SAVE = "save it with safetensors (`save_pretrained`)"
_LFS = ("a Git LFS pointer, not the file", "run `git lfs pull` in its repository, or download the file")
_PAGE = ("an HTML or XML page, not the file", "download it again; check the address and the access token")
_PICKLE = ("a torch or pickle file", _SAVE)
_PACKED = ("a compressed file", "decompress it")
_KINDS = (
    (b"version https://git-lfs", *_LFS),
    (b"version https://hawser", *_LFS),
    (b"<", *_PAGE),
    (b"/annex/objects/", "a git-annex pointer, not the file", "run `git annex get` in its repository"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes", _SAVE),
    (b"\x80\x02", *_PICKLE),
    (b"\x80\x03", *_PICKLE),
    (b"\x80\x04", *_PICKLE),
    (b"\x80\x05", *_PICKLE),
    (b"GGUF", "a GGUF file", "give the safetensors checkpoint that it was made from"),
    (b"\x89HDF", "an HDF5 file", _SAVE),
    (b"\x93NUMPY", "a NumPy file", _SAVE),
    (b"\x1f\x8b", *_PACKED),
    (b"\x28\xb5\x2f\xfd", *_PACKED),
    (b"\xfd7zXZ", *_PACKED),
    (b"BZh", *_PACKED),
)


def check_kind(start: bytes, what: str | Path) -> None:
    """`start`: the first bytes of the file `what`, all of them where there are fewer than `START`. Raises
    DamagedFile that names the kind of a well-known other file."""
    for magic, kind, remedy in _KINDS:
        if start.lstrip(b" \t\r\n" if magic == b"<" else b"").startswith(magic):
            raise DamagedFile(f"{what} is {kind}", remedy=remedy)
    if start[257:262] == b"ustar":
        raise DamagedFile(f"{what} is a tar archive", remedy="unpack it")
    if not start.strip(b"\0"):
        kind = "begins with zeros" if start else "is empty"
        raise DamagedFile(f"{what} {kind}: it was not written", remedy="copy, download or save it again")
