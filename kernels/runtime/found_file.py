"""A small file in the user's cache folder that keeps what was measured on a machine, by environment and key.

It only saves time: an absent, corrupt or unwritable file costs another measurement, and never fails a call.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

NAME = "measured_kernels.json"
"""Name of the file, in the folder `ringattn` of the cache folder."""


def find_path() -> Path | None:
    """Return the place of the file: below XDG_CACHE_HOME where that is an absolute path, or ~/.cache; None: no home is known."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():
        try:
            folder = Path.home() / ".cache"
        except RuntimeError:
            return None
    return folder / "ringattn" / NAME


def read(environment: str, key: str) -> Any:
    """Return the JSON value of a key; None: there is none that can be read."""
    found = _read_all().get(environment)
    return found.get(key) if isinstance(found, dict) else None


def write(environment: str, key: str, value: Any) -> None:
    """Keep a JSON value. The file is replaced as a whole, so that readers see the old one or the new one.

    Of two processes that write at once one may lose its value, and measures again when it comes again.
    """
    path, known = find_path(), _read_all()
    if path is None:
        return
    found = known.get(environment)
    known[environment] = {**(found if isinstance(found, dict) else {}), key: value}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=NAME)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(known, file, indent=1)
            os.replace(name, path)
        except OSError:
            os.unlink(name)
            raise


def _read_all() -> dict[str, Any]:
    path = find_path()
    try:
        found = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
