"""Models that are named as on the hub: their files are fetched, or found in its cache."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipelines.entry import PipelineLookupError

__all__ = ["fetch_index", "fetch_model", "is_hub_name"]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HOW = ("cache_dir", "force_download", "local_files_only", "revision", "token")


def is_hub_name(path: str | Path) -> bool:
    """Whether a text that is no path of this machine reads `owner/model`."""
    return isinstance(path, str) and _NAME.fullmatch(path) is not None and not os.path.exists(path)  # noqa: PTH110  (as in `read_folder`)


def fetch_index(name: str, *, given: Mapping[str, Any]) -> Path:
    """Return a folder with a model's index, and with more of it at most.

    Args:
        name: `owner/model`.
        given: Arguments of the load; those that say how files are fetched are taken from it.

    Raises:
        PipelineLookupError: The hub has no such model, or cannot be reached, and the cache does not have it.
    """
    from huggingface_hub import hf_hub_download  # noqa: PLC0415  (importing this package imports nothing large)

    return Path(_fetched(name, lambda: hf_hub_download(name, "model_index.json", **_how(given)))).parent


def fetch_model(name: str, cls: Any, *, given: Mapping[str, Any]) -> Path:
    """Return the folder with a model's files: safetensors, and nothing of components that are given.

    Args:
        name: `owner/model`.
        cls: The pipeline's class.
        given: Arguments of the load.

    Raises:
        PipelineLookupError: As `fetch_index`, or the model has no safetensors.
    """
    others = {key: value for key, value in given.items() if key not in _HOW}
    return Path(_fetched(name, lambda: cls.download(name, **others, **_how(given), use_safetensors=True)))


def _how(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: given[key] for key in _HOW if key in given}


def _fetched(name: str, fetch: Callable[[], Any]) -> Any:
    try:
        return fetch()
    except (OSError, ValueError) as error:
        cause = " ".join(str(error).split()) or type(error).__name__
        raise PipelineLookupError(
            f"cannot load {name!r}: it is no local folder, and on the hub it was not found or not reached: {cause}"
        ) from error
