import io
import time

from common.narrator import Narrator
from common.progress import TrainingProgress


def test_breaks_a_silence():
    stream = io.StringIO()
    with Narrator(stream=stream, silence_s=0.2) as narrator, narrator.phase("waiting"):
        time.sleep(0.7)
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("waiting ...")
    assert sum("still waiting" in line for line in lines) >= 2


def test_silent_ranks_say_nothing():
    stream = io.StringIO()
    with Narrator(stream=stream, enabled=False, silence_s=0.05) as narrator, narrator.phase("waiting"):
        time.sleep(0.2)
        narrator.write("RESULT")
    assert stream.getvalue() == ""


def test_no_terminal_gets_lines():
    stream = io.StringIO()
    with Narrator(stream=stream) as narrator:
        progress = TrainingProgress(narrator, first_iteration=2, num_iterations=5)
        for _ in range(3):
            progress.advance(loss=0.5, samples=8)
        progress.close()
    lines = stream.getvalue().splitlines()
    assert "iteration 3/5  loss 0.5000" in lines[0]
    assert "iteration 5/5" in lines[-1] and lines[-1].endswith("0 s left")


def test_terminal_gets_a_bar():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    stream = Terminal()
    with Narrator(stream=stream) as narrator:
        progress = TrainingProgress(narrator, first_iteration=0, num_iterations=2)
        progress.advance(loss=0.25, samples=8)
        narrator.say("a line between")
        progress.advance(loss=0.125, samples=8)
        progress.close()
    assert "loss 0.1250" in stream.getvalue() and "2/2" in stream.getvalue()
    assert "a line between\n" in stream.getvalue()


def test_pauses_do_not_count_as_training():
    with Narrator(stream=io.StringIO()) as narrator:
        progress = TrainingProgress(narrator, first_iteration=0, num_iterations=2)
        progress.paused(lambda: time.sleep(0.2))
        assert progress.trained_s < 0.1
