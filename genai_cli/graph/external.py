"""External weight files: found inside the model's folder, whole, and memory-mapped once each."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import numpy as np

from genai_cli.errors import GenaiError

LFS_MAGIC = b"version https://git-lfs"


class ExternalFiles:
    """The data files beside one model. Maps each file once; every weight is a view of the map."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._maps: dict[str, np.ndarray] = {}

    def view(self, tensor: str, entry: Mapping[str, str], nbytes: int) -> np.ndarray:
        """uint8 [nbytes] view of `tensor`'s bytes; `entry` is ONNX's external_data map (location, offset, length).

        Raises GenaiError naming the file, the wanted and the found size when the data is missing, short or elsewhere.
        """
        location = str(entry.get("location", ""))  # protobuf gives bytes where a string is not UTF-8
        offset = _whole(entry.get("offset", "0"), tensor, "offset")
        length = _whole(entry["length"], tensor, "length") if "length" in entry else nbytes
        if length != nbytes:
            raise GenaiError(
                f"weight `{tensor}` declares {length} bytes in `{location}`, but its shape and type need {nbytes}",
                hint="export the model again: the graph and its data file do not belong together",
            )
        data = self._map(location, tensor)
        if offset + nbytes > data.size:
            raise GenaiError(
                f"weight `{tensor}` wants bytes {offset}..{offset + nbytes} of `{location}`, which has only {data.size}",
                hint="the data file is cut short: download or export it again",
            )
        return data[offset : offset + nbytes]

    def _map(self, location: str, tensor: str) -> np.ndarray:
        if location not in self._maps:
            self._maps[location] = self._open(self._path(location, tensor), location, tensor)
        return self._maps[location]

    def _path(self, location: str, tensor: str) -> Path:
        parts = PurePosixPath(location.replace("\\", "/"))
        named = bool(parts.parts) and "\0" not in location
        if not named or parts.is_absolute() or ".." in parts.parts or ":" in parts.parts[0]:
            raise GenaiError(
                f"weight `{tensor}` points to `{location}`; wanted a path inside the model's folder",
                hint="keep the data file beside the .onnx file and name it relatively",
            )
        path = self.folder / parts
        if path.exists() and not path.resolve().is_relative_to(self.folder.resolve()):
            raise GenaiError(
                f"weight `{tensor}` points to `{location}`, a link that leaves the model's folder",
                hint="copy the data file into the model's folder",
            )
        return path

    def _open(self, path: Path, location: str, tensor: str) -> np.ndarray:
        if not path.is_file():
            raise GenaiError(
                f"data file `{location}` of weight `{tensor}` is missing in `{self.folder}`",
                hint="put the external data file beside the .onnx file",
            )
        if path.stat().st_nlink > 1:  # a second name may lie anywhere, and change the weights from there
            raise GenaiError(
                f"weight `{tensor}` points to `{location}`, a file with {path.stat().st_nlink} hard links",
                hint="give the model's folder its own copy of the data file",
            )
        with path.open("rb") as file:
            if file.read(len(LFS_MAGIC)) == LFS_MAGIC:
                raise GenaiError(
                    f"`{location}` is a Git-LFS pointer ({path.stat().st_size} bytes), not the weights",
                    hint="run `git lfs pull` in the model's folder",
                )
            if path.stat().st_size == 0:
                return np.empty(0, np.uint8)
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def _whole(text: str, tensor: str, key: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise GenaiError(f"weight `{tensor}` has external {key} `{text}`; wanted a whole number >= 0")
    return value
