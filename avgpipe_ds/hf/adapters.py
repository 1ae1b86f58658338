"""PEFT adapters: small trained additions to a model whose own weights stay as they are.

The `peft` library puts them into the model on the meta device, before it is cut into layers. So they are part of the blocks, and
everything else follows: they are what trains, is replicated, averaged and exported, and the frozen weights around them are
stored once for all pipelines.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from avgpipe_ds.hf.sources import SafetensorsSource, WeightSource
from avgpipe_ds.hf.tasks import Task

if TYPE_CHECKING:
    from peft import PeftConfig

__all__ = ["Adapters", "open_adapters"]

logger = logging.getLogger(__name__)

_WEIGHTS = "adapter_model.safetensors"
_PEFT_TASKS = {"sequence-classification": "SEQ_CLS", "token-classification": "TOKEN_CLS", "causal-lm": "CAUSAL_LM"}
_PLAIN_STARTS = (True, False, "gaussian")
"""Ways to begin that need no more than the adapters' own tensors."""
_NAME = "default"


class Adapters:
    """The adapters of one model.

    Args:
        config: peft's.
        source: weights to begin with, of a folder that peft has written; None: new ones.

    """

    def __init__(self, config: PeftConfig, source: WeightSource | None = None) -> None:
        self.config = copy.deepcopy(config)
        self.source = source
        self._saved: dict[str, str] = {}
        self._own: frozenset[str] = frozenset()

    def inject(self, shell: Any, task: Task, base_model: str | None = None) -> Any:
        """Put them into the model on the meta device; what is not theirs is frozen.

        Args:
            shell: changed in place.
            task: decides which head is trained with them, as with peft.
            base_model: its name or folder, for whoever loads the adapters later.

        Returns:
            Peft's wrapper around the model.

        Raises:
            ValueError: peft can't put them into this model, or it is a kind that is not supported.

        """
        from peft import get_peft_model

        if getattr(self.config, "is_prompt_learning", False):
            raise ValueError(f"expected adapters inside the blocks, such as LoRA, got {type(self.config).__name__}")
        self.config.task_type = self.config.task_type or _PEFT_TASKS.get(task)
        self.config.base_model_name_or_path = base_model or self.config.base_model_name_or_path
        self.config.inference_mode = False
        before = shell.state_dict().keys()
        try:
            with torch.device("meta"):
                model = get_peft_model(shell, self.config, autocast_adapter_dtype=False, low_cpu_mem_usage=True)
        except (TypeError, ValueError) as error:
            raise ValueError(f"peft can't put these adapters into {type(shell).__name__}: {error}") from error
        self._check_kind(shell)
        self._own = frozenset(shell.state_dict()) - before
        self._saved = _names_in_files(model)
        return model

    def original(self, name: str) -> str:
        """The name that a tensor of the changed model has in the model without adapters."""
        return name.replace(".base_layer.", ".").replace(".original_module.", ".").replace(f".modules_to_save.{_NAME}.", ".")

    def is_new(self, name: str) -> bool:
        """Whether a tensor of the changed model is of the adapters, so that no checkpoint of the model has it."""
        return name in self._own and self.original(name) == name

    @property
    def trained_names(self) -> frozenset[str]:
        """The tensors that a folder of adapters has, by their names in the changed model."""
        return frozenset(self._saved)

    def located(self) -> dict[str, str]:
        """Name in the changed model -> name in `source`.

        Raises:
            ValueError: some are missing.

        """
        if self.source is None:
            return {}
        there = set(self.source)
        missing = [name for name in self._saved.values() if name not in there]
        if missing:
            raise ValueError(f"the folder of adapters lacks {len(missing)} tensors of them: {missing[:8]}; is it of this model?")
        return dict(self._saved)

    def initialise(self, shell: Any) -> None:
        """Begin as peft does, where tensors have storage; those marked as initialised stay as they are."""
        for layer in _layers(shell):
            if hasattr(layer, "reset_lora_parameters"):
                layer.reset_lora_parameters(_NAME, self.config.init_lora_weights)
            else:
                layer.reset_ia3_parameters(_NAME)

    def merged(self, shell: Any, task: Task, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of the model without adapters that computes the same.

        Args:
            shell: without adapters, on the meta device; changed.
            task: what it is for.
            tensors: all of the changed model, by name.

        """
        model = Adapters(self.config).inject(shell, task)
        shell.load_state_dict(dict(tensors), strict=False, assign=True)
        shell.tie_weights()
        merged: dict[str, Tensor] = model.merge_and_unload(safe_merge=True).state_dict()
        return {name: tensor for name, tensor in merged.items() if not tensor.is_meta}

    def write(self, tensors: Mapping[str, Tensor], folder: Path) -> None:
        """Write a folder that peft loads; `tensors` by their names in the changed model."""
        save_file(
            {self._saved[name]: tensor.contiguous() for name, tensor in tensors.items()}, folder / _WEIGHTS, {"format": "pt"}
        )
        saved = copy.deepcopy(self.config)
        saved.inference_mode = True
        saved.save_pretrained(str(folder))

    def _check_kind(self, shell: Any) -> None:
        kinds = {type(layer).__name__ for layer in _layers(shell)}
        known = all(hasattr(layer, "reset_lora_parameters") or hasattr(layer, "reset_ia3_parameters") for layer in _layers(shell))
        if not known or getattr(self.config, "use_dora", False):
            raise ValueError(f"adapters of the kind {sorted(kinds)} are not supported: expected LoRA without DoRA, or IA3")
        start = getattr(self.config, "init_lora_weights", True)
        if start not in _PLAIN_STARTS:
            raise ValueError(
                f"init_lora_weights={start!r} computes with the model's weights: expected one of {list(_PLAIN_STARTS)}"
            )


def open_adapters(adapters: str | Path | PeftConfig) -> Adapters:
    """New adapters by their config, or those of a local folder.

    Raises:
        ValueError: peft is not installed, or the folder has no adapters.

    """
    try:
        from peft import PeftConfig
    except ImportError as error:
        raise ValueError("adapters need the peft library: pip install 'avgpipe-ds[peft]'") from error
    if isinstance(adapters, PeftConfig):
        return Adapters(adapters)
    folder = Path(adapters)
    if not (folder / "adapter_config.json").is_file() or not (folder / _WEIGHTS).is_file():
        raise ValueError(f"expected a folder with adapter_config.json and {_WEIGHTS}, as peft writes it, got {str(adapters)!r}")
    return Adapters(PeftConfig.from_pretrained(str(folder)), SafetensorsSource([str(folder / _WEIGHTS)]))


def _layers(shell: nn.Module) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in shell.modules() if isinstance(module, BaseTunerLayer)]


def _names_in_files(model: Any) -> dict[str, str]:
    """Name in the changed model -> name in peft's files: peft sorts tensors that stand for themselves."""
    from peft import get_peft_model_state_dict

    prefix = "base_model.model."
    state = {name: torch.empty(0) for name in model.state_dict()}
    names = {id(tensor): name.removeprefix(prefix) for name, tensor in state.items()}
    return {names[id(t)]: name for name, t in get_peft_model_state_dict(model, state, save_embedding_layers=False).items()}
