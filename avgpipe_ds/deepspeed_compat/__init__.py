"""The only package that touches DeepSpeed's private parts.

Everything here was read off DeepSpeed 0.19.8. A newer version gets one warning; an older one is refused, because it lacks what
is needed here.
"""

# ruff: noqa: E402 - the version is checked between the imports

from importlib import metadata

from avgpipe_ds.deepspeed_compat.version import MINIMUM_DEEPSPEED, check_deepspeed_version

check_deepspeed_version(metadata.version("deepspeed"))  # before the imports below, which an old version has not got

from deepspeed.pipe import PipelineModule

from avgpipe_ds.deepspeed_compat.build import (
    StageEngine,
    build_stage_engine,
    config_for_other_pipelines,
    load_config,
    refuse_unsupported,
    skip_cpu_compilation,
    warn_of_compilation,
)
from avgpipe_ds.deepspeed_compat.compute import (
    autocast,
    backward_from_gradients,
    backward_from_loss,
    discard_gradients,
    forward,
    forward_alone,
    needs_inputs_with_gradient,
    optimizer_step,
)
from avgpipe_ds.deepspeed_compat.gradients import (
    gradient_bytes,
    gradients_to_reduce,
    has_own_collectives,
    local_squared_norm,
    reduces_gradients_itself,
    scale_for_reduction,
    tied_gradients,
)
from avgpipe_ds.deepspeed_compat.masters import (
    MasterGroup,
    load_scaler_state,
    master_groups,
    masters_of,
    publish_masters,
    scaler_state,
    trained_weights,
)
from avgpipe_ds.deepspeed_compat.module import (
    PLACEHOLDER,
    PartitionedModule,
    communicators_of,
    ensure_trainable,
    layers_of,
    name_of,
    place_of,
    recomputes_activations,
    tied_stages,
    weights_of,
)

__all__ = [
    "MINIMUM_DEEPSPEED",
    "MasterGroup",
    "PLACEHOLDER",
    "PartitionedModule",
    "PipelineModule",
    "StageEngine",
    "autocast",
    "backward_from_gradients",
    "backward_from_loss",
    "build_stage_engine",
    "check_deepspeed_version",
    "communicators_of",
    "config_for_other_pipelines",
    "discard_gradients",
    "ensure_trainable",
    "forward",
    "forward_alone",
    "gradient_bytes",
    "gradients_to_reduce",
    "has_own_collectives",
    "layers_of",
    "load_config",
    "load_scaler_state",
    "local_squared_norm",
    "master_groups",
    "masters_of",
    "name_of",
    "needs_inputs_with_gradient",
    "optimizer_step",
    "place_of",
    "publish_masters",
    "recomputes_activations",
    "reduces_gradients_itself",
    "refuse_unsupported",
    "scale_for_reduction",
    "scaler_state",
    "skip_cpu_compilation",
    "tied_gradients",
    "tied_stages",
    "trained_weights",
    "warn_of_compilation",
    "weights_of",
]
