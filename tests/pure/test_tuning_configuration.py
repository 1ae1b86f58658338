"""The batch that a configuration asks for beside that of a profile, and files that are no profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from avgpipe_ds.errors import AvgPipeError, ConfigError
from avgpipe_ds.launching import read_config
from avgpipe_ds.tuning.configuration import check_batch
from avgpipe_ds.tuning.profile import Passes, Profile, StageProfile
from avgpipe_ds.tuning.profiler import _calibrated, _slowest_replicas
from avgpipe_ds.tuning.stage_probe import StageProbe
from avgpipe_ds.tuning.training_times import TrainingTimes


def passes(samples: int, seconds: float = 1.0) -> Passes:
    return Passes(samples=samples, forward_s=seconds, backward_s=2 * seconds, activation_bytes=8)


def profile(num_replicas: int = 1) -> Profile:
    stages = (StageProfile(passes=(passes(4),)),)
    return Profile(num_pipelines=1, num_micro_batches=4, batch=16, clipping=False, num_replicas=num_replicas, stages=stages)


def sizes(micro_batch: Any = None, number: Any = None, whole: Any = None) -> dict[str, Any]:
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    return {key: value for key, value in zip(keys, (micro_batch, number, whole), strict=True) if value is not None}


@pytest.mark.parametrize("config", [sizes(4, 4), sizes(4, None, 16), sizes(None, 4, 16), sizes(4, 4, 16), sizes(16)])
def test_the_batch_of_the_profile(config: dict[str, Any]) -> None:
    check_batch(config, profile())


@pytest.mark.parametrize("config", [sizes(4, 4), sizes(4, None, 32), sizes(4, 4, 32), sizes(None, None, 32)])
def test_with_replicas(config: dict[str, Any]) -> None:
    check_batch(config, profile(num_replicas=2))


@pytest.mark.parametrize(
    "config",
    [sizes(4), sizes(4, 8), sizes(4, 4, 32), sizes(None, 4, 32), sizes(4, None, 8), sizes(8, 4, 16), sizes(None, None, 15)],
)
def test_another_batch(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"batches of 16 samples on 1 replica\(s\), the configuration asks for"):
        check_batch(config, profile())


def test_sizes_must_ascend() -> None:
    for wrong in ((passes(4), passes(4)), (passes(4), passes(1))):
        with pytest.raises(ValidationError, match="expected ascending numbers of samples"):
            StageProfile(passes=wrong)


def test_files_that_are_something_else(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    profile(num_replicas=2).save(file)
    assert Profile.load(file) == profile(num_replicas=2)
    assert "1 stages" in str(Profile.load(file)) and "16 samples on 2 replica(s)" in str(Profile.load(file))
    file.write_text(file.read_text()[:40])
    with pytest.raises(AvgPipeError, match="is no profile, or was cut off: the file: .*; remove it") as caught:
        Profile.load(file)
    assert "http" not in str(caught.value)
    (tmp_path / "c.json").write_text("[1]")
    with pytest.raises(ConfigError, match="expected an object .* got a list"):
        read_config(tmp_path / "c.json")


def test_the_slowest_replica_of_a_stage_counts() -> None:
    slow, fast = (StageProfile(passes=(passes(4, seconds),)) for seconds in (2.0, 1.0))
    assert _slowest_replicas([(0, fast), (1, fast), (0, slow), (1, fast)], 2) == (slow, fast)


def test_probes_are_scaled_to_what_training_took() -> None:
    probe = StageProbe(passes=(passes(1, 1.0), passes(4, 2.0)), sent_bytes=0)
    times = TrainingTimes(forward_s=3.0, backward_s=8.0, step_s=0.0, overhead_s=0.0, utilisation=())
    found = _calibrated(probe, 4, times).passes
    assert [(one.forward_s, one.backward_s) for one in found] == [(1.5, 4.0), (3.0, 8.0)]
