"""What the command lines of the benchmarks have in common."""

import typer

__all__ = ["parse_pipelines"]


def parse_pipelines(text: str) -> list[int]:
    """`1,2,4` as numbers of pipelines.

    Raises:
        typer.BadParameter: something in it is no number from 1.

    """
    numbers = [part.strip() for part in text.split(",")]
    if not all(number.isdigit() and int(number) >= 1 for number in numbers):
        raise typer.BadParameter(f"--pipelines is a comma-separated list of numbers from 1, such as 1,2, got {text!r}")
    return [int(number) for number in numbers]
