"""The launch scripts are no installed package: their folder is what a start puts first in the search path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
