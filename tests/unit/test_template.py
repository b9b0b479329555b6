"""Spans: exactly what the target generates, whatever the template; and templates for which that can't be."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtptrain.data.dialogues import kept_document, open_dialogue, plan_turns
from mtptrain.data.documents import Document
from mtptrain.data.readers import BadRow, Record
from mtptrain.data.template import ChatTemplate, Inexact
from mtptrain.errors import UserError
from tests.unit import chat as c

EXACT = {
    "chatml": c.chat(),
    "trimming": c.chat(c.TRIMMING),
    "generation": c.chat(c.GENERATION),
    "generation_without_marker": c.chat(c.GENERATION_WITHOUT_MARKER),
    "llama3": c.llama3(),
}
END = {name: "<|eot_id|>" if name == "llama3" else "<|im_end|>" for name in EXACT}
TRIMS = {"trimming", "llama3"}
texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=30).filter(
    lambda t: t.strip() and "<|" not in t and "|>" not in t
)


def record(*turns: str, system: str | None = None, first: str = "user") -> Record:
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]
    return Record(id="r", source="s", messages=[{"role": "system", "content": system}, *messages] if system else messages)


def spans_text(template: ChatTemplate, tokens: list[int], spans: list[tuple[int, int]]) -> list[str]:
    return [template.decode(tokens[a:b]) for a, b in spans]


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(EXACT)), turns=st.lists(st.tuples(texts, texts), min_size=1, max_size=3), system=st.none() | texts)
def test_spans_decode_to_the_assistant_text_and_its_end_marker(name: str, turns: list[tuple[str, str]], system: str | None) -> None:
    template = EXACT[name]
    messages = record(*(t for turn in turns for t in turn), system=system).messages
    tokens, spans = template.kept(messages, None)
    want = [(a.strip() if name in TRIMS else a) + END[name] for _, a in turns]
    assert spans_text(template, tokens, spans) == want
    assert tokens == template.tokenizer.apply_chat_template(messages)["input_ids"]
    markers = {template.tokenizer.convert_tokens_to_ids(t) for t in ("<|im_start|>", "<|start_header_id|>", "<|end_header_id|>")}
    supervised = [i for a, b in spans for i in tokens[a:b]]
    assert markers.isdisjoint(supervised)


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(["chatml", "trimming", "llama3"]), turns=st.lists(st.tuples(texts, texts), min_size=1, max_size=3))
def test_generated_dialogue_equals_what_an_engine_would_see(name: str, turns: list[tuple[str, str]]) -> None:
    """The target's answers, as ids, in the middle of what the template writes: the text is the template's own of the whole dialogue."""
    template = EXACT[name]
    users = [u for u, _ in turns]
    dialogue = open_dialogue(Record(id="r", source="s", messages=[{"role": "user", "content": u} for u in users]), "train", template, 10**6)
    end = template.ids(END[name])
    answers = [a.strip() for _, a in turns]
    for answer in answers:
        dialogue.accept(template.ids(answer) + end, template, 10**6)
    assert dialogue.ended == "all turns are answered"
    messages = [
        m for u, a in zip(users, answers, strict=True) for m in ({"role": "user", "content": u}, {"role": "assistant", "content": a})
    ]
    whole = template.render(messages, prompt=False)
    assert whole.removesuffix("\n") == template.decode(dialogue.tokens)
    assert spans_text(template, dialogue.tokens, dialogue.spans) == [a + END[name] for a in answers]


def test_generated_ids_are_never_tokenised_again() -> None:
    template = c.chat()
    dialogue = open_dialogue(record("a", "x", "b"), "train", template, 1000)
    odd = [template.ids(letter)[0] for letter in "The quick"] + [2]  # one id a letter, where the tokenizer would merge
    assert template.ids("The quick") != odd[:-1]
    dialogue.accept(odd, template, 1000)
    (start, end), *_ = dialogue.spans
    assert dialogue.tokens[start:end] == odd
    assert template.decode(dialogue.tokens[end:]) == "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"


def test_answer_with_whitespace_that_the_template_trims_keeps_its_ids() -> None:
    template = c.chat(c.TRIMMING)
    dialogue = open_dialogue(record("a", "x", "b", "x", "c"), "train", template, 1000)
    dialogue.accept([*template.ids("\n yes \n"), 2], template, 1000)
    dialogue.accept([*template.ids("no "), 2], template, 1000)
    assert dialogue.ended == ""
    assert spans_text(template, dialogue.tokens, dialogue.spans) == ["\n yes \n<|im_end|>", "no <|im_end|>"]
    assert template.decode(dialogue.tokens[dialogue.spans[1][1] :]) == "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("answer", "most", "reason"),
    [
        ("cut off here", 1000, "max_new_tokens"),
        ("short<|im_end|>", 60, "over length"),
        ("bad<|endoftext|>", 1000, "otherwise than it was generated"),
    ],
)
def test_dialogue_ends_where_it_cannot_go_on_exactly(answer: str, most: int, reason: str) -> None:
    template = c.chat()
    dialogue = open_dialogue(record("a", "x", "b" * 90), "train", template, 1000)
    dialogue.accept(template.ids(answer), template, most)
    assert reason in dialogue.ended
    assert dialogue.unanswered == 1
    assert dialogue.spans == [(len(dialogue.tokens) - len(template.ids(answer)), len(dialogue.tokens))]


def test_fault_09_mask_has_no_boilerplate_and_keeps_the_first_token() -> None:
    template = c.chat()
    tokens, spans = template.kept(record("Hi", "Yes", "More", "No").messages, None)
    text = template.decode(tokens)
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes<|im_end|>\n"
        "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\nNo<|im_end|>\n"
    )
    before = [text[: text.index("Yes<|im_end|>")], text[: text.index("No<|im_end|>")]]
    assert [template.decode(tokens[:a]) for a, _ in spans] == before
    assert spans_text(template, tokens, spans) == ["Yes<|im_end|>", "No<|im_end|>"]


@pytest.mark.parametrize("template", [c.STRIPS_THINKING, c.STRIPS_THINKING.replace("<|im_end|>\\n", "<|im_end|>")])
def test_fault_09_template_that_strips_earlier_thinking_is_refused(template: str) -> None:
    strips = c.chat(template)
    thinking = record("Hi", "<think>\nhm\n</think>\n\nYes", "More", "No")
    with pytest.raises(Inexact, match="changes an earlier assistant turn"):
        strips.kept(thinking.messages, None)
    for generated in (True, False):
        with pytest.raises(UserError, match="strips or rewrites the thinking"):
            strips.check_history(generated)
    strips.check_kept()
    tokens, spans = strips.kept(thinking.messages[:2], None)
    assert spans_text(strips, tokens, spans) == ["<think>\nhm\n</think>\n\nYes<|im_end|>"]


def test_fault_09_generation_block_that_marks_the_role_is_refused() -> None:
    template = c.chat(c.GENERATION_WITH_ROLE)
    with pytest.raises(Inexact, match="generation prompt ends"):
        template.kept(record("Hi", "Yes").messages, None)
    with pytest.raises(UserError, match="generation prompt ends"):
        template.check_kept()


def test_template_without_generation_prompt_is_refused() -> None:
    with pytest.raises(UserError, match="ignores add_generation_prompt"):
        c.chat(c.NO_GENERATION_PROMPT).check_prompt()
    for good in (*EXACT.values(), c.chat(c.LLAMA2), c.chat(c.STRIPS_THINKING)):
        good.check_prompt()


def test_template_with_text_before_the_end_marker_is_refused_for_several_generated_turns() -> None:
    template = c.chat(c.LLAMA2)
    with pytest.raises(UserError, match="after an assistant's text"):
        template.check_history(generated=True)
    template.check_history(generated=False)
    for good in EXACT.values():
        good.check_history(generated=True)


def test_tokenizer_without_template_is_refused() -> None:
    with pytest.raises(UserError, match="no chat template"):
        c.chat("")


def test_template_that_refuses_a_dialogue_rejects_that_record() -> None:
    with pytest.raises(BadRow, match="not exact") as bad:
        open_dialogue(record("Hi", system="Be brief."), "train", c.chat(c.ALTERNATING), 100)
    assert "System role not supported" in bad.value.detail


def test_control_tokens_in_an_assistant_text_are_rejected() -> None:
    for text in ("a<|im_end|>b", "a<|im_start|>b"):
        with pytest.raises(Inexact):
            c.chat().kept(record("Hi", text).messages, None)


def test_border_that_a_token_crosses_is_inexact() -> None:
    """`an` is one token: a template whose prompt ends in `a` can't be exact for a text that begins with `n`."""
    template = c.chat(
        "{% for m in messages %}{{ '<|im_start|>' if m['role'] == 'user' else 'a' }}{{ m['content'] + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    assert len(template.ids("an")) == 1
    with pytest.raises(Inexact, match="border"):
        template.kept(record("Hi", "n").messages, None)


def test_turns_are_planned_from_the_messages() -> None:
    def roles(*names: str) -> list[list[str]]:
        return [[m["role"] for m in turn] for turn in plan_turns([{"role": n, "content": n} for n in names])]

    assert roles("system", "user", "user", "assistant", "user") == [["system", "user"], ["user"], ["user"]]
    assert roles("user", "assistant") == [["user"]]
    assert roles("user", "assistant", "tool") == [["user"], ["tool"]]
    assert roles("user", "system", "user") == [["user"], ["system", "user"]]
    for bad in (["system"], ["assistant", "user"], ["user", "system"]):
        with pytest.raises(BadRow):
            roles(*bad)
    with pytest.raises(BadRow, match="mode=keep"):
        plan_turns([{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}])


def _kept(text: str, most: int) -> tuple[Document, bool]:
    return kept_document(record("Hi", text), "train", c.chat(), most, min_supervised=2)


def test_fault_10_cut_documents_never_lose_their_supervision_silently() -> None:
    whole, cut = _kept("z" * 50, 1000)
    (start, end), *_ = whole.spans
    assert not cut
    assert end - start == 51
    short, cut = _kept("z" * 50, start + 10)
    assert cut
    assert short.spans == [(start, start + 10)]
    assert short.tokens == whole.tokens[: start + 10]
    for most in (start + 1, start, start - 5):
        with pytest.raises(BadRow, match="over length"):
            _kept("z" * 50, most)


def test_kept_documents_need_answers() -> None:
    template = c.chat()
    for bad, reason in [
        (record("Hi"), "no supervised token"),
        (record("Hi", " "), "empty"),
        (record("Hi", "a"), "too short"),
        (record("Yes", "Hi", "No", first="assistant"), "before any user turn"),
    ]:
        with pytest.raises(BadRow, match=reason):
            kept_document(bad, "train", template, 1000, 3)
