"""HTTP clients of the tests of the server."""

import httpx

from tests.support.timing import HANGS_S

# all calls of httpx share this default, 5 s: a busy machine may need them
for kind in ("connect", "read", "write", "pool"):
    setattr(httpx.get.__kwdefaults__["timeout"], kind, HANGS_S)
