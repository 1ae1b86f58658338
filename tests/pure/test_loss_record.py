"""Losses and metrics of a batch: their means, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from avgpipe_ds.execution.loss_record import LossRecord, mean_of, split_loss


def loss(value: float) -> Tensor:
    return torch.tensor(float(value), requires_grad=True)


def test_means_over_micro_batches() -> None:
    record = LossRecord()
    for batch in (0.0, 10.0):
        record.begin()
        for value in (1.0, 2.0, 6.0):
            kept = torch.tensor([batch - value], requires_grad=True)
            assert record.add((loss(value), {"kept": kept, "count": int(value)}), {"aux": torch.tensor(3.0)}).requires_grad
            kept.data.fill_(1e9)  # what the user does with it afterwards changes nothing
        assert record.means() == {"loss": 3.0, "kept": batch - 3, "count": 3.0, "aux": 3.0}
        assert record.losses.tolist() == [1, 2, 6]


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ({"loss": loss(1)}, "must be a scalar tensor, got a dict: let loss_fn return one number"),
        (None, "got None: let loss_fn"),
        (torch.ones(3), r"got a tensor of shape \(3,\): let loss_fn return one number, such as its mean, or a pair of it and"),
        ((loss(1), loss(2)), r"got a tuple of \(a tensor of shape \(\), a tensor of shape \(\)\)"),
        ((loss(1), {}, {}), r"got a tuple of \(a tensor of shape \(\), a dict, a dict\)"),
        ((2.0, {}), "must be a scalar tensor, got a float"),
        (torch.tensor(1.0), "does not depend on any trainable parameter"),
        ((loss(1), {"accuracy": torch.ones(2)}), r"reports a tensor of shape \(2,\) as 'accuracy': let it be one number"),
        ((loss(1), {"accuracy": "good"}), "reports a str as 'accuracy': let it be one number"),
        ((loss(1), {"loss": 1.0}), "reports a float as 'loss': take a string, other than 'loss'"),
        ((loss(1), {7: 1.0}), "as 7: take a string"),
        ((loss(1), {"aux": 1.0}), r"get_additional_losses\(\) of the module gives \['aux'\], too"),
    ],
)
def test_what_is_no_loss(returned: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LossRecord().add(returned, {"aux": torch.tensor(0.0)})


def test_names_stay_the_same_over_batches() -> None:
    record = LossRecord()
    record.add((loss(1), {"a": 1, "b": 1}), {})
    record.begin()
    with pytest.raises(ValueError, match=r"same names each time, but it reports \['a', 'b'\] before, \['a', 'c'\] now"):
        record.add((loss(1), {"a": 1, "c": 1}), {})
    with pytest.raises(ValueError, match=r"\['a', 'b'\] before, \[\] now"):
        record.add(loss(1), {})


def test_means_over_places() -> None:
    assert mean_of([{"loss": 1.0, "a": 2.0}, {"a": 4.0, "loss": 2.0}]) == {"loss": 1.5, "a": 3.0}
    with pytest.raises(ValueError, match=r"\['a'\] in one place, \[\] in another"):
        mean_of([{"loss": 1.0, "a": 2.0}, {"loss": 1.0}])


def test_only_a_pair_with_names_has_metrics() -> None:
    assert split_loss((1, {"a": 2})) == (1, {"a": 2})
    assert split_loss((1, 2)) == ((1, 2), {})
