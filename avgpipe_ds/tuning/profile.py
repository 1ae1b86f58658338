"""What one short profile found out (paper, section 5.2.1), and what it says of micro-batches of other sizes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from avgpipe_ds.atomic import replacing
from avgpipe_ds.errors import AvgPipeError
from avgpipe_ds.memory.model_state import ModelState

__all__ = ["Layer", "Message", "Passes", "Profile", "StageProfile"]

_SATURATED = 0.95
Seconds = Annotated[float, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Passes(_Part):
    """Forward and backward of one micro-batch of some size; medians.

    Attributes:
        samples: in the micro-batch.
        forward_s, backward_s: seconds.
        activation_bytes: that autograd keeps from the one to the other.

    """

    samples: int = Field(ge=1)
    forward_s: float = Field(gt=0)
    backward_s: float = Field(gt=0)
    activation_bytes: Bytes


class Message(_Part):
    """What a stage sends to a neighbour for one micro-batch of the profile.

    Attributes:
        size: bytes.
        latency_s: seconds that an empty message takes.
        transfer_s: seconds that this one takes longer than an empty one.

    """

    size: Bytes = 0
    latency_s: Seconds = 0.0
    transfer_s: Seconds = 0.0

    def seconds(self, scale: float) -> float:
        """Of a message that is `scale` times as large."""
        return self.latency_s + scale * self.transfer_s


class Layer(_Part):
    """One layer by itself, for a micro-batch of the profile.

    Attributes:
        name: its class.
        number: its place in the model.
        seconds: forward and backward.
        weights: bytes, trained or not.
        activation_bytes: that autograd keeps in between.

    """

    name: str
    number: int = Field(ge=0)
    seconds: Seconds
    weights: Bytes
    activation_bytes: Bytes


class StageProfile(_Part):
    """One stage.

    Attributes:
        passes: of one or more sizes of micro-batches, ascending.
        activation: to the next stage; empty on the last.
        gradient: to the previous stage; empty on the first.
        step_s: seconds of one pipeline's optimizer step, as it was trained.
        averaging_s: seconds that averaging adds to it from two pipelines on, where the profile has one.
        overhead_s: seconds of executor, messages and data beside each forward and each backward, whatever their size.
        utilisation: part of equal intervals of the profile in which the stage computed.
        layers: of the stage, in order; empty where the stages can't be cut by them.
        state: what one pipeline keeps between iterations.

    """

    passes: tuple[Passes, ...] = Field(min_length=1)
    activation: Message = Message()
    gradient: Message = Message()
    step_s: Seconds = 0.0
    averaging_s: Seconds = 0.0
    overhead_s: Seconds = 0.0
    utilisation: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    layers: tuple[Layer, ...] = ()
    state: ModelState = ModelState()

    @field_validator("passes")
    @classmethod
    def _ascending(cls, passes: tuple[Passes, ...]) -> tuple[Passes, ...]:
        sizes = [one.samples for one in passes]
        if any(low >= high for low, high in pairwise(sizes)):
            raise ValueError(f"expected ascending numbers of samples, got {sizes}")
        return passes

    def utilisation_at(self, samples: float) -> float:
        """How much of the accelerator a micro-batch uses, as far as the probe knows: its speed as a part of the best one seen."""

        def seconds(size: float) -> float:
            return self._at(size, lambda one: one.forward_s + one.backward_s)

        best = min(seconds(one.samples) / one.samples for one in self.passes)
        return best * samples / seconds(samples)

    def forward_s(self, samples: float) -> float:
        """Seconds of the forward of a micro-batch."""
        return self.overhead_s + self._at(samples, lambda one: one.forward_s)

    def backward_s(self, samples: float) -> float:
        """Seconds of the backward of a micro-batch."""
        return self.overhead_s + self._at(samples, lambda one: one.backward_s)

    def activation_bytes(self, samples: float) -> float:
        """Bytes that autograd keeps of a micro-batch."""
        return self._at(samples, lambda one: one.activation_bytes)

    def _at(self, samples: float, value: Callable[[Passes], float]) -> float:
        """Between the measured sizes, and beyond them, along straight lines; with one size, in proportion.

        A line that would fall below proportion towards small micro-batches is noise: half the samples never take less than half.
        """
        if len(self.passes) == 1:
            return value(self.passes[0]) * samples / self.passes[0].samples
        above = next((i for i, one in enumerate(self.passes) if one.samples >= samples), len(self.passes) - 1)
        low, high = self.passes[max(above, 1) - 1], self.passes[max(above, 1)]
        slope = max(0.0, (value(high) - value(low)) / (high.samples - low.samples))
        nearest = low if samples < low.samples else high
        found = value(low) + slope * (samples - low.samples)
        if samples < low.samples:
            return max(found, value(nearest) * samples / nearest.samples)
        return found


class Profile(_Part):
    """All stages.

    Attributes:
        num_pipelines, num_micro_batches: N and M of the profile.
        batch: B, samples that one pipeline trains on per optimizer step, on one data-parallel replica.
        num_replicas: data-parallel ones.
        clipping: whether steps wait for the norm of all stages' gradients.
        stages: stage 0 first.

    """

    num_pipelines: int = Field(ge=1)
    num_micro_batches: int = Field(ge=1)
    batch: int = Field(ge=1)
    clipping: bool
    num_replicas: int = Field(default=1, ge=1)
    stages: tuple[StageProfile, ...] = Field(min_length=1)

    @property
    def micro_batch(self) -> float:
        """Samples of one micro-batch of the profile."""
        return self.batch / self.num_micro_batches

    @property
    def saturated(self) -> bool:
        """Whether its micro-batches already use all of some accelerator, so that it hides what smaller ones would need."""
        return any(
            stage.passes[-1].samples > self.micro_batch and stage.utilisation_at(self.micro_batch) > _SATURATED
            for stage in self.stages
        )

    @property
    def base_samples(self) -> float:
        """The micro-batch that predictions by proportion start from: its own, or, if that is saturated, the smallest tried."""
        if not self.saturated:
            return self.micro_batch
        return min(self.micro_batch, *(stage.passes[0].samples for stage in self.stages))

    def __str__(self) -> str:
        weights = ", ".join(f"{(stage.state.trained + stage.state.frozen) / 2**20:.3g}" for stage in self.stages)
        return (
            f"{len(self.stages)} stages with {weights} MiB of weights, N = {self.num_pipelines}, M = {self.num_micro_batches},"
            f" batches of {self.batch} samples on {self.num_replicas} replica(s)"
        )

    def save(self, file: Path) -> None:
        """Write it as JSON, all or nothing."""
        with replacing(file) as part:
            part.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, file: Path) -> Profile:
        """Read what `save` wrote.

        Raises:
            AvgPipeError: it is no such file.

        """
        try:
            return cls.model_validate_json(file.read_text(encoding="utf-8"))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"])) or "the file"
            raise AvgPipeError(f"{file} is no profile, or was cut off: {place}: {first['msg']}; remove it") from error
        except (OSError, UnicodeDecodeError) as error:
            raise AvgPipeError(f"{file} is no profile: {error}") from error
