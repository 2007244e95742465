"""HTTP clients of the tests of the server."""

import inspect

import httpx

from tests.support.timing import HANGS_S

# all calls of httpx share this default, 5 s: a busy machine may need them
for kind in ("connect", "read", "write", "pool"):
    setattr(inspect.signature(httpx.get).parameters["timeout"].default, kind, HANGS_S)
