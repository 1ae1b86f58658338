"""Which DeepSpeed this is."""

from __future__ import annotations

import logging

from packaging.version import Version

__all__ = ["check_deepspeed_version"]

logger = logging.getLogger(__name__)

MINIMUM_DEEPSPEED = "0.19.8"
NEWEST_TESTED_DEEPSPEED = "0.19.8"


def check_deepspeed_version(found: str) -> None:
    """Refuse a DeepSpeed that is too old, warn once about one that was not tested.

    Raises:
        ImportError: older than `MINIMUM_DEEPSPEED`.

    """
    if Version(found) < Version(MINIMUM_DEEPSPEED):
        raise ImportError(
            f"avgpipe_ds needs deepspeed >= {MINIMUM_DEEPSPEED}, found {found}: "
            f"pip install --upgrade 'deepspeed>={MINIMUM_DEEPSPEED}'"
        )
    if Version(Version(found).base_version) > Version(NEWEST_TESTED_DEEPSPEED):
        logger.warning(
            "deepspeed %s is newer than %s, the newest that avgpipe_ds was tested with", found, NEWEST_TESTED_DEEPSPEED
        )
