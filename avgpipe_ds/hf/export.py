"""From a trained pipeline back to a folder that `transformers` loads."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from avgpipe_ds.hf.gather import gather_on_rank_zero
from avgpipe_ds.hf.module import HFPipelineModule
from avgpipe_ds.hf.shell import build_shell


def save_pretrained(
    engine_or_module: Any, directory: str | os.PathLike[str], *, dtype: torch.dtype | None = None, merge: bool = False
) -> None:
    """Write the model as transformers would, for `AutoModelFor...from_pretrained(directory)`. Every rank must call it.

    Of an engine with a reference model that model is written (`engine.reference_state_dict()`), else the module's weights.
    Rank 0 writes; the files appear complete or not at all, and replace those of an earlier save. The tokenizer is not ours
    to save.

    Args:
        engine_or_module: an engine whose `module` came from `to_pipeline`, or that module.
        directory: created if need be; must be reachable from rank 0 only.
        dtype: of the written weights; default: that of the module.
        merge: of a model with adapters, write the whole model with the adapters added to its weights; otherwise a folder of
            adapters is written, for `peft.PeftModel.from_pretrained(model, directory)`.

    Raises:
        ValueError: the module did not come from `to_pipeline`, or has no adapters to merge.
        RuntimeError: rank 0 could not write; raised on every rank.

    """
    module = engine_or_module if isinstance(engine_or_module, HFPipelineModule) else getattr(engine_or_module, "module", None)
    if not isinstance(module, HFPipelineModule):
        raise ValueError(
            f"expected an engine or module made with avgpipe_ds.hf.to_pipeline, got {type(engine_or_module).__name__}"
        )
    if merge and module.adapters is None:
        raise ValueError("merge=True is for models with adapters: this one was made without peft=")
    dtype = dtype or next(module.parameters()).dtype
    if hasattr(engine_or_module, "meet"):
        engine_or_module.meet("hf.save_pretrained")
    # A group of its own: no message of a pipeline under way can mix with these, and NCCL moves no CPU tensors.
    group = dist.new_group(backend="gloo")
    try:
        tensors = _own_tensors(engine_or_module, module, dtype, merge=merge)
        whole = gather_on_rank_zero(tensors, senders=module.topology().filter_match(data=0), group=group)
        outcome: list[str | None] = [None]
        if dist.get_rank() == 0:
            try:
                _write(module, whole, dtype, Path(directory), merge=merge)
            except Exception as error:
                outcome = [f"{type(error).__name__}: {error}"]
        dist.broadcast_object_list(outcome, src=0, group=group)
    finally:
        dist.destroy_process_group(group)
    if outcome[0] is not None:
        raise RuntimeError(f"rank 0 could not write the model to {os.fspath(directory)!r}: {outcome[0]}")


def _own_tensors(source: Any, module: HFPipelineModule, dtype: torch.dtype, *, merge: bool) -> dict[str, Tensor]:
    """What this stage speaks for and is to be written, under transformers' names."""
    wanted = None if module.adapters is None or merge else module.adapters.trained_names
    state: dict[str, Tensor] = source.reference_state_dict() if hasattr(source, "reference_state_dict") else module.state_dict()
    return {
        module.checkpoint_name(name): tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
        if module.owns(name)
        and module.first_stage_of(name) == module.stage_id
        and (wanted is None or module.checkpoint_name(name) in wanted)
    }


def _write(module: HFPipelineModule, tensors: dict[str, Tensor], dtype: torch.dtype, directory: Path, *, merge: bool) -> None:
    """Let transformers write into a hidden folder beside the target, then move file by file, the config last."""
    directory.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".saving-", dir=directory))
    try:
        if module.adapters is not None and not merge:
            module.adapters.write(tensors, staging)
        else:
            _refuse_adapters(directory)
            if module.adapters is not None:
                plain = build_shell(copy.deepcopy(module.hf_config), module.task, dtype)  # peft writes into configs
                tensors = module.adapters.merged(plain, module.task, tensors)
            build_shell(module.hf_config, module.task, dtype).save_pretrained(staging, state_dict=tensors)
        files = sorted(staging.iterdir(), key=lambda file: file.name.endswith("config.json"))
        written = {file.name for file in files}
        for file in files:
            os.replace(file, directory / file.name)
        whole = module.adapters is None or merge
        for stale in directory.glob("model*.safetensors*"):
            if whole and stale.name not in written:
                stale.unlink()
    finally:
        shutil.rmtree(staging)


def _refuse_adapters(directory: Path) -> None:
    """Transformers would add the adapters of an earlier save to the model of this one."""
    if (directory / "adapter_config.json").exists():
        raise ValueError("adapters are in this folder, which transformers would add to the model: choose another folder")
