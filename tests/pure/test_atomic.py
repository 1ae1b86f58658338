"""Files that are there as a whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from avgpipe_ds.atomic import replacing


def test_a_file_is_replaced_when_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "state"
    file.write_text("old")
    with replacing(file) as part:
        part.write_text("new")
        assert file.read_text() == "old" and part.parent == tmp_path
    assert file.read_text() == "new" and list(tmp_path.iterdir()) == [file]


def test_what_fails_leaves_the_old_one_alone(tmp_path: Path) -> None:
    file = tmp_path / "state"
    file.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(file) as part:
        part.write_text("ne")
        raise KeyboardInterrupt
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]
