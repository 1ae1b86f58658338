import bert_classify
import gpt_lm
import pytest
from common.errors import RecipeError
from common.options import parse_options


def parse(*argv):
    return parse_options(bert_classify.DEFAULTS, argv)


def test_defaults_and_launcher_arguments():
    options, data = parse("--local_rank=1", "--deepspeed", "--steps", "3")
    assert (options.model, options.stages, options.steps, data.dataset) == ("minilm", 2, 3, "bbc-news")


def test_language_recipe_has_no_labels():
    with pytest.raises(SystemExit):
        parse_options(gpt_lm.DEFAULTS, ["--label-column", "x"])
    assert parse_options(gpt_lm.DEFAULTS, [])[0].model == "smollm2-135m"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--stages", "0"), "--stages must be at least 1, got 0"),
        (("--steps", "0"), "--steps must be at least 1, got 0"),
        (("--max-length", "1"), "--max-length must be at least 2"),
        (("--validation-fraction", "1"), "--validation-fraction must lie between 0 and 1, got 1.0"),
        (("--deepspeed_config", "none.json"), "none.json: there is no such file"),
        (("--resume",), "--resume and --save-every need --save-dir"),
    ],
)
def test_impossible_values(argv, message):
    with pytest.raises(RecipeError, match=message):
        parse(*argv)


def test_unknown_argument():
    with pytest.raises(SystemExit):
        parse("--stagez", "2")
