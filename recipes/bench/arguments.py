"""What the command lines of the benchmarks have in common."""

import typer

__all__ = ["parse_numbers"]


def parse_numbers(text: str, *, option: str, least: int = 1) -> list[int]:
    """`1,2,4` as numbers of an option.

    Raises:
        typer.BadParameter: something in it is no number from `least`.

    """
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isdigit() and int(number) >= least for number in numbers):
        raise typer.BadParameter(f"{option} is a comma-separated list of numbers from {least}, such as 1,2, got {text!r}")
    return [int(number) for number in numbers]
