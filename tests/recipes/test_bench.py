"""Parts of the benchmark that need no processes."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bench.arguments import write_output
from bench.contenders import BASELINE, all_contenders, choose
from bench.contenders.torch_pipelining import stages_of
from bench.layers import Accelerator, EmulatedChunk, Times
from bench.measure import Measured, Row
from bench.search import fixed_choice, search
from bench.table import print_results
from bench.workload import Workload
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from avgpipe_ds.memory.breakdown import Breakdown
from avgpipe_ds.memory.saved_tensors import SavedTensors
from avgpipe_ds.memory.tensors import bytes_of

CONTENDERS = {contender.key: contender for contender in all_contenders()}
TIMES = Times(fixed_s=0.002, forward_s=0.0045, input_gradient_s=0.0045, weight_gradient_s=0.0045)
WORKLOAD = Workload(mode="emulated", num_stages=4, batch=32, length=8, width=16, times=TIMES, layers_per_chunk=1, clipping=1.0)


def memory(total: int) -> Breakdown:
    return Breakdown(weights=total, gradients=0, optimizer=0)


# Emulated accelerators: what takes how long, by a chunk whose three times can't be mistaken for each other.

FORWARD_S, INPUT_S, WEIGHT_S = 0.03, 0.1, 0.2


@pytest.fixture
def seconds(monkeypatch):
    """Seconds that an accelerator was held for by a function, as the chunks asked for them, and its result."""

    def measured(function):
        held_s = []
        with monkeypatch.context() as patch:
            patch.setattr(Accelerator, "hold", lambda _, seconds: held_s.append(seconds))
            result = function()
        return sum(held_s), result

    return measured


def test_an_accelerator_is_held_for_real():
    times = Times(fixed_s=0.01, forward_s=0.0, input_gradient_s=0.0, weight_gradient_s=0.0)
    chunk = EmulatedChunk(seed=0, width=4, times=times)
    start = time.perf_counter()
    chunk(torch.randn(2, 3, 4)).sum().backward()
    assert time.perf_counter() - start >= 0.03


def test_late_timers_do_not_add_up(monkeypatch):
    now_s = [100.0]

    def late_sleep(seconds):
        now_s[0] += seconds + 0.004

    monkeypatch.setattr(time, "sleep", late_sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: now_s[0])
    accelerator = Accelerator()
    for _ in range(10):
        accelerator.hold(0.01)
    assert now_s[0] - 100.0 == pytest.approx(10 * 0.01 + 0.004)


@pytest.fixture
def slow_chunks():
    """Two chunks that split these times for two samples; the fixed part is part of all three."""
    half = Times(fixed_s=0.002, forward_s=0.0065, input_gradient_s=0.024, weight_gradient_s=0.049)
    assert half.fixed_s + 2 * half.forward_s == pytest.approx(FORWARD_S / 2)
    assert half.fixed_s + 2 * half.input_gradient_s == pytest.approx(INPUT_S / 2)
    assert half.fixed_s + 2 * half.weight_gradient_s == pytest.approx(WEIGHT_S / 2)
    return nn.Sequential(*(EmulatedChunk(seed=seed, width=4, times=half) for seed in range(2)))


@pytest.mark.parametrize("needs_gradient", [False, True], ids=["first chunk", "later chunk"])
def test_whole_backward_takes_both_times(slow_chunks, seconds, needs_gradient):
    x = torch.randn(2, 3, 4, requires_grad=needs_gradient)
    forward_s, output = seconds(lambda: slow_chunks(x))
    backward_s, _ = seconds(lambda: output.sum().backward())
    assert forward_s == pytest.approx(FORWARD_S)
    assert backward_s == pytest.approx(INPUT_S + WEIGHT_S)


def test_zero_bubble_schedules_can_split_the_backward(slow_chunks, seconds):
    x = torch.randn(2, 3, 4, requires_grad=True)
    output = slow_chunks(x)
    gradient = torch.randn(2, 3, 4)
    input_s, (_, groups) = seconds(lambda: stage_backward_input([output], [gradient], [x], slow_chunks.parameters()))
    assert input_s == pytest.approx(INPUT_S)
    assert all(p.grad is None for p in slow_chunks.parameters())
    weight_s, _ = seconds(lambda: stage_backward_weight(slow_chunks.parameters(), groups))
    assert weight_s == pytest.approx(WEIGHT_S)

    split = [x.grad, *(p.grad for p in slow_chunks.parameters())]
    whole = torch.autograd.grad(slow_chunks(x), [x, *slow_chunks.parameters()], gradient)
    for mine, theirs in zip(split, whole, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_times_of_a_micro_batch():
    assert TIMES.total_s(4) == pytest.approx(0.02 + 0.04)
    assert TIMES.part(0.5).total_s(4) == pytest.approx(0.03)


# The workload


def test_chunks_depend_on_their_index_only():
    torch.manual_seed(5)
    first = WORKLOAD.chunk(3)
    torch.randn(7)
    again, other = WORKLOAD.chunk(3), WORKLOAD.chunk(4)
    assert torch.equal(first.linear.weight, again.linear.weight)
    assert not torch.equal(first.linear.weight, other.linear.weight)


def test_slices_and_shares_are_the_batch():
    inputs, labels = next(WORKLOAD.batches())
    micro_batches = WORKLOAD.micro_batches(8)
    slices = [next(micro_batches) for _ in range(8)]
    shares = [next(WORKLOAD.batches(replica=replica, num_replicas=4)) for replica in range(4)]
    for parts in (slices, shares):
        assert torch.equal(torch.cat([x for x, _ in parts]), inputs)
        assert torch.equal(torch.cat([y for _, y in parts]), labels)
    assert all(x.untyped_storage().nbytes() == x.nbytes for x, _ in slices)  # autograd keeps whole storages
    assert not torch.equal(next(micro_batches)[0], slices[0][0])  # the next batch is another


# Memory


def test_saved_tensors_are_followed_to_their_end():
    layer = nn.Linear(10, 10)
    with SavedTensors(layer.parameters()) as saved:
        graphs = []
        for _ in range(3):
            x = torch.randn(5, 10)
            graphs.append(layer(x).tanh())  # keeps x and the output of tanh; not the weight
            del x
        assert saved.live_bytes == saved.peak_bytes == 3 * 2 * 5 * 10 * 4
        graphs.pop().sum().backward()
        assert saved.live_bytes == 2 * 2 * 5 * 10 * 4
        saved.restart()
        graphs.clear()  # given up without a backward
    assert saved.live_bytes == 0
    assert saved.peak_bytes == 2 * 2 * 5 * 10 * 4


def test_a_storage_counts_once_and_as_a_whole():
    x = torch.randn(100, requires_grad=True).exp()  # not followed: before the hooks
    with SavedTensors([]) as saved:
        y = x[:10] * x[10:20] + x.square().sum()
    assert saved.live_bytes == 400
    y.sum().backward()
    assert saved.live_bytes == 0
    assert bytes_of([x, x[3:], torch.zeros(2)]) == 408


# Which M


@pytest.mark.parametrize(
    ("key", "batch", "expected"),
    [
        ("deepspeed-1f1b", 32, [2, 4, 8, 16, 32]),
        ("deepspeed-1f1b", 48, [2, 4, 8, 16, 48]),
        ("deepspeed-1f1b", 1, []),
        ("avgpipe-n1", 32, [2, 4, 8, 16, 32]),
        ("avgpipe-n3", 8, [1, 2, 4, 8]),
        ("avgpipe-n4-shared", 32, [1, 2, 4, 8]),
        ("avgpipe-n3-shared", 32, []),
        ("deepspeed-dualpipev", 32, [8, 16, 32]),
        ("torch-dualpipev", 32, [8, 16, 32]),
        ("torch-interleaved", 36, [2, 4, 12, 36]),
        ("deepspeed-zero1", 32, [1, 2, 4]),
        ("deepspeed-zero0", 12, [1]),
        ("deepspeed-zero0", 30, []),
    ],
)
def test_candidates(key, batch, expected):
    assert CONTENDERS[key].candidates(replace(WORKLOAD, batch=batch)) == expected


def test_fixed_m():
    assert fixed_choice(CONTENDERS["avgpipe-n2"], WORKLOAD, 8).num_micro_batches == 8
    assert fixed_choice(CONTENDERS["deepspeed-zero0"], WORKLOAD, 8).num_micro_batches == 1
    for key, number, reason in (
        ("deepspeed-dualpipev", 4, "needs M of at least 2 K = 8, got 4"),
        ("avgpipe-n3-shared", 4, "N = 3 pipelines can't share a batch of 32 samples in M = 1 equal micro-batches each"),
        ("torch-dualpipev", 4, "needs M of at least 2 K = 8, got 4"),
        ("torch-interleaved", 10, "can't be sliced into M = 10"),
        ("avgpipe-n1", 5, "a batch of 32 samples can't be sliced into M = 5"),
    ):
        choice = fixed_choice(CONTENDERS[key], WORKLOAD, number)
        assert choice.num_micro_batches is None
        assert reason in choice.reason
    odd = fixed_choice(CONTENDERS["torch-interleaved-zb"], replace(WORKLOAD, batch=22), 11)
    assert "2 rounds don't divide M = 11" in odd.reason


def test_search_takes_the_fastest():
    found = {2: 0.9, 4: 0.7, 8: 0.6, 16: 0.8, 32: 0.9}

    def measure(number):
        return Measured(seconds=found[number], memory=[memory(1)])

    choice = search(BASELINE, replace(WORKLOAD, mode="real"), measure, memory_limit_bytes=None)
    assert choice.num_micro_batches == 8
    assert {trial.num_micro_batches: trial.seconds for trial in choice.trials} == found


def test_search_skips_what_can_not_win():
    """Computation takes 0.432 s and M times 6 ms; 0.5 s with M = 4 leaves nothing for M = 16 to win."""
    measured = []

    def measure(number):
        measured.append(number)
        return Measured(seconds=0.5, memory=[memory(1)])

    choice = search(BASELINE, WORKLOAD, measure, memory_limit_bytes=None)
    assert measured == [2, 4, 8]
    assert choice.num_micro_batches == 2
    assert [trial.note.partition(",")[0] for trial in choice.trials[3:]] == [
        "computation alone takes 0.528 s",
        "computation alone takes 0.624 s",
    ]


def test_search_within_a_memory_limit():
    def measure(number):
        return Measured(seconds=number / 10, memory=[memory(5), memory(100 // number)])

    real = replace(WORKLOAD, mode="real")
    choice = search(BASELINE, real, measure, memory_limit_bytes=20)
    assert choice.num_micro_batches == 8
    assert [bool(trial.note) for trial in choice.trials] == [True, True, False, False, False]
    nothing = search(BASELINE, real, measure, memory_limit_bytes=4)
    assert nothing.num_micro_batches is None
    assert "M = 32, more than the memory limit" in nothing.reason
    assert "no M divides a batch of 1" in search(BASELINE, replace(real, batch=1), measure, memory_limit_bytes=4).reason


# Who takes part


def test_keys_are_unique_and_the_baseline_comes_first():
    assert len(CONTENDERS) == len(all_contenders()) == 22
    assert all_contenders()[0] is BASELINE
    assert [c.key for c in all_contenders([1, 5], 2) if c.key.startswith("avgpipe")] == [
        "avgpipe-n1",
        "avgpipe-n1-gpipe",
        "avgpipe-n1-advance2",
        "avgpipe-n5",
        "avgpipe-n5-advance2",
        "avgpipe-n5-shared",
    ]


def test_choose():
    chosen = choose(["torch-zbv", "avgpipe-n2", "torch-gpipe"], list(CONTENDERS.values()))
    assert [contender.key for contender in chosen] == ["deepspeed-1f1b", "torch-gpipe", "torch-zbv", "avgpipe-n2"]
    with pytest.raises(ValueError, match=r"Unknown contender 'torch-zvb'. Did you mean 'torch-zbv'\? Known: 'deepspeed-1f1b'"):
        choose(["torch-zvb"], list(CONTENDERS.values()))


@pytest.mark.parametrize("placement", ["pairs", "loop", "v"])
def test_ranks_share_out_all_chunks(placement):
    stages = {stage: of for rank in range(4) for stage, of in stages_of(placement, rank, 4).items()}
    assert [chunk for stage in sorted(stages) for chunk in stages[stage]] == list(range(8))


def test_v_turns_around_on_the_last_rank():
    assert stages_of("v", 0, 4) == {0: [0], 7: [7]}
    assert stages_of("v", 3, 4) == {3: [3], 4: [4]}
    assert stages_of("loop", 3, 4) == {3: [3], 7: [7]}


# What comes out


def test_ideal_times():
    assert BASELINE.compute_s(WORKLOAD, 8) == pytest.approx(8 * 0.06)
    assert CONTENDERS["avgpipe-n2"].compute_s(WORKLOAD, 8) == pytest.approx(8 * 0.06)
    assert CONTENDERS["avgpipe-n2-shared"].compute_s(WORKLOAD, 4) == pytest.approx(8 * 0.06)
    # 8 samples through the whole model: 4 accelerators' shares of 3 * (2 + 8 * 4.5) ms
    assert CONTENDERS["deepspeed-zero0"].compute_s(WORKLOAD, 1) == pytest.approx(4 * 3 * 0.038)


def test_rows_compare_within_a_repeat(capsys):
    rows = [Row(contender=BASELINE, num_micro_batches=8), Row(contender=CONTENDERS["avgpipe-n2"], num_micro_batches=4)]
    for baseline_s, own_s, needed in ((0.8, 0.5, 3_000_000), (1.2, 0.5, 2_000_000), (1.0, 0.5, 1_000_000)):
        rows[0].add(Measured(seconds=baseline_s, memory=[memory(1)]), baseline_s)
        rows[1].add(Measured(seconds=own_s, memory=[memory(1), memory(needed)]), baseline_s)
    assert rows[0].speedups == [1.0, 1.0, 1.0]
    assert rows[1].speedups == pytest.approx([1.6, 2.4, 2.0])
    assert (rows[1].median_s, rows[1].median_speedup) == (0.5, pytest.approx(2.0))
    print_results(WORKLOAD, rows, {"someone": "no reason"})
    printed = capsys.readouterr().out
    (line,) = [line for line in printed.splitlines() if "avgpipe_ds" in line]
    cells = [cell.strip() for cell in line.strip(" │|").split("│")]
    assert cells == ["avgpipe_ds, N = 2, 1F1B", "4", "0.5000", "2.000", "1.600 .. 2.400", "64.0", "0.4560", "91%", "3.00"]
    assert "left out: someone: no reason" in printed


def test_results_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """A repeat that can't be written leaves what the ones before it have written."""
    file = tmp_path / "results.json"
    write_output(file, lambda: {"repeats": 1})
    with pytest.raises(TypeError):
        write_output(file, lambda: {"repeats": object()})
    assert json.loads(file.read_text()) == {"repeats": 1}
    assert [one.name for one in tmp_path.iterdir()] == ["results.json"]
    write_output(None, lambda: pytest.fail("nobody wants it"))
