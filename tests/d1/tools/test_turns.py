"""Episodes on scripted canvases: cuts, ends, given text, and tools that fail, hang or flood."""

import json
import time

import pytest

from d1.models import load_tokenizer
from d1.models.tokenizer import encode_prompt, render_prompt
from d1.runs.turns import TurnSettings
from d1.tools.calls import FORMATS, CallFormat, read_plain, write_plain
from d1.tools.turns import Episode, Results, Toolbox, ends_of
from tests.d1.sft.test_data import TEMPLATES, byte_tokenizer

EOS, PAD = 2, 0


def product(pair: str) -> str:
    """The product of two digits.

    Args:
        pair: For example 3*4.
    """
    pair = pair.replace(" ", "")  # the tokenizer decodes with spaces
    if pair == "slow":
        while True:
            pass
    if pair == "flood":
        return "7" * 10_000_000
    if pair == "marks":
        return "(1) <eos> <mask>\x00 2"
    a, b = pair.split("*")
    return str(int(a) * int(b))


@pytest.fixture
def box(tiny_model_dir, monkeypatch):
    """From settings, a toolbox whose calls look like (3*4), and a function that plays scripted canvases of text."""
    monkeypatch.setitem(FORMATS, "test", CallFormat("(", ")", read_plain, write_plain, "={result}"))
    tokenizer = load_tokenizer(tiny_model_dir)

    def ids(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def make(tool=product, length=12, **limits):
        toolbox = Toolbox(tokenizer, [EOS, PAD], TurnSettings(**limits), "test")
        functions = {tool.__name__: tool}

        def play(*scripts, log=None):
            prompts = [f"<user>{number}<assistant>" for number in range(len(scripts))]
            episodes = [
                Episode([{"role": "user", "content": str(row)}], ids(text), functions, row)
                for row, text in enumerate(prompts)
            ]
            asked = []

            def sample(rows, turn):
                asked.append((turn, rows))
                texts = [scripts[row][turn] if turn < len(scripts[row]) else "z" for row in rows]
                return [(ids(text) + [PAD] * length)[:length] for text in texts]

            toolbox.run_episodes(episodes, sample, log=log, at=[5])
            return episodes, asked

        return toolbox, play, ids

    return make


def test_an_episode_of_two_turns_token_by_token(box):
    _, play, ids = box()
    (one, two, three), asked = play(["ab(3*4)cd", "12<eos>"], ["x<eos>(3*4)"], ["y"])
    prompt, call, answer = ids("<user>0<assistant>"), ids("ab(3*4)"), ids("12<eos>")
    given = ids("<eos><user>=12<assistant>")
    assert asked == [(0, [0, 1, 2]), (1, [0])]
    assert [(turn.prompt_ids, turn.kept) for turn in one.turns] == [
        (prompt, call),
        (prompt + call + given, answer),
    ]
    assert one.ids == call + given + answer
    assert one.sampled == [1] * len(call) + [0] * len(given) + [1] * len(answer)
    assert [message["role"] for message in one.messages] == ["assistant", "tool", "assistant"]
    arguments = one.messages[0]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(arguments) == {"pair": "3 * 4"}
    assert [message["content"] for message in one.messages[1:]] == ["12", "1 2"]
    assert (one.end, one.calls, one.failed) == ("no_call", 1, 0)
    assert two.turns[0].kept == ids("x<eos>")
    assert three.turns[0].kept == [*ids("y"), PAD]  # a token that ends texts, too
    assert (two.end, three.end) == ("no_call", "no_call")


def test_a_call_is_found_in_its_first_token_wherever_the_blocks_end(box):
    toolbox, _, ids = box(calls_per_turn=2)
    canvas = ids("a(1*2)b)c(3*4)d(5*6)")
    closing = len(ids("a(1*2)b)c(3*4)"))
    assert [toolbox.stops(canvas[:length]) for length in range(len(canvas) + 1)] == [
        length >= closing for length in range(len(canvas) + 1)
    ]
    assert toolbox.cut(canvas, is_last=False) == closing
    assert toolbox.cut(canvas, is_last=True) == len(canvas)
    assert toolbox.cut(ids("a(1*2)<eos>(3*4)"), is_last=False) == len(ids("a(1*2)<eos>"))


def test_the_eos_that_a_canvas_has_is_not_given_again(box):
    _, play, ids = box(calls_per_turn=2)
    (one,), _ = play(["(1*2)a<eos>", "(2*3)(3*4)", "2<eos>"])
    assert one.turns[1].prompt_ids == ids("<user>0<assistant>(1*2)a<eos><user>=2<assistant>")
    (two,), _ = play(["(2*3)(3*4)", "2<eos>"])
    assert two.turns[1].prompt_ids == ids("<user>0<assistant>(2*3)(3*4)<eos><user>=6\n=12<assistant>")
    assert two.calls == 2


@pytest.mark.parametrize(
    ("scripts", "limits", "end", "calls", "failed", "turns"),
    [
        (["12"], {}, "no_call", 0, 0, 1),
        (["ab(3*4"], {}, "unclosed", 0, 0, 1),
        (["aaaaaaaaaa(3*4)"], {}, "unclosed", 0, 0, 1),  # the canvas ends within the call
        (["3*4)"], {}, "no_call", 0, 0, 1),
        (["(3*4)", "(4*5)"], {}, "max_turns", 1, 0, 2),
        (["(3*4)", "(4*5)", "1"], {"max_turns": 3}, "no_call", 2, 0, 3),
        (["(3*4)"], {"max_turns": 1}, "max_turns", 0, 0, 1),
        (["(3*4)", "1"], {"max_turn_prompt": 13}, "no_room", 1, 0, 1),
        (["(3*4)", "1"], {"max_turn_prompt": 14}, "no_call", 1, 0, 2),
        (["(3*)", "1"], {}, "no_call", 1, 1, 2),
        (["()", "1"], {}, "no_call", 1, 1, 2),
    ],
)
def test_how_episodes_end(box, scripts, limits, end, calls, failed, turns):
    _, play, _ = box(**limits)
    (one,), _ = play(scripts)
    assert (one.end, one.calls, one.failed, len(one.turns)) == (end, calls, failed, turns)
    assert one.messages[-1]["role"] == "assistant"
    assert ends_of([one, one])[end] == 2
    if end == "no_room":
        assert one.ids == one.turns[0].kept
        assert "tool_calls" not in one.messages[-1]


def test_a_tool_that_fails_hangs_or_floods_costs_its_own_row(box):
    _, play, ids = box(tool_seconds=0.3, result_length=20)
    started = time.perf_counter()
    calls = ["slow", "flood", "3", "marks", "3*4"]
    episodes, _ = play(*([f"({text})", "1<eos>"] for text in calls))
    assert time.perf_counter() - started < 5
    found = [one.messages[1]["content"][:40] if len(one.messages) > 1 else one.end for one in episodes]
    assert found[0] == "error: product took longer than 0.3 seco"
    assert found[1] == "7" * 40
    assert found[2].startswith("error: not enough values to unpack")
    assert found[4] == "12"
    assert [one.failed for one in episodes] == [1, 0, 1, 0, 0]
    assert [one.hung for one in episodes] == [True] + [False] * 4
    header, tail = ids("<eos><user>="), ids("<assistant>")

    def given(one):
        first, second = one.turns
        return second.prompt_ids[len(first.prompt_ids) + len(first.kept) :]

    assert given(episodes[1]) == header + ids("7" * 20) + tail
    assert given(episodes[3]) == header + ids("1 2") + tail  # neither special tokens nor marks of a call


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("template", ["chatml", "llada", "unasked", "plain", "thinking"])
def test_what_follows_a_call_is_what_the_template_writes(template, form):
    """With byte-level tokens: the end of the turn, the result as the user's message, and the header."""
    tokenizer = byte_tokenizer(TEMPLATES[template])
    ends = [1, 3, 5, 0]  # eos, <|im_end|>, <|eot|>, pad
    toolbox = Toolbox(tokenizer, ends, TurnSettings(), form)
    functions = {"product": product}
    call = toolbox.form.write_call("product", {"pair": "3*4"}, functions)
    prompt = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    start = encode_prompt(tokenizer, render_prompt(tokenizer, prompt))
    turns = [encode_prompt(tokenizer, text) for text in (f"ab {call}", "12")]
    episode = Episode(prompt, start, functions)
    toolbox.run_episodes([episode], lambda rows, turn: [turns[turn] + [7] * 3])
    assert (episode.turns[0].kept, episode.calls, episode.failed) == (turns[0], 1, 0)
    result = toolbox.form.result.format(result="12")
    said = [{"role": "assistant", "content": f"ab {call}"}, {"role": "user", "content": result}]
    whole = render_prompt(tokenizer, [*prompt, *said])
    after = whole.rpartition(call)[2]
    given = tokenizer.decode(episode.turns[1].prompt_ids[len(start) + len(turns[0]) :])
    assert given == after if template != "plain" else given == f"<eos>{after}"
    if template != "thinking":  # its earlier turns have another header
        assert tokenizer.decode(episode.turns[1].prompt_ids).replace("<eos>", "") == whole.replace("<eos>", "")


def test_a_vocabulary_without_unknown_tokens_reads_what_it_can(box, monkeypatch):
    toolbox, _, _ = box()
    toolbox.tokenizer.backend_tokenizer.model.unk_token = ""
    toolbox.tokenizer._special_tokens_map["unk_token"] = None
    known = toolbox.clean_result("ab Ünknown 12")
    assert known.split() == ["ab", "12"]


def test_processes_take_part_until_nobody_is_left(box):
    toolbox, _, ids = box(max_turns=3)
    asked = []

    def sample(rows, turn):
        asked.append((turn, rows))
        return [ids("z<eos>") + [PAD] * 8 for _ in rows]

    answers = iter([True, True, False])
    episodes = [Episode([{"role": "user", "content": "1"}], ids("<user>1<assistant>"), {}, row) for row in range(2)]
    toolbox.run_episodes(episodes, sample, any_process=lambda has_rows: next(answers))
    assert asked == [(0, [0, 1]), (1, [0])]  # the second turn is another process's
    assert [len(one.turns) for one in episodes] == [1, 1]
    asked.clear()
    answers = iter([True, True, True])
    for one in episodes:
        one.end, one.turns, one.next_ids = None, [], ids("<user>1<assistant>")
    toolbox.run_episodes(episodes, sample, any_process=lambda has_rows: next(answers), all_rows=True)
    assert asked == [(turn, [0, 1]) for turn in range(3)]
    assert [len(one.turns) for one in episodes] == [1, 1]


def test_logged_results_are_taken_for_the_same_call_at_the_same_place(box, tmp_path):
    path, made = tmp_path / "log.jsonl", []

    def chance(pair: str) -> str:
        """A number of the day.

        Args:
            pair: Any.
        """
        made.append(pair)
        if pair == "f":
            raise ValueError("no")
        return str(len(made))

    _, play, _ = box(chance, length=16)
    scripts = [["(a)", "1"], ["(f)", "1"], ["(b)", "1"]]
    first, _ = play(*scripts, log=Results(path, resume=False))
    with path.open("a") as file:
        file.write('{"at": [5, 0, 0, 0], "ca')  # a kill
    again, _ = play(["(a)", "1"], ["(f)", "1"], ["(c)", "1"], log=Results(path, resume=True))
    assert made == ["a", "f", "b", "c"]
    assert [one.ids for one in first[:2]] == [one.ids for one in again[:2]]
    assert again[1].failed == 1
    third, _ = play(*scripts[:2], ["(c)", "1"], log=Results(path, resume=True))
    assert len(made) == 4
    assert third[2].messages[1]["content"] == "4"
    play(*scripts, log=Results(path, resume=False))  # a new run
    assert len(made) == 7
    assert all(json.loads(line) for line in path.read_text().splitlines())
