"""What a run needs to continue bit for bit, beside DeepSpeed's own checkpoint of the reference model.

One file per rank: for each pipeline its weights, masters, optimizer, scheduler and random state at the start of the next
iteration, the reference's shard, and the position in the data. Work in flight is not saved: it is done again from that start.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any, Protocol

import torch

from avgpipe_ds import deepspeed_compat as compat
from avgpipe_ds.atomic import replacing
from avgpipe_ds.averaging.reference import Reference
from avgpipe_ds.errors import AgreedError, AvgPipeError
from avgpipe_ds.execution.pipeline import Pipeline
from avgpipe_ds.tuning.adaptive_advance import AdaptiveAdvance

__all__ = ["read", "restore", "save", "snapshot", "start_from_first"]


class Run(Protocol):
    """What is saved and restored: the engine, as far as it matters here."""

    consumed_micro_batches: int
    global_samples: int
    global_steps: int

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """Those of this rank."""

    @property
    def advance(self) -> AdaptiveAdvance:
        """How `"advance": "auto"` stands."""

    @property
    def iteration(self) -> int:
        """How many iterations have been trained."""

    @property
    def reference(self) -> Reference | None:
        """This stage's shard of the reference model."""

    def restart(self, iteration: int) -> None:
        """Continue from the present weights."""


_FILES = "avgpipe-stage_*.pt"
_COUNTERS = ("global_steps", "skipped_steps", "micro_steps")


def save(run: Run, save_dir: str, tag: str) -> None:
    """Write this rank's file. Every rank calls it, between two iterations."""
    path = Path(save_dir, tag, _file(run))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        torch.save(_state(run), part)


def snapshot(run: Run) -> dict[str, Any]:
    """A copy, in the host's memory, of what `save` writes; for `restore`."""
    file = io.BytesIO()
    torch.save(_state(run), file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False)
    return state


def _state(run: Run) -> dict[str, Any]:
    reference = run.reference
    return {
        "shape": _shape(run),
        "iteration": run.iteration,
        "consumed_micro_batches": run.consumed_micro_batches,
        "global_samples": run.global_samples,
        "pipelines": [_pipeline_state(pipeline) for pipeline in run.pipelines],
        "reference": None if reference is None else reference.rule.state_dict(),
        "random": torch.get_rng_state(),
        "advance": run.advance.state_dict(),
    }


def read(run: Run, load_dir: str, tag: str | None, *, weights_only: bool, any_number: bool = False) -> dict[str, Any] | None:
    """This rank's file; None if there is none because plain DeepSpeed saved the checkpoint, there is no checkpoint, or only the
    reference's weights are wanted.

    Every rank calls it. Nothing is changed before all have found theirs fit. With `any_number` that of pipelines may differ.

    Raises:
        AgreedError: with a `ValueError` if it was saved at another shape, or only some ranks find it.

    """
    folder, state, problem = None, None, None
    try:
        folder = _folder(load_dir, tag)
        if folder is not None and not weights_only:
            state = _fitting_state(run, folder, any_number=any_number)
    except Exception as error:  # noqa: BLE001 - told to all ranks
        problem = error
    stage = run.pipelines[0].stage
    found = stage.rendezvous.agree(("load",), stage.topology.world_ranks, problem, (folder is not None, state is not None))
    if len(set(found)) > 1:
        without = [rank for rank, has in zip(stage.topology.world_ranks, found, strict=True) if has != max(found)]
        raise AgreedError(
            ValueError(f"ranks {without} find no checkpoint in {load_dir}, the others do: use a folder that all machines share")
        )
    return state


def restore(run: Run, state: dict[str, Any], *, load_optimizer_states: bool, load_lr_scheduler_states: bool) -> None:
    """Continue from what `read` gave, after DeepSpeed has loaded its own files. Every rank calls it."""
    for pipeline, saved in zip(run.pipelines, state["pipelines"], strict=True):
        _load_pipeline(pipeline, saved)
        if load_optimizer_states:
            pipeline.engine.basic_optimizer.load_state_dict(saved["optimizer"])
            compat.load_scaler_state(pipeline.engine, saved["scaler"])
        if load_lr_scheduler_states and pipeline.engine.lr_scheduler is not None and saved["scheduler"] is not None:
            pipeline.engine.lr_scheduler.load_state_dict(saved["scheduler"])
    if run.reference is not None:
        run.reference.rule.load_state_dict(state["reference"])
    run.consumed_micro_batches = state["consumed_micro_batches"]
    run.global_samples = state["global_samples"]
    torch.set_rng_state(state["random"])
    if "advance" in state:
        run.advance.load_state_dict(state["advance"])
    run.restart(iteration=state["iteration"])


