"""The project's own prompts, the filters on turns a target writes, and the writing itself on a tiny target."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from mtptrain.config import SelfConfig
from mtptrain.data.responses import Completed, HfGenerator, Request
from mtptrain.data.self_prompts import Round, TurnFilter, own_prompts, user_prefix, write_user_turns
from mtptrain.errors import UserError
from mtptrain.target.tiny import make_tiny_target, tiny_tokenizer

END = 2
TIGERS = "one two three four five six seven eight nine ten eleven twelve tigers"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = make_tiny_target(tmp_path_factory.mktemp("target"))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_own_prompts_are_varied_and_evenly_spread() -> None:
    prompts = own_prompts()
    assert [p["id"] for p in prompts] == [f"own-{n:03d}" for n in range(1, len(prompts) + 1)]
    assert 300 <= len(prompts) <= 320
    categories = Counter(p["source"] for p in prompts)
    assert len(categories) >= 12
    assert 20 <= min(categories.values()) <= max(categories.values()) <= 25
    assert all(re.fullmatch(r"own/[a-z]+", source) for source in categories)
    assert all({m["role"] for m in p["messages"]} == {"user"} and all(m["content"].strip() for m in p["messages"]) for p in prompts)
    assert {len(p["messages"]) for p in prompts if p["source"] == "own/dialogue"} == {2}
    lengths = [len(" ".join(m["content"] for m in p["messages"]).split()) for p in prompts]
    assert min(lengths) <= 5
    assert max(lengths) >= 120


def test_own_prompts_share_no_thirteen_words() -> None:
    """Far stricter than 13: not even 8 words, punctuation aside."""
    owner: dict[tuple[str, ...], str] = {}
    for prompt in own_prompts():
        words = re.findall(r"\w+", " ".join(m["content"] for m in prompt["messages"]).lower())
        for i in range(len(words) - 7):
            assert owner.setdefault(tuple(words[i : i + 8]), prompt["id"]) == prompt["id"]


def test_user_prefix_ends_where_the_turn_begins(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.decode(user_prefix(tokenizer)) == "<|im_start|>user\n"
    silent = tiny_tokenizer()
    silent.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(UserError, match=r"data\.source=self"):
        user_prefix(silent)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Hi!", "too short"),
        ("          ", "too short"),
        ("I'm sorry, but I can't help with that.", "reads as a reply"),
        ("Certainly! The answer is four.", "reads as a reply"),
        ("Tell me <|im_start|> about rivers", "not plain text"),
        ("Tell me about\x07 rivers", "not plain text"),
        ("lady " * 13, "repeats itself"),
        ("what  is a RIVER, please?", "known already"),
        (f"Explain: {TIGERS} in a forest", "known already"),
    ],
)
def test_filter_names_the_reason(tokenizer: PreTrainedTokenizerFast, text: str, reason: str) -> None:
    known = {"What is a river, please?", f"Count {TIGERS} and tell me how many there are."}
    turns = TurnFilter(tokenizer, [END], 4, known)
    assert turns.accept(Completed("0", [*tokenizer(text)["input_ids"], END], hit_limit=False)) is None
    assert turns.rejected == {reason: 1}


def test_filter_keeps_a_turn_once(tokenizer: PreTrainedTokenizerFast) -> None:
    turns = TurnFilter(tokenizer, [END], 4, {"What is a river?"})
    asked = Completed("0", [*tokenizer(" Why do rivers\nbend? ")["input_ids"], END], hit_limit=False)
    assert turns.accept(asked) == "Why do rivers\nbend?"
    assert turns.accept(asked) is None
    assert turns.accept(Completed("1", tokenizer("How does a river")["input_ids"], hit_limit=True)) is None
    assert turns.rejected == {"known already": 1, "without an end": 1}


def test_target_writes_the_same_turns_again(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """The tiny target ends a turn at any of 64 ids, which is how one without training ends any turn at all."""
    cfg = SelfConfig(count=12, max_new_tokens=24, min_new_tokens=1)
    stop_ids = list(range(64))

    def write(seed: int, known: set[str], batch_size: int) -> list[str]:
        generator = HfGenerator(
            model, stop_ids, batch_size=batch_size, max_new_tokens=24, temperature=cfg.temperature, top_p=cfg.top_p, seed=seed
        )
        with pytest.warns(UserWarning, match=r"the target wrote \d+ of 12 user turns in 48 attempts"):
            return [t for made in write_user_turns(generator.run, tokenizer, stop_ids, cfg, known) for t in made.texts]

    first = write(0, set(), 48)
    assert 2 <= len(first) < 12
    assert write(0, set(), 5) == first
    assert write(1, set(), 48) != first
    assert write(0, {first[0].upper()}, 48) == first[1:]


def test_rounds_go_on_until_the_count_is_reached(tokenizer: PreTrainedTokenizerFast) -> None:
    """Attempts 0, 3, 6, ... are good: 4 turns need attempts 0 to 9, in rounds of 5 (4 * 1.25), 3 (2 * 1.25) and 2."""
    rounds: list[list[int]] = []

    def run(requests: Sequence[Request]) -> Iterator[list[Completed]]:
        rounds.append([int(r.id) for r in requests])
        for r in reversed(requests):
            text = f"What is river number {r.id}?"
            yield [Completed(r.id, [*tokenizer(text)["input_ids"], END], hit_limit=int(r.id) % 3 != 0)]

    made = list(write_user_turns(run, tokenizer, [END], SelfConfig(count=4), set()))
    assert rounds == [[0, 1, 2, 3, 4], [5, 6, 7], [8, 9]]
    assert made == [Round([f"What is river number {n}?" for n in ns], to) for ns, to in (([0, 3], 5), ([6], 8), ([9], 10))]
    for cut in range(3):  # a call that was cut short goes on as if it had not been
        rounds.clear()
        assert list(write_user_turns(run, tokenizer, [END], SelfConfig(count=4), set(), done=made[:cut])) == made[cut:]
