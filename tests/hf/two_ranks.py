"""What each of the two processes of test_two_ranks.py does. Arguments: folder of the test, case."""

import logging
import os
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

import avgpipe_ds
from avgpipe_ds.hf import save_pretrained, to_pipeline
from avgpipe_ds.hf.sources import SafetensorsSource

sys.path.insert(0, str(Path(__file__).parent))
from conftest import make_batch, tiny_config  # noqa: E402

read: list[str] = []
read_one = SafetensorsSource.read


def recording_read(self, name):
    read.append(name)
    return read_one(self, name)


def load_from_hub_and_export(folder: Path) -> None:
    """A stage reads its own tensors only, out of a sharded checkpoint in the hub's cache."""
    module = to_pipeline("someone/tiny-gpt2", num_stages=2, task="causal-lm")
    assert module.parts == [0, 4, 7], module.parts
    own = {module.checkpoint_name(name) for name in module.state_dict()}
    assert set(read) == own and len(read) == len(own), (read, own)
    assert "transformer.wte.weight" in own
    assert ("transformer.wpe.weight" in own) == (dist.get_rank() == 0)
    save_pretrained(module, folder / "copy")


def train_a_step_and_export(folder: Path) -> None:
    """With DeepSpeed's own engine: what travels suits it, and the gradients of the tied embedding are summed."""
    module = to_pipeline("someone/tiny-gpt2", num_stages=2, task="causal-lm")
    config = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "steps_per_print": 10**9}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    ids, mask, labels = make_batch("gpt2")
    loss = engine.train_batch(iter([((ids, mask), (labels, torch.full((4,), 1 / 10)))]))
    save_pretrained(engine, folder / "trained")
    if dist.get_rank() == 0:
        torch.save(loss.cpu(), folder / "loss.pt")


def train_adapters(folder: Path) -> None:
    """With this engine, one and two pipelines; on all layers, and on the first block only, so that the second stage is frozen."""
    ids, mask, labels = make_batch("llama-tied")
    micro_batch = ((ids, mask), (labels, torch.full((4,), 1 / 40)))
    for case in ("everywhere", "first-block"):
        for number in (1, 2):
            module = to_pipeline(folder / "base", num_stages=2, task="causal-lm", peft=folder / case)
            engine, *_ = avgpipe_ds.initialize(
                model=module,
                model_parameters=[parameter for parameter in module.parameters() if parameter.requires_grad],
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
                config={
                    "train_micro_batch_size_per_gpu": 4,
                    "gradient_accumulation_steps": 1,
                    "gradient_clipping": 0.0,
                    "steps_per_print": 10**9,
                    "avgpipe": {"num_pipelines": number},
                },
            )
            engine.train_batch(iter([micro_batch] * number))
            frozen = [{id(p) for p in one.module.parameters() if not p.requires_grad} for one in engine.pipelines]
            assert all(frozen) and frozen[0] == frozen[-1], "frozen weights are stored more than once"
            save_pretrained(engine, folder / f"{case}-{number}")
            engine.close()


def random_weights(folder: Path) -> None:
    """From a config, tied weights alike on both stages, and the same as one process gets."""
    for name, task in (("llama-tied", "causal-lm"), ("bert", "sequence-classification")):
        save_pretrained(to_pipeline(tiny_config(name), num_stages=2, task=task), folder / name)


def failing_rank_zero(folder: Path) -> None:
    """Rank 0 cannot write; rank 1 must hear of it and not wait forever."""
    module = to_pipeline(tiny_config("bert"), num_stages=2, task="sequence-classification")
    (folder / "file").write_text("in the way")
    try:
        save_pretrained(module, folder / "file")
    except RuntimeError as error:
        assert "rank 0 could not write" in str(error)
    else:
        raise AssertionError("no error")


def main(folder: Path) -> None:
    logging.basicConfig(level=logging.INFO)
    SafetensorsSource.read = recording_read
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles for minutes
    store = f"file://{folder / 'store'}"
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    for case in (load_from_hub_and_export, train_a_step_and_export, train_adapters, random_weights, failing_rank_zero):
        case(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
