"""What proves that a step's files and tensors are those that were written. Imports no torch."""

import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MANIFEST, SEAL = "MANIFEST.json", "MANIFEST.crc32"  # the seal is the manifest's own checksum
SCHEMA = 3


class DamagedStep(OSError):
    """A step, or what came of loading it, is not what was written."""


def seal_manifest(folder: Path, manifest: dict[str, Any]) -> list[Path]:
    """Writes the manifest's seal and then the manifest; returns their paths."""
    data = json.dumps(manifest, indent=1).encode()
    (folder / SEAL).write_text(checksum(data))
    (folder / MANIFEST).write_bytes(data)
    return [folder / SEAL, folder / MANIFEST]


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of the step in `path`. Raises OSError or ValueError if it is damaged or a file is missing or of another size."""
    data = (path / MANIFEST).read_bytes()
    if checksum(data).encode() != (path / SEAL).read_bytes():
        raise ValueError(f"{MANIFEST} and {SEAL} do not fit: one of them is damaged")
    manifest = json.loads(data)
    if manifest["schema"] != SCHEMA:
        raise ValueError(f"it has schema {manifest['schema']}, which only another version of titanlite reads, not {SCHEMA}")
    sizes = file_sizes(path)
    for name, file in manifest["files"].items():
        if sizes.get(name) != file["size"]:
            raise ValueError(f"{name} has {sizes[name]} bytes instead of {file['size']}" if name in sizes else f"{name} is missing")
    if strange := sizes.keys() - {MANIFEST, SEAL, *manifest["files"]}:
        raise ValueError(f"{', '.join(sorted(strange))} does not belong to the step")
    return manifest


def file_sizes(path: Path) -> dict[str, int]:
    """Name, relative to `path` -> bytes, of every file below it."""
    if isinstance(path, Path):
        return {p.relative_to(path).as_posix(): p.stat().st_size for p in path.rglob("*") if p.is_file()}
    path.fs.invalidate_cache()  # another process may have written since
    found = path.fs.find(path.path, detail=True)  # one request, whatever the number of files
    return {name.split(f"/{path.name}/", 1)[1]: info["size"] for name, info in found.items()}


def problems_of(path: Path, *, every_byte: bool = True) -> list[str]:
    """What is wrong with the step in `path`, nothing where it is good."""
    try:
        manifest = read_manifest(path)
    except (OSError, ValueError) as error:
        return [str(error)]
    return damaged_files(path, manifest, manifest["files"]) if every_byte else []


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
    crc, block = 0, memoryview(bytearray(1 << 20))  # one block used again: new memory costs as much as the checksum
    with path.open("rb") as file:
        while n := file.readinto(block):
            crc = zlib.crc32(block[:n], crc)
    return f"{crc:08x}"


def checksum(data: bytes) -> str:
    return f"{zlib.crc32(data):08x}"
