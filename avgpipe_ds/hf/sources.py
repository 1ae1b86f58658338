"""Where weights come from: a folder or hub repository of transformers, or a model in memory.

A source lists the tensors it has without reading them, and reads one at a time, so a stage touches no more than its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)
from transformers.utils.hub import get_checkpoint_shard_files


class WeightSource(Protocol):
    """Named tensors, readable one by one."""

    def __iter__(self) -> Iterator[str]:
        """The names of the tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU."""


class SafetensorsSource:
    """One or more safetensors files. Only the headers and the tensors asked for are read.

    A file is open only while a tensor of it is read: the pages of a file that stays mapped count as memory of the process.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self._places: dict[str, tuple[str, tuple[int, ...]]] = {}
        for file in files:
            with _opened(file) as tensors:
                self._places |= {name: (file, tuple(tensors.get_slice(name).get_shape())) for name in tensors.keys()}

    def __iter__(self) -> Iterator[str]:
        """The names of the tensors."""
        return iter(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Read off the header."""
        return self._places[name][1]

    def read(self, name: str) -> Tensor:
        """Read this tensor's bytes."""
        with _opened(self._places[name][0]) as tensors:
            tensor: Tensor = tensors.get_tensor(name)
        return tensor


def _opened(file: str) -> Any:
    """A safetensors file, closed at the end of a `with`.

    Raises:
        ValueError: it is no such file, or only a part of one.

    """
    try:
        return safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{file} can't be read, {error}: it may have been cut off when it was copied; copy it again") from error


class StateDictSource:
    """A state dict in memory, or files of `torch.save` mapped into it."""

    def __init__(self, state_dict: dict[str, Tensor]) -> None:
        self._tensors = state_dict

    @classmethod
    def from_files(cls, files: Sequence[str]) -> StateDictSource:
        """Map `pytorch_model*.bin` files; pages are read when a tensor is. `weights_only`: pickles cannot run code."""
        tensors: dict[str, Tensor] = {}
        for file in files:
            try:
                tensors |= torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                # Files written before torch 1.6 are no zip archives and cannot be mapped.
                tensors |= torch.load(file, map_location="cpu", weights_only=True)
        return cls(tensors)

    def __iter__(self) -> Iterator[str]:
        """The names of the tensors."""
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Known."""
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> Tensor:
        """The tensor, shared with the model it came from."""
        return self._tensors[name].detach().cpu()


def open_pretrained(name_or_folder: str) -> WeightSource:
    """The weights of a local folder or a hub repository: safetensors if there are any, else `pytorch_model.bin`.

    Every rank calls it; on the hub, each machine downloads once into transformers' cache.

    Raises:
        ValueError: neither kind of file is there.

    """
    candidates = (
        (SAFE_WEIGHTS_NAME, False, SafetensorsSource),
        (SAFE_WEIGHTS_INDEX_NAME, True, SafetensorsSource),
        (WEIGHTS_NAME, False, StateDictSource.from_files),
        (WEIGHTS_INDEX_NAME, True, StateDictSource.from_files),
    )
    for filename, is_index, open_files in candidates:
        path = cached_file(name_or_folder, filename, _raise_exceptions_for_missing_entries=False)
        if path is None:
            continue
        if not is_index:
            return open_files([path])
        _check_shards(Path(path), name_or_folder)
        return open_files(get_checkpoint_shard_files(name_or_folder, path)[0])
    raise ValueError(
        f"expected weights in {name_or_folder!r} ({', '.join(name for name, *_ in candidates)}), found none of these files: "
        f"pass a folder written by save_pretrained, or a config for random weights"
    )


def _check_shards(index: Path, name_or_folder: str) -> None:
    """Name the shards that a local folder lacks; on the hub, downloading tells."""
    if not Path(name_or_folder).is_dir():
        return
    shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    missing = [shard for shard in shards if not (index.parent / shard).is_file()]
    if missing:
        raise ValueError(
            f"{index} lists {len(shards)} weight files, but these are not there: {missing}; copy them into the folder"
        )
