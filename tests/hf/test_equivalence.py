"""The pipeline computes what the unsplit transformers model computes."""

from functools import partial
from itertools import product

import pytest
import torch
from conftest import DECODERS, EVERY_TASK, HIDDEN, MODELS, TASKS, TINY, counted, make_batch, tiny_config, unsplit
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch.testing import assert_close

from avgpipe_ds.hf import to_pipeline
from avgpipe_ds.hf.layers import CallFinder, travelling
from avgpipe_ds.hf.plan import cuts_of
from avgpipe_ds.partition import balanced_parts

close = partial(assert_close, rtol=1e-5, atol=1e-5)


def pipeline_of(model, name, task=None, **options):
    options.setdefault("attn_implementation", model.config._attn_implementation)
    return to_pipeline(model, num_stages=1, task=task or TASKS[name], **options)


def run_stages(module, num_stages, inputs, labels):
    """Forward and backward with the layers cut into stages, only detached tensors crossing, as between processes."""
    cuts = cuts_of(module.plan)
    parts = [cuts[place] for place in balanced_parts([1] * (len(cuts) - 1), num_stages)]
    crossings = []
    flow = inputs
    for start, stop in zip(parts, parts[1:], strict=False):
        for layer in module.forward_funcs[start:stop]:
            flow = layer(flow)
        if stop < parts[-1]:
            sent = travelling(flow)
            received = tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in sent)
            wanted = [place for place, tensor in enumerate(sent) if tensor.requires_grad]
            crossings.append(([sent[place] for place in wanted], [received[place] for place in wanted]))
            flow = received
    loss = module.loss_fn(flow, labels)
    loss.backward()
    for sent, received in reversed(crossings):
        torch.autograd.backward(sent, [tensor.grad for tensor in received])
    return flow, loss


