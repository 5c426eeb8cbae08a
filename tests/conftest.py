"""Fixtures that every room's tests share."""

import pytest
from hypothesis import settings

# A busy machine must not fail a test: only what a property says decides.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The caller's event loop; the runtime's own is always asyncio."""
    return request.param
