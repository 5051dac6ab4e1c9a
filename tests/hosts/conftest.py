from collections.abc import Iterator

import pytest
from network import Network, missing


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Start a switch for the hosts of a module."""
    if reason := missing():
        pytest.skip(reason)
    with Network() as hosts:
        yield hosts
