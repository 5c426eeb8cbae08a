"""Fixtures that every room's tests share."""

import pytest


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The caller's event loop; the runtime's own is always asyncio."""
    return request.param