def assert_same_gradients(module, model):
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    ours = {module.checkpoint_name(name): parameter.grad for name, parameter in module.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        close(ours[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize(("name", "task"), EVERY_TASK)
def test_logits_loss_and_gradients(name, task, attn):
    """For one, two and three stages, with padding on both sides."""
    if attn == "sdpa" and name in ("deberta-v2", "deberta-v3", "gemma2"):
        pytest.skip("transformers has none")
    model = unsplit(name, task=task, attn=attn)
    module = pipeline_of(model, name, task)
    for padding, num_stages in product(["none", "left", "right"], [1, 2, 3]):
        model.zero_grad()
        module.zero_grad()
        ids, mask, labels = make_batch(name, padding, task=task)
        expected = model(input_ids=ids, attention_mask=mask, labels=labels)
        expected.loss.backward()

        logits, loss = run_stages(module, num_stages, (ids, mask), labels)

        real = counted(task, mask)
        close(logits[real], expected.logits[real])
        close(loss, expected.loss)
        assert_same_gradients(module, model)


@pytest.mark.parametrize("name", MODELS)
def test_the_module_itself_runs_its_layers(name):
    model = unsplit(name)
    ids, mask, _ = make_batch(name)
    module = pipeline_of(model, name)
    real = mask.bool() if TASKS[name] == "causal-lm" else slice(None)
    close(module((ids, mask))[real], model(input_ids=ids, attention_mask=mask).logits[real])


@pytest.mark.parametrize("name", [name for name in DECODERS if name != "opt-projected"])
def test_positions_travel(name):
    model = unsplit(name)
    ids, mask, labels = make_batch(name, "none")
    positions = (torch.arange(ids.shape[1]) % 6).expand_as(ids).contiguous()
    expected = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    logits, _ = run_stages(pipeline_of(model, name), 3, (ids, mask, positions), labels)
    close(logits, expected)
    assert not torch.allclose(expected, model(input_ids=ids, attention_mask=mask).logits)


def test_token_types_reach_the_embeddings_of_bert():
    model = unsplit("bert")
    ids, mask, _ = make_batch("bert")
    types = (torch.arange(ids.shape[1]) > 4).long().expand_as(ids)
    expected = model(input_ids=ids, attention_mask=mask, token_type_ids=types).logits
    close(pipeline_of(model, "bert")((ids, mask, types)), expected)
    assert not torch.equal(expected, model(input_ids=ids, attention_mask=mask).logits)


@pytest.mark.parametrize("name", MODELS)
def test_a_stage_hands_on_two_tensors(name):
    module = pipeline_of(unsplit(name), name)
    ids, mask, _ = make_batch(name)
    module.forward_funcs = module.forward_funcs[:3]  # what an upper stage holds
    hidden, travelled = module((ids, mask))
    assert hidden.shape == (*ids.shape, HIDDEN) and hidden.requires_grad
    assert torch.equal(travelled, mask) and travelled.dtype == torch.int64


@pytest.mark.parametrize("name", MODELS)
def test_the_context_is_derived_once_per_stage(name, monkeypatch):
    """On a GPU it costs a synchronisation."""
    model = unsplit(name)
    find, found = CallFinder.calls, []
    monkeypatch.setattr(CallFinder, "calls", lambda *args: found.append(args) or find(*args))
    ids, mask, labels = make_batch(name)
    for num_stages in (1, 2):
        module = pipeline_of(model, name)
        found.clear()
        run_stages(module, num_stages, (ids, mask), labels)
        assert len(found) == num_stages


@pytest.mark.parametrize("name", TINY)
def test_dropout_is_that_of_the_config(name):
    model = unsplit(name, dropout=0.3).train()
    ids, mask, labels = make_batch(name, "none")
    module = pipeline_of(model, name).train()
    torch.manual_seed(3)
    expected = model(input_ids=ids, attention_mask=mask).logits
    torch.manual_seed(3)
    close(module((ids, mask)), expected)
    assert not torch.equal(model(input_ids=ids, attention_mask=mask).logits, expected)


@pytest.mark.parametrize("checkpoint", ["ours", "deepspeed"])
@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_activation_checkpointing_changes_nothing(name, interval, checkpoint):
    model = unsplit(name, dropout=0.2)
    ids, mask, labels = make_batch(name)
    gradients = []
    for option in (0, interval):
        module = pipeline_of(model, name, activation_checkpoint_interval=option).train()
        if checkpoint == "deepspeed":  # "pipeline": {"use_reentrant": false} in the JSON sets this one
            module.activation_checkpoint_func = checkpointing.non_reentrant_checkpoint
        torch.manual_seed(5)
        module.loss_fn(module((ids, mask)), labels).backward()
        gradients.append({key: parameter.grad for key, parameter in module.named_parameters()})
    for key, gradient in gradients[0].items():
        close(gradients[1][key], gradient)


@pytest.mark.parametrize("name", ["llama", "gemma3", "modernbert", "gpt-neox", "phi"])
def test_rotary_tables_survive_a_cast_of_the_module(name):
    """DeepSpeed casts the whole module, buffers too; positions must not lose precision by it."""
    model = unsplit(name, dtype=torch.bfloat16)
    ids, mask, _ = make_batch(name, "none", length=23)
    module = to_pipeline(model, num_stages=1, task=TASKS[name], dtype=torch.float32).bfloat16()
    assert torch.equal(module((ids, mask)), model(input_ids=ids, attention_mask=mask).logits)


def test_a_sequence_beyond_the_positions_is_refused():
    for name in MODELS:
        module = to_pipeline(tiny_config(name), num_stages=1, task=TASKS[name])
        ids, mask, _ = make_batch(name, "none", length=25)
        with pytest.raises(ValueError, match=r"25 tokens.* 24 positions"):
            module((ids, mask))
        with pytest.raises(ValueError, match=r"one shape.*\(4, 25\) and \(4, 24\)"):
            module((ids, mask[:, 1:]))


@pytest.mark.parametrize("name", ["bert", "deberta-v3", "gpt2"])
def test_nothing_of_a_micro_batch_stays_in_the_layers(name):
    """Neither tensors nor graphs: several micro-batches are under way at once, and memory is counted."""
    module = pipeline_of(unsplit(name), name)
    ids, mask, labels = make_batch(name)
    run_stages(module, 2, (ids, mask), labels)
    for layer in module.forward_funcs:
        for part in getattr(layer, "modules", lambda: [])():
            given = getattr(part, "_given", None)
            assert given is None or (given.embedded, given.hidden, given.first, given.calls.arguments) == (None, None, None, [])
