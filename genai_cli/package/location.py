"""File names that a package declares: relative, inside its folder, and there."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from genai_cli.errors import GenaiError
from genai_cli.package.document import Document


def inside(folder: Path, name: str, config: Document, *keys: str | int) -> Path:
    """`folder / name` for the file name at `keys` of `config`. GenaiError when it leaves the folder or is missing."""
    parts = PurePosixPath(name.replace("\\", "/"))
    if not name or parts.is_absolute() or ".." in parts.parts or ":" in name or "\0" in name:
        config.fail(keys, "a relative path inside the model's folder, without `..`")
    path = folder / parts
    if not path.is_file():
        raise GenaiError(
            f"{config.where(*keys)}: the file `{name}` does not exist in `{folder}`",
            hint="download or export the whole folder again",
        )
    return path
