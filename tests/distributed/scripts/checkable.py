"""A training script as users write them, with a sound model or a bad one; `avgpipe-check` starts it."""

import argparse
import itertools
import time
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule

import avgpipe_ds
from tests.distributed.models import OPTIMIZERS, Task
from tests.distributed.test_preflight import Detached, Unused
from tests.distributed.test_preflight_hf import Batch, bert

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--model", choices=["bert", "unused", "detached"], default="bert")
parser.add_argument("--iterations", type=int, default=2)
parser.add_argument("--dawdle", action="store_true", help="before training")
deepspeed.add_config_arguments(parser)
args = parser.parse_args()

torch.set_num_threads(1)
avgpipe_ds.init_distributed()
data: Any = Task().data()
if args.model == "bert":
    from avgpipe_ds.hf import to_pipeline

    model = to_pipeline(bert(), num_stages=2, task="sequence-classification")
    data = itertools.repeat(Batch().make())
else:
    layers = [LayerSpec(torch.nn.Linear, 16, 16), LayerSpec({"unused": Unused, "detached": Detached}[args.model], 1)]
    model = PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform")
engine, *_ = avgpipe_ds.initialize(args=args, model=model, optimizer=OPTIMIZERS["adamw"])
if args.dawdle:
    print("dawdling", flush=True)
    time.sleep(300)
for _ in range(args.iterations):
    engine.train_batch(data)
print(f"trained {engine.iteration} iterations")
engine.close()
