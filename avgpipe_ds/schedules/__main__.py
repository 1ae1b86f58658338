"""`python -m avgpipe_ds.schedules`: the timetable of a schedule, and what the simulator expects of it."""

from __future__ import annotations

import argparse

from avgpipe_ds.schedules.costs import StageCosts
from avgpipe_ds.schedules.plans import SCHEDULE_NAMES, plan_all_stages
from avgpipe_ds.schedules.simulate import simulate, timetable
from avgpipe_ds.schedules.validate import validate


def main(arguments: list[str] | None = None) -> None:
    """Print the timetable of the first iterations, and the figures of the steady state."""
    parser = argparse.ArgumentParser(prog="python -m avgpipe_ds.schedules", description=__doc__)
    parser.add_argument("--schedule", choices=SCHEDULE_NAMES, default="1f1b")
    parser.add_argument("--stages", type=int, default=4, metavar="K")
    parser.add_argument("--micro-batches", type=int, default=8, metavar="M")
    parser.add_argument(
        "--advance", type=int, default=0, metavar="A", help="forwards further ahead of the next stage (advance_forward only)"
    )
    parser.add_argument("--pipelines", type=int, default=1, metavar="N")
    parser.add_argument("--iterations", type=int, default=1, help="iterations to draw")
    parser.add_argument("--forward", type=float, default=1.0, metavar="SECONDS")
    parser.add_argument("--backward", type=float, default=2.0, metavar="SECONDS")
    parser.add_argument("--message", type=float, default=0.2, metavar="SECONDS", help="from a computation to its neighbour")
    parser.add_argument("--barrier", action="store_true", help="pipelines wait for each other after every iteration")
    parser.add_argument("--blocking-sends", action="store_true", help="a stage computes nothing while it sends")
    options = parser.parse_args(arguments)
    settings = {
        "num_pipelines": options.pipelines,
        "barrier": options.barrier,
        "blocking_sends": options.blocking_sends,
    }
    try:
        plans = plan_all_stages(
            options.schedule, num_stages=options.stages, num_micro_batches=options.micro_batches, advance=options.advance
        )
        validate(plans)
        costs = StageCosts.uniform(forward_s=options.forward, backward_s=options.backward, message_s=options.message)
        drawn = simulate(plans, costs, num_iterations=options.iterations, **settings)
        steady = simulate(plans, costs, **settings)
    except ValueError as error:
        parser.error(str(error))
    print(timetable(drawn))
    print(f"steady state: {steady.seconds_per_iteration:.4g} s per iteration of {options.pipelines} batch(es)")
    print("busy fraction per stage:", *(f"{busy:.2f}" for busy in steady.busy_fraction))
    print("stored micro-batches per stage and pipeline:", *steady.peak_stored)


if __name__ == "__main__":
    main()
