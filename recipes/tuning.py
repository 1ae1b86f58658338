"""Does tuning choose well? A grid of settings is measured, and predicted from one profile.

    deepspeed --num_accelerators 4 recipes/tuning.py                    # emulated accelerators
    deepspeed --num_accelerators 2 recipes/tuning.py --mode real        # transformer layers, a core each

    # Algorithm 1 beside fixed advances
    deepspeed --num_accelerators 4 recipes/tuning.py --pipelines 1 --micro-batches 8 --advances 0,1,2,3 --searches 3

Regret is how much slower than the best measured setting the chosen one is. The workload is that of recipes/benchmark.py.
"""

import sys
from dataclasses import replace
from typing import Annotated

import torch.distributed as dist
import typer
from bench.adaptive import Search, search_advance
from bench.arguments import (
    Batches,
    BatchSize,
    Clipping,
    FixedMs,
    ForwardMs,
    InputMs,
    Length,
    LocalRank,
    Mode,
    Output,
    Repeats,
    Warmup,
    WeightMs,
    Width,
    check_output,
    make_workload,
    parse_numbers,
    write_output,
)
from bench.provenance import provenance
from bench.start import known_mode, start
from bench.tuning import Measurement, conclusions, grid, measure_grid, take_profile
from bench.tuning_table import print_tuning


def main(
    mode: Mode = "emulated",
    batch: BatchSize = 32,
    pipelines: Annotated[str, typer.Option(help="comma-separated N")] = "1,2,3",
    micro_batches: Annotated[str, typer.Option(help="comma-separated M")] = "2,4,8,16",
    advances: Annotated[str, typer.Option(help="comma-separated advances")] = "0",
    profile_micro_batches: Annotated[int, typer.Option(min=1, help="M of the profile, which trains one pipeline")] = 8,
    iterations: Annotated[int, typer.Option(min=1, help="iterations to profile")] = 20,
    searches: Annotated[int, typer.Option(min=0, help="runs that find the advance out, for each N and M of the grid")] = 0,
    fixed_ms: FixedMs = 2.0,
    forward_ms: ForwardMs = 4.5,
    input_ms: InputMs = 4.5,
    weight_ms: WeightMs = 4.5,
    length: Length = 0,
    width: Width = 0,
    clipping: Clipping = 1.0,
    batches: Batches = 12,
    repeats: Repeats = 3,
    warmup: Warmup = 4,
    output: Output = None,
    local_rank: LocalRank = -1,
) -> None:
    """Print measured beside predicted times, and what the two predictors would have chosen."""
    which = known_mode(mode)
    settings = grid(
        parse_numbers(pipelines, option="--pipelines"),
        parse_numbers(micro_batches, option="--micro-batches"),
        parse_numbers(advances, option="--advances", least=0),
        batch=batch,
    )
    check_output(output)
    say = start(which, local_rank)
    workload = make_workload(
        which,
        batch=batch,
        ms=(fixed_ms, forward_ms, input_ms, weight_ms),
        length=length,
        width=width,
        clipping=clipping,
    )
    profile, profile_s = take_profile(workload, profile_micro_batches, iterations=iterations)
    say(f"profile of {iterations} iterations at N = 1, M = {profile_micro_batches}: {profile_s:.1f} s")
    measured: list[Measurement] = measure_grid(workload, settings, batches=batches, repeats=repeats, warmup=warmup, say=say)
    starts = [replace(setting, advance=0) for setting in settings]
    found_out: list[Search] = []
    for number in range(searches):
        for setting in dict.fromkeys(starts):
            found_out.append(search_advance(workload, setting))
            say(f"search {number + 1} of {searches}: {found_out[-1].settled} after {found_out[-1].iterations} iterations")
    if dist.get_rank() == 0:
        found = conclusions(profile, profile_s, measured, found_out)
        print_tuning(found)
        head = provenance(sys.argv, num_accelerators=workload.num_stages)
        write_output(output, lambda: {**head, **found.as_json(), "profile": profile.model_dump()})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
