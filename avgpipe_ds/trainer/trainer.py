"""The training loop of `transformers.Trainer`, around `engine.train_batch`.

Not a subclass: `Trainer` owns a model in one piece, its optimizer and its data loader, all of which the engine owns here. What
makes a script a Trainer's script are arguments, callbacks, state and logs; those are transformers' own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerControl
from transformers.trainer_utils import PredictionOutput, TrainOutput, speed_metrics

from avgpipe_ds import hf
from avgpipe_ds.data import Sample
from avgpipe_ds.engine import AvgPipeEngine
from avgpipe_ds.hf.tasks import Task
from avgpipe_ds.trainer import checkpoints
from avgpipe_ds.trainer.agreement import on_every_rank
from avgpipe_ds.trainer.arguments import PipelineTrainingArguments
from avgpipe_ds.trainer.build import Ingredients, Model, build
from avgpipe_ds.trainer.callbacks import Callback, callback_handler, callback_states, load_callback_states
from avgpipe_ds.trainer.checks import check_against_model, check_samples
from avgpipe_ds.trainer.evaluation import ComputeMetrics, Evaluator, PreprocessLogits
from avgpipe_ds.trainer.log import TrainingLog
from avgpipe_ds.trainer.state import new_state, resumed_state

if TYPE_CHECKING:
    from peft import PeftConfig

__all__ = ["PipelineTrainer"]


class PipelineTrainer:
    """Trains, evaluates and saves a Hugging Face model on N pipelines. Every rank makes one and calls its methods.

    Args:
        model: a hub name, a folder, a model in memory, or a config for random weights.
        args: what to do.
        task: the model's head.
        train_dataset: tokenised samples, such as `avgpipe_ds.data.tokenise(...).train`.
        eval_dataset: the same, to evaluate on.
        processing_class: the tokenizer.
        id2label: names of the classes, `dict(enumerate(tokens.label_names))`.
        peft_config: adapters that are trained instead of the model.
        compute_metrics: `compute_metrics(EvalPrediction)`, numbers by name; runs on one rank.
        preprocess_logits_for_metrics: `f(logits, labels)` of a micro-batch: what is kept of the logits for `compute_metrics`.
        callbacks: transformers' callbacks. They run on every rank and must decide alike there.

    Attributes:
        engine: the `AvgPipeEngine`.
        state: transformers' `TrainerState`: `global_step`, `epoch`, `log_history`, ...

    Raises:
        ValueError: on every rank, an argument, the model or the data is wrong; before anything is trained.

    """

    def __init__(
        self,
        model: Model,
        args: PipelineTrainingArguments,
        *,
        task: Task,
        train_dataset: Sequence[Sample],
        eval_dataset: Sequence[Sample] | None = None,
        processing_class: Any,
        id2label: Mapping[int, str] | None = None,
        peft_config: str | Path | PeftConfig | None = None,
        compute_metrics: ComputeMetrics | None = None,
        preprocess_logits_for_metrics: PreprocessLogits | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.args, self.task, self.processing_class = args, task, processing_class
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._parts = build(
            Ingredients(
                model=model,
                args=args,
                task=task,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                tokenizer=processing_class,
                id2label=id2label,
                peft_config=peft_config,
            )
        )
        self.engine: AvgPipeEngine = self._parts.engine
        self._evaluator = Evaluator(
            engine=self.engine,
            collate=self._parts.collate,
            micro_batch_size=args.per_device_eval_batch_size,
            compute_metrics=compute_metrics,
            preprocess_logits=preprocess_logits_for_metrics,
        )
        self._log = TrainingLog()
        self._learning_rate = 0.0
        self.control = TrainerControl()
        self.state = new_state(args, self._parts)
        self.callback_handler = callback_handler(self.engine, processing_class, callbacks, disable_tqdm=args.disable_tqdm)
        self._tell("on_init_end")

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainOutput:
        """Train to the end, or until a callback stops it.

        Args:
            resume_from_checkpoint: a folder; True for the newest in `output_dir`, or to begin anew if there is none; by default
                what the arguments say.

        Returns:
            Steps, mean loss of all of them, and speed.

        Raises:
            RuntimeError: it has trained before, and is not to resume a checkpoint.
            ValueError: the checkpoint can't be resumed, or is of another training.
            Exception: as `engine.train_batch`.

        """
        self._begin(self.args.resume_from_checkpoint if resume_from_checkpoint is None else resume_from_checkpoint)
        start, first_step, first_epoch = time.time(), self.state.global_step, self._parts.epoch
        self._tell("on_train_begin")
        while self._goes_on:
            self._tell("on_epoch_begin")
            epoch = self._parts.whole_epochs
            while self._goes_on and self._parts.whole_epochs == epoch:
                self._train_step()
            self._tell("on_epoch_end")
            self._do_what_is_due()
        self._load_best()
        num_samples = round((self._parts.epoch - first_epoch) * len(self.train_dataset))
        metrics = speed_metrics("train", start, num_samples=num_samples, num_steps=self.state.global_step - first_step)
        metrics["train_loss"] = self._log.total_loss / max(1, self.state.global_step)
        self.log(metrics)
        self._tell("on_train_end")
        if self.state.is_world_process_zero:
            checkpoints.write_state(self.state, Path(self.args.output_dir))
        return TrainOutput(self.state.global_step, metrics["train_loss"], {**metrics, "epoch": self.state.epoch})

    def evaluate(self, eval_dataset: Sequence[Sample] | None = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Evaluate the reference model on a whole data set; training is not disturbed.

        Args:
            eval_dataset: by default that of the trainer.
            metric_key_prefix: of the names.

        Returns:
            The loss, what `compute_metrics` gives, and speed.

        Raises:
            ValueError: there is no data set, or it does not suit the model.

        """
        samples = self._checked(self.eval_dataset if eval_dataset is None else eval_dataset, "eval_dataset")
        start, size = time.time(), self.args.per_device_eval_batch_size
        metrics = _prefixed(metric_key_prefix, self._evaluator.evaluate(samples))
        metrics |= speed_metrics(metric_key_prefix, start, len(samples), math.ceil(len(samples) / size))
        self.log(metrics)
        self._tell("on_evaluate", metrics=metrics)
        return metrics

    def predict(self, test_dataset: Sequence[Sample], metric_key_prefix: str = "test") -> PredictionOutput:
        """The outputs of the reference model on a whole data set, on every rank, and the loss and metrics as of `evaluate`.

        Raises:
            ValueError: the data set does not suit the model.

        """
        found = self._evaluator.predict(self._checked(test_dataset, "test_dataset"))
        metrics = _prefixed(metric_key_prefix, found.scores)
        self._tell("on_predict", metrics=metrics)
        return PredictionOutput(found.predictions, found.label_ids, metrics)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the reference model, or its adapters, and the tokenizer, for `from_pretrained(output_dir)`."""
        folder = self.args.output_dir if output_dir is None else output_dir
        hf.save_pretrained(self.engine, folder)
        if self.state.is_world_process_zero:
            self.processing_class.save_pretrained(folder)

    def log(self, logs: Mapping[str, float]) -> None:
        """Add a line to `state.log_history`, and show it."""
        line = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**line, "step": self.state.global_step})
        self._tell("on_log", logs=line)

    @property
    def _goes_on(self) -> bool:
        return self.state.global_step < self.state.max_steps and not self.control.should_training_stop

    def _tell(self, event: str, **what: Any) -> None:
        """Callbacks look at what happened and say what is to be done."""
        self.control = getattr(self.callback_handler, event)(self.args, self.state, self.control, **what)

    def _begin(self, wanted: str | bool | None) -> None:
        """From the start or from a checkpoint, the same on every rank.

        Raises:
            RuntimeError, ValueError: as `train`.

        """
        if self.state.global_step and not wanted:
            raise RuntimeError(
                f"train() has trained {self.state.global_step} steps: make a new trainer, or pass resume_from_checkpoint"
            )
        self.engine.meet("train")
        folder = on_every_rank(lambda: checkpoints.find_checkpoint(self.args.output_dir, wanted))
        self.engine.meet(f"train from {folder or 'the beginning'}")  # ranks that see other folders hear of it here
        if folder is None:
            return
        state = on_every_rank(lambda: resumed_state(self.args, self._parts, folder))
        _, ours = self.engine.load_checkpoint(str(folder.parent), tag=folder.name)
        if not ours or "trainer" not in ours:
            raise ValueError(f"resume_from_checkpoint: expected a checkpoint that a PipelineTrainer wrote, got {str(folder)!r}")
        self._parts.batches.load_state_dict(ours["trainer"]["data"])
        self._log.load_state_dict(ours["trainer"]["log"])
        load_callback_states(self.callback_handler, state.stateful_callbacks)
        self.state = state

    def _train_step(self) -> None:
        self._tell("on_step_begin")
        self._learning_rate = float(self.engine.get_lr()[0])
        with self._log.training():
            loss = float(self.engine.train_batch(self._parts.batches))
        self._log.add(loss)
        self.state.global_step += 1
        self.state.epoch = self._parts.epoch
        self._tell("on_step_end")
        self._do_what_is_due()

    def _do_what_is_due(self) -> None:
        """Log, evaluate and save, as the callbacks said."""
        if self.control.should_log and self._log.steps:
            norm = self.engine.get_global_grad_norm()
            self.log(
                self._log.line(
                    learning_rate=self._learning_rate,
                    grad_norm=None if norm is None else float(norm),
                    epoch=self.state.epoch,
                    num_samples=len(self.train_dataset),
                )
            )
        if self.control.should_evaluate:
            self._note_best(self.evaluate())
        if self.control.should_save:
            self._save_checkpoint()
            self._tell("on_save")

    def _note_best(self, metrics: Mapping[str, float]) -> None:
        """Compare with the best evaluation so far.

        Raises:
            ValueError: there is no such metric.

        """
        if self.args.metric_for_best_model is None:
            return
        name = f"eval_{self.args.metric_for_best_model.removeprefix('eval_')}"
        if name not in metrics:
            raise ValueError(f"metric_for_best_model: expected one of {', '.join(metrics)}, got {name!r}")
        best, now = self.state.best_metric, metrics[name]
        if best is None or (now > best if self.args.greater_is_better else now < best):
            self.state.best_metric, self.state.best_global_step = now, self.state.global_step

    def _save_checkpoint(self) -> None:
        folder = checkpoints.checkpoint_folder(self.args.output_dir, self.state.global_step)
        if self.state.is_world_process_zero:
            (folder / checkpoints.STATE_FILE).unlink(missing_ok=True)
        position = self._parts.batches.state_dict(self.engine.consumed_micro_batches)
        ours = {"data": position, "log": self._log.state_dict()}
        self.engine.save_checkpoint(str(folder.parent), folder.name, client_state={"trainer": ours}, save_latest=False)
        self.save_model(folder)
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(folder)
        self.state.stateful_callbacks = callback_states(self.callback_handler)
        if self.state.is_world_process_zero:  # the other ranks have written theirs: rank 0 gathered the model from them since
            checkpoints.write_state(self.state, folder)
            best = self.state.best_model_checkpoint if self.args.load_best_model_at_end else None
            checkpoints.rotate(self.args.output_dir, newest=folder, best=best, limit=self.args.save_total_limit)

    def _load_best(self) -> None:
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            best = Path(self.state.best_model_checkpoint)
            self.engine.load_checkpoint(str(best.parent), tag=best.name, load_module_only=True)

    def _checked(self, samples: Sequence[Sample] | None, name: str) -> Sequence[Sample]:
        """Of a data set that is evaluated.

        Raises:
            ValueError: there is none, or it does not suit the model.

        """
        if samples is None:
            raise ValueError(f"{name}: expected tokenised samples, got None: pass them here or to the trainer")
        if samples is not self.eval_dataset:
            check_samples(samples, self.task, name=name)
            check_against_model(samples, self.engine.module.hf_config, self.processing_class, self.task, name=name)
        return samples


def _prefixed(prefix: str, scores: Mapping[str, float]) -> dict[str, float]:
    """Named as `Trainer` does."""
    return {name if name.startswith(f"{prefix}_") else f"{prefix}_{name}": value for name, value in scores.items()}
