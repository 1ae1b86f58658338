"""Run a DeepSpeed script on an emulated cluster: K hosts on this machine, with links of a chosen bandwidth between them.

    sudo -E env "PATH=$PATH" python launch/cluster.py --hosts 2 --bandwidth 1gbit recipes/benchmark.py --mode real
    sudo -E env "PATH=$PATH" python launch/cluster.py --hosts 2 --bandwidth 1gbit --measure

Every host is a network namespace, in which DeepSpeed's own launcher runs as it does on a node of a real cluster. README.md says
what is emulated and what is not.
"""

import base64
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from emulation.commands import CommandError
from emulation.hosts import StopSignals, cores_of_hosts, run_on_hosts, say
from emulation.network import MAX_HOSTS, Network, remove_leftovers
from emulation.requirements import missing
from emulation.shaping import Shaping, parse_bandwidth

MASTER_PORT = 29500  # DeepSpeed's default, and free: hosts share no ports with the machine
STARTED_AS = "AVGPIPE_CLUSTER"
MEASURE = Path(__file__).parent / "emulation" / "measure.py"

app = typer.Typer(add_completion=False, rich_markup_mode=None)


# What follows the script is the script's, also what looks like an option; DeepSpeed's launcher draws the line at the same place.
@app.command(context_settings={"allow_interspersed_args": False})
def main(
    script: Annotated[list[str] | None, typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="as for `deepspeed`")] = None,
    hosts: Annotated[int, typer.Option(min=1, max=MAX_HOSTS, help="how many hosts")] = 2,
    bandwidth: Annotated[str, typer.Option(metavar="RATE", help="of each link, in each direction: 200mbit, 1gbit")] = "1gbit",
    accelerators: Annotated[int, typer.Option(min=1, help="accelerators, and so processes, per host")] = 1,
    pin: Annotated[
        bool | None,
        typer.Option("--pin/--no-pin", help="give each accelerator a core of its own  [default: if there are enough]"),
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="measure the links instead of running a script")] = False,
    clean: Annotated[bool, typer.Option("--clean", help="only remove what clusters that were killed have left")] = False,
) -> None:
    """Run SCRIPT on emulated hosts. Exit code: the script's; 2 if nothing could be started; 128 and its number after a signal."""
    _check_arguments(script, hosts=hosts, measure=measure, clean=clean)
    shaping = _shaping(bandwidth)
    cores = _cores(hosts, accelerators, pin)
    _check_machine(with_deepspeed=script is not None)
    try:
        with StopSignals() as signals:
            if left := remove_leftovers():
                say(f"removed what a killed cluster left: {', '.join(left)}")
            if clean:
                return
            on_cores = "" if cores is None else f" on cores {' | '.join(','.join(map(str, own)) for own in cores)}"
            say(f"{hosts} hosts{on_cores}, links of {shaping}")
            # For scripts that write down how they were started, as recipes/benchmark.py does.
            more = [] if accelerators == 1 else [f"--accelerators {accelerators}"]
            more += [] if pin is None else ["--pin" if pin else "--no-pin"]
            started = ["python launch/cluster.py", f"--hosts {hosts}", f"--bandwidth {bandwidth}", *more]
            os.environ[STARTED_AS] = " ".join(started)
            with Network(hosts, shaping) as network:
                commands = _launchers(network, accelerators, script) if script else _measurement(network, shaping)
                code = run_on_hosts(network.hosts, commands, cores=cores, signals=signals)
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    raise typer.Exit(code)


def _check_arguments(script: Sequence[str] | None, *, hosts: int, measure: bool, clean: bool) -> None:
    chosen = [name for name, given in (("a script", script), ("--measure", measure), ("--clean", clean)) if given]
    if len(chosen) != 1:
        raise typer.BadParameter(f"expected one of a script, --measure and --clean, got {' and '.join(chosen) or 'none'}")
    if script and not Path(script[0]).is_file():
        raise typer.BadParameter(f"there is no script {script[0]!r} (options of cluster.py come before it)")
    if measure and hosts < 2:
        raise typer.BadParameter("--measure needs at least 2 hosts, got 1")


def _shaping(bandwidth: str) -> Shaping:
    try:
        return parse_bandwidth(bandwidth)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--bandwidth") from error


def _cores(hosts: int, accelerators: int, pin: bool | None) -> list[list[int]] | None:
    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    cores = None if pin is False else cores_of_hosts(hosts, accelerators, available=available)
    if pin and cores is None:
        wanted = f"{hosts * accelerators} cores, one per accelerator, and there are {len(available)}"
        raise typer.BadParameter(f"--pin needs {wanted}: use fewer hosts, or leave it out")
    return cores


def _check_machine(*, with_deepspeed: bool) -> None:
    found = missing()
    if with_deepspeed and importlib.util.find_spec("deepspeed") is None:
        found.append(
            f'DeepSpeed for {sys.executable}. Is it another Python, because of sudo? sudo -E env "PATH=$PATH" python ...'
        )
    if found:
        print("error: the emulated cluster needs", *found, sep="\n  - ", file=sys.stderr)
        raise typer.Exit(2)


def _launchers(network: Network, accelerators: int, script: Sequence[str]) -> list[list[str]]:
    """What `deepspeed --hostfile` would start on each node."""
    world = {f"host{h.index}": list(range(h.index * accelerators, (h.index + 1) * accelerators)) for h in network.hosts}
    encoded = base64.urlsafe_b64encode(json.dumps(world).encode()).decode()
    launcher = [sys.executable, "-u", "-m", "deepspeed.launcher.launch", f"--world_info={encoded}", "--log_level=warning"]
    launcher += [f"--master_addr={network.hosts[0].address}", f"--master_port={MASTER_PORT}"]
    return [[*launcher, f"--node_rank={host.index}", *script] for host in network.hosts]


def _measurement(network: Network, shaping: Shaping) -> list[list[str]]:
    addresses = [host.address for host in network.hosts]
    return [[sys.executable, "-u", str(MEASURE), str(host.index), str(shaping.rate_bps), *addresses] for host in network.hosts]


if __name__ == "__main__":
    app()
