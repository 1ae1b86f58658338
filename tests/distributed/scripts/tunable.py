"""A training script as users write them; `avgpipe-tune` starts it."""

import argparse

import deepspeed
import torch

import avgpipe_ds
from tests.distributed.models import OPTIMIZERS, Task

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--stages", type=int, default=2)
parser.add_argument("--iterations", type=int, default=100)
deepspeed.add_config_arguments(parser)
args = parser.parse_args()

torch.set_num_threads(1)
avgpipe_ds.init_distributed()
task = Task()
engine, *_ = avgpipe_ds.initialize(args=args, model=task.pipeline(args.stages), optimizer=OPTIMIZERS["adamw"])
task = Task(micro_batch_size=engine.train_micro_batch_size_per_gpu())
data = task.data()
for iteration in range(args.iterations):
    engine.train_batch(data)
    if iteration == 0 and engine.global_rank == 0:
        print("training has begun", flush=True)
if engine.global_rank == 0:
    samples = engine.samples_per_iteration()
    print(f"trained {engine.iteration} iterations of {engine.num_pipelines} pipelines, {samples} samples each")
engine.close()