@torch.no_grad()
def start_from_first(run: Run, *, weights_only: bool) -> None:
    """Start all pipelines and the reference from pipeline 0's present state, after DeepSpeed has loaded it. Every rank calls it.

    With `weights_only`, optimizers, schedulers and counters stay as they are.
    """
    first = run.pipelines[0]
    for pipeline in run.pipelines[1:]:
        _copy(list(pipeline.module.parameters()), list(first.module.parameters()))
        _copy(list(pipeline.module.buffers()), list(first.module.buffers()))
        _copy(compat.masters_of(pipeline.engine), compat.masters_of(first.engine))
        if weights_only:
            continue
        pipeline.engine.basic_optimizer.load_state_dict(copy.deepcopy(first.engine.basic_optimizer.state_dict()))
        compat.load_scaler_state(pipeline.engine, compat.scaler_state(first.engine))
        if first.engine.lr_scheduler is not None:
            pipeline.engine.lr_scheduler.load_state_dict(copy.deepcopy(first.engine.lr_scheduler.state_dict()))
        for name in _COUNTERS:
            setattr(pipeline.engine, name, getattr(run, name))
    if run.reference is not None:
        run.reference.rule.initialize(compat.masters_of(first.engine))
    run.restart(iteration=run.iteration if weights_only else int(run.global_steps))


def _folder(load_dir: str, tag: str | None) -> Path | None:
    """Where the checkpoint is; None if there is none to continue from."""
    latest = Path(load_dir, "latest")
    if tag is None and not latest.exists():
        return None
    folder = Path(load_dir, latest.read_text().strip() if tag is None else str(tag))
    if not folder.is_dir():
        raise ValueError(f"there is no checkpoint {folder}: name the tag of one that exists")
    return folder


def _fitting_state(run: Run, folder: Path, *, any_number: bool) -> dict[str, Any] | None:
    path = folder / _file(run)
    others = sorted(folder.glob(_FILES))
    if not others:
        return None
    # Any rank's file tells the shape of the whole; a rank that has none of its own still says what is wrong.
    state: dict[str, Any] = torch.load(path if path.exists() else others[0], map_location="cpu", weights_only=False)
    saved, present = state["shape"], _shape(run)
    if any_number:
        present |= {name: saved[name] for name in ("num_pipelines", "averaging rule")}
    if saved != present:
        different = [f"{name} {saved.get(name)!r}, now {value!r}" for name, value in present.items() if saved.get(name) != value]
        raise ValueError(
            f"the checkpoint {folder} was saved with {'; '.join(different)}. Resume with the same, or take only the "
            "reference's weights with load_module_only=True"
        )
    if not path.exists():
        raise ValueError(f"{path} is missing, so the checkpoint is incomplete: load another tag")
    return state


def _shape(run: Run) -> dict[str, Any]:
    topology = run.pipelines[0].stage.topology
    return {
        "num_pipelines": len(run.pipelines),
        "num_stages": topology.num_stages,
        "data_parallel_replicas": len(topology.replica_ranks),
        "num_micro_batches": run.pipelines[0].stage.num_micro_batches,
        "optimizer": type(run.pipelines[0].engine.basic_optimizer).__name__,
        "averaging rule": None if run.reference is None else run.reference.rule.name,
    }


def _file(run: Run) -> str:
    topology = run.pipelines[0].stage.topology
    replica = topology.replica_ranks.index(topology.rank)
    return f"avgpipe-stage_{topology.stage_id:02d}-replica_{replica:02d}.pt"


def _pipeline_state(pipeline: Pipeline) -> dict[str, Any]:
    engine = pipeline.engine
    random_state, buffers = pipeline.start_of_iteration
    return {
        "weights": [p.detach() for p in pipeline.module.parameters() if p.requires_grad],
        "buffers": buffers,
        "masters": [master.detach() for master in compat.masters_of(engine)] if compat.has_own_collectives(engine) else None,
        "optimizer": engine.basic_optimizer.state_dict(),
        "scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
        "scaler": compat.scaler_state(engine),
        "random": random_state,
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
    }


@torch.no_grad()
def _load_pipeline(pipeline: Pipeline, saved: dict[str, Any]) -> None:
    engine = pipeline.engine
    _copy([p for p in pipeline.module.parameters() if p.requires_grad], saved["weights"])
    _copy(list(pipeline.module.buffers()), saved["buffers"])
    if saved["masters"] is not None:
        _copy(compat.masters_of(engine), saved["masters"])
    pipeline.random.load_state_dict(saved["random"])
    for name, value in saved["counters"].items():
        setattr(engine, name, value)


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if len(targets) != len(sources):
        raise AvgPipeError(
            f"the checkpoint has {len(sources)} tensors where this stage has {len(targets)}: was the model changed?"
        )
    for target, source in zip(targets, sources, strict=True):
        target.data.copy_(source)
