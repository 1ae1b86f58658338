import subprocess
import sys

import pytest

from avgpipe_ds import data


def imported(code):
    """Which of the heavy modules `code` imports, in a new process."""
    heavy = "['torch', 'transformers', 'datasets', 'deepspeed']"
    run = [sys.executable, "-c", f"{code}\nimport sys\nprint([name for name in {heavy} if name in sys.modules])"]
    return subprocess.run(run, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


def test_the_package_alone_imports_nothing_heavy():
    assert imported("import avgpipe_ds.data") == "[]"
    assert imported("from avgpipe_ds.data import BatchShape, load") == "[]"


def test_none_of_it_imports_deepspeed():
    code = "import avgpipe_ds.data as data\nfor name in data.__all__: getattr(data, name)"
    assert "deepspeed" not in imported(code)


def test_all_names_are_there():
    assert all(getattr(data, name) is not None for name in data.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Colate'"):
        _ = data.Colate
