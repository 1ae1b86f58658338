"""Stages whose boundaries are given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.distributed.history import assert_same_history, train, whole
from tests.distributed.models import Run, Task
from tests.distributed.world import CaseFailed, World


@dataclass(frozen=True)
class Cut(Task):
    """As a configuration has it."""

    partition: tuple[int, ...] = (0, 3, 4)

    def pipeline(self, num_stages: int, **options: Any) -> Any:
        import avgpipe_ds

        partition = avgpipe_ds.partition_of({"avgpipe": {"partition": list(self.partition)}})
        return avgpipe_ds.PipelineModule(self.layers(), num_stages=num_stages, loss_fn=self.loss, partition=partition, **options)


RUN = Run(optimizer="adamw", clipping=0.5, avgpipe={"num_pipelines": 2})


def layers_of_stages(run: Run) -> set[str]:
    return {name.partition(".")[0] for name, _ in run.task.pipeline(run.num_stages).named_parameters()}


def test_the_same_training_with_other_stages(worlds: dict[int, World]) -> None:
    uneven = replace(RUN, task=Cut(), avgpipe={"num_pipelines": 2, "partition": [0, 3, 4]})
    assert worlds[2].run(layers_of_stages, uneven) == [{"0", "1", "2"}, {"3"}]
    assert_same_history(whole(worlds[2].run(train, uneven)), whole(worlds[2].run(train, RUN)))


@pytest.mark.parametrize(
    ("partition", "error"),
    [
        ((0, 2, 3, 4), "partition [0, 2, 3, 4] is of 3 stages, the module has 2"),
        ((0, 2, 5), "partition [0, 2, 5] ends at layer 5, the module has 4"),
    ],
)
def test_boundaries_of_another_model(worlds: dict[int, World], partition: tuple[int, ...], error: str) -> None:
    with pytest.raises(CaseFailed) as caught:
        worlds[2].run(layers_of_stages, replace(RUN, task=Cut(partition=partition)))
    assert sorted(caught.value.errors) == [0, 1] and all(error in text for text in caught.value.errors.values())
