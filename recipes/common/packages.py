"""Files that optional packages carry: real models and texts for machines without a model hub.

The packages are located, never imported: most of them pull in dependencies that nobody needs for reading a file,
which is also why they are installed with `--no-deps`.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from common.errors import RecipeError

__all__ = ["GGUF_READER", "Package", "require"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One optional download: what it is imported as, and how pip calls it (with the version that is known to fit)."""

    module: str
    requirement: str

    def folder(self) -> Path:
        """Return the installed package's folder, or raise a `RecipeError` that names the pip command."""
        spec = find_spec(self.module) if _parent_is_there(self.module) else None
        if spec is None or not spec.submodule_search_locations:
            raise RecipeError(f"This needs an optional package. Install it with: pip install --no-deps {self.requirement}")
        return Path(next(iter(spec.submodule_search_locations)))


#: What transformers needs to read a GGUF file.
GGUF_READER = (
    Package(module="gguf", requirement="gguf==0.19.0"),
    Package(module="accelerate", requirement="accelerate==1.15.0"),
)


def require(*packages: Package) -> None:
    """Raise a `RecipeError` for the first package that is missing."""
    for package in packages:
        package.folder()


def _parent_is_there(module: str) -> bool:
    """Tell whether `find_spec(module)` may be asked: for `a.b` it imports `a`, and raises where that is missing."""
    parent, _, _ = module.rpartition(".")
    return not parent or find_spec(parent) is not None
