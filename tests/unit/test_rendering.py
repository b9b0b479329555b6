"""Prompts as an engine makes them against the tokenizer's: what is compared, and what is told."""

from pathlib import Path

import pytest

from mtptrain.data.template import ChatTemplate, load_template
from mtptrain.report.schema import gate
from mtptrain.stages.rendering import Rendering, compare, probes
from tests.unit.tiny import tiny_llama


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> ChatTemplate:
    return load_template(tiny_llama(tmp_path_factory.mktemp("t") / "target"), False)


def test_a_probe_is_the_prompt_that_the_tokenizer_makes(template: ChatTemplate) -> None:
    found = probes(template)
    assert len(found) == 6
    for probe in found:
        text = template.tokenizer.apply_chat_template(probe.messages, tokenize=False, add_generation_prompt=True)
        assert template.decode(probe.tokens) == text
        assert probe.asked() == {"messages": probe.messages, "tools": None}


def test_dialogues_that_the_template_refuses_are_left_out(tmp_path: Path) -> None:
    template = load_template(tiny_llama(tmp_path / "target"), False)
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template.tokenizer.chat_template = refuses + template.tokenizer.chat_template
    assert [p.messages[0]["role"] for p in probes(template)] == ["user"] * 5


ONE = Rendering([{"role": "user", "content": "Hello"}], None, [1, 2, 3])
TWO = Rendering([{"role": "user", "content": "Again"}], None, [4, 5])


def test_equal_prompts_tell_nothing() -> None:
    assert compare([ONE, TWO], [[1, 2, 3], [4, 5]]) == {"dialogues": 2, "equal": 2, "first": None, "told": None}
    assert compare([ONE, TWO], []) is None


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ([1, 9, 3], "has 9 where the target's tokenizer has 2, at token 1"),
        ([1, 2], "has nothing where the target's tokenizer has 3, at token 2"),
        ([1, 2, 3, 7], "has 7 where the target's tokenizer has nothing, at token 3"),
        ("TemplateError: no", "makes none (TemplateError: no)"),
    ],
)
def test_fault_11_a_prompt_that_the_engine_makes_otherwise_shuts_the_gate(engine: list[int] | str, said: str) -> None:
    found = compare([TWO, ONE], [[4, 5], engine])
    assert found is not None
    assert (found["dialogues"], found["equal"]) == (2, 1)
    assert found["first"] == {"messages": ONE.messages, "tokenizer": [1, 2, 3], "engine": engine}
    assert f"of 1 of 2 dialogues: of 'Hello' it {said}; " in found["told"]
    report = {"engine": {"overall": {"mean_accepted_length": 2.0}}, "certificate": None, "rendering": found}
    assert gate(report, 1.0, 0.01)["reasons"] == [found["told"]]
    assert gate(report | {"rendering": compare([ONE], [[1, 2, 3]])}, 1.0, 0.01)["open"]
