"""One world per size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.world import World


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/distributed" in str(item.path):
            item.add_marker(pytest.mark.distributed)


@pytest.fixture(scope="package")
def worlds() -> Iterator[dict[int, World]]:
    """Worlds by size; started when first used. They end with this folder: what runs in them, idle or not, slows others down."""
    by_size = {size: World(size) for size in (1, 2, 3, 4)}
    yield by_size
    for world in by_size.values():
        world.stop()
