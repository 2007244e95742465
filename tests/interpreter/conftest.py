import os

import pytest


def pytest_collection_modifyitems(items):
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    skip = pytest.mark.skip(reason="needs TRITON_INTERPRET=1 from the start of the process")
    for item in items:
        if "interpreter" in item.path.parts:
            item.add_marker(skip)
