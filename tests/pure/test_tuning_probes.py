"""What probes make of what they see, and what they leave as it was."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from avgpipe_ds.tuning import link_probe
from avgpipe_ds.tuning.__main__ import main
from avgpipe_ds.tuning.profile import Layer, Message, Passes, Profile, StageProfile
from avgpipe_ds.tuning.sample import untouched
from avgpipe_ds.tuning.setting import Setting
from avgpipe_ds.tuning.simulated import SimulationPredictor


def test_latency_and_bandwidth_of_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty message there and back takes 2 s; each full one 0.5 s more, several in a row."""

    def round_trip_s(stage: Any, receiver: int, contents: tuple[torch.Tensor, ...]) -> float:
        return 2.0 + 0.5 * sum(content.numel() > 0 for content in contents)

    monkeypatch.setattr(link_probe, "_round_trip_s", round_trip_s)
    found = link_probe._send(SimpleNamespace(device=torch.device("cpu")), 1, 100)  # type: ignore[arg-type]
    assert found == Message(size=100, latency_s=1.0, transfer_s=0.5)


def test_buffers_and_random_numbers_are_as_before() -> None:
    module = torch.nn.BatchNorm1d(3)
    state = {"seed": 1}
    random = SimpleNamespace(state_dict=lambda: dict(state), load_state_dict=state.update)
    pipeline: Any = SimpleNamespace(module=module, random=random)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with pytest.raises(KeyError), untouched(pipeline):
        module(torch.randn(4, 3))
        state["seed"] = 2
        assert not torch.equal(module.running_mean, before["running_mean"])
        raise KeyError
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers()) and state == {"seed": 1}


def stage(first_layer: int = 0, seconds: tuple[float, ...] = (), averaging_s: float = 0.0) -> StageProfile:
    layers = tuple(
        Layer(name="Linear", number=first_layer + place, seconds=value, weights=8, activation_bytes=8)
        for place, value in enumerate(seconds)
    )
    one = Passes(samples=1, forward_s=1.0, backward_s=2.0, activation_bytes=8)
    return StageProfile(passes=(one,), layers=layers, averaging_s=averaging_s)


def profile(*stages: StageProfile) -> Profile:
    return Profile(num_pipelines=1, num_micro_batches=4, batch=4, clipping=False, stages=stages)


def test_averaging_takes_time_from_two_pipelines_on() -> None:
    free, dear = profile(stage(), stage()), profile(stage(averaging_s=5.0), stage(averaging_s=5.0))
    one, two = (Setting(num_pipelines=number, num_micro_batches=4) for number in (1, 2))
    seconds = SimulationPredictor().iteration_s
    assert seconds(free, one) == seconds(dear, one)
    assert seconds(dear, two) - seconds(free, two) == pytest.approx(10.0, rel=0.3)


@pytest.mark.parametrize("wanted", [False, True])
def test_boundaries_are_written_where_that_is_asked_for(tmp_path: Path, wanted: bool) -> None:
    """From a profile that is there already, nothing is started."""
    profile(stage(0, (1.0, 1.0, 4.0)), stage(3, (1.0,))).save(tmp_path / "p.json")
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    (tmp_path / "c.json").write_text(json.dumps(config))
    options = ["--profile", str(tmp_path / "p.json"), *(["--write-partition"] if wanted else [])]
    main([*options, "train.py", "--deepspeed_config", str(tmp_path / "c.json")])
    block = json.loads((tmp_path / "c.tuned.json").read_text())["avgpipe"]
    assert block.get("partition") == ([0, 2, 4] if wanted else None)
