"""What proves that a step's files and tensors are those that were written. Files are checked without torch."""

import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MANIFEST, SEAL = "MANIFEST.json", "MANIFEST.crc32"  # the seal is the manifest's own checksum


def seal_manifest(folder: Path, manifest: dict[str, Any]) -> list[Path]:
    """Writes the manifest and its seal; returns their paths."""
    data = json.dumps(manifest, indent=1).encode()
    (folder / MANIFEST).write_bytes(data)
    (folder / SEAL).write_text(checksum(data))
    return [folder / MANIFEST, folder / SEAL]


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the step in `path`. Raises OSError or ValueError if it is damaged or a file is missing or of another size."""
    data = (path / MANIFEST).read_bytes()
    if checksum(data).encode() != (path / SEAL).read_bytes():
        raise ValueError(f"{MANIFEST} and {SEAL} do not fit: one of them is damaged")
    manifest = json.loads(data)
    for name, file in manifest["files"].items():
        if (found := (path / name).stat().st_size) != file["size"]:
            raise ValueError(f"{name} has {found} bytes instead of {file['size']}")
    if strange := {p.name for p in path.iterdir()} - {MANIFEST, SEAL, *manifest["files"]}:
        raise ValueError(f"{', '.join(sorted(strange))} does not belong to the step")
    return manifest


def damaged_files(path: Path, manifest: dict[str, Any], names: Iterable[str]) -> list[str]:
    """What is wrong with those of the step's files."""
    problems = []
    for name in names:
        wanted = manifest["files"][name]["crc32"]
        try:
            found = file_checksum(path / name)
        except OSError as error:
            problems.append(f"{name}: {error}")
            continue
        if found != wanted:
            problems.append(f"{name} has checksum {found} instead of {wanted}")
    return problems


def file_checksum(path: Path) -> str:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


def checksum(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"
