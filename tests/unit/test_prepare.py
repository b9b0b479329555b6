"""The prepare stage: on a fake generator for what is asked of it, and once on a real tiny target."""

import json
from collections.abc import Callable, Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import AutoModelForCausalLM

from mtptrain import manifest
from mtptrain.config import Config, DataConfig, DataSource, Device, Dtype, OnStale, ResponseMode, ResponsesConfig, SelfConfig, TargetConfig
from mtptrain.data.documents import HELD_OUT, TRAIN, Document, read_documents
from mtptrain.data.gather import make_ids_unique
from mtptrain.data.readers import Record
from mtptrain.data.render import coloured, samples_html, samples_text
from mtptrain.data.responses import Completed, Request
from mtptrain.data.self_prompts import Round
from mtptrain.errors import StaleError, UserError
from mtptrain.stages import generation, prepare
from mtptrain.target.tokenizer import load_tokenizer
from tests.unit import chat as c
from tests.unit.tiny import tiny_llama

TEMPLATE = c.chat()
END = 2
LIMIT = 24


class Killed(BaseException):
    """As a signal would end the process."""


class FakeGenerator:
    """Answers every prompt with `re <last user text>` and the end marker, cut at the limit; one by one, last request first."""

    prompts: ClassVar[list[str]] = []
    die_after: ClassVar[int | None] = None
    asked: ClassVar[list[tuple[str, float]]] = []
    """Request id and temperature."""

    def __init__(self, model: object, stop_ids: Sequence[int], *, max_new_tokens: int, temperature: float, **options: Any) -> None:
        assert model == "the model"
        assert list(stop_ids) == [END]
        self.limit, self.temperature = max_new_tokens, temperature

    def run(self, requests: Sequence[Request]) -> Iterator[list[Completed]]:
        for request in reversed(requests):
            if FakeGenerator.die_after is not None and len(FakeGenerator.prompts) >= FakeGenerator.die_after:
                raise Killed
            prompt = TEMPLATE.decode(request.prompt)
            FakeGenerator.prompts.append(prompt)
            FakeGenerator.asked.append((request.id, self.temperature))
            last = prompt.rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
            ids = [*TEMPLATE.ids(f"re {last}"), END]
            yield [Completed(request.id, ids[: self.limit], hit_limit=len(ids) > self.limit)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fakes for the model and the generator; the list grows when the model is loaded."""
    loaded: list[str] = []

    def load(folder: Path, *_: object) -> str:
        loaded.append(folder.name)
        return "the model"

    monkeypatch.setattr(generation, "load_model", load)
    monkeypatch.setattr(generation, "HfGenerator", FakeGenerator)
    monkeypatch.setattr(FakeGenerator, "prompts", [])
    monkeypatch.setattr(FakeGenerator, "die_after", None)
    monkeypatch.setattr(FakeGenerator, "asked", [])
    return loaded


def config(target: Path, root: Path, rows: Sequence[Any] = (), mode: ResponseMode = ResponseMode.target, **data: Any) -> Config:
    """Rows become data.train; a `bytes` row is written as it is."""
    file = root / "chats.jsonl"
    if rows:
        file.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows))
        data = {"source": DataSource.files, "train": [str(file)]} | data
    responses = ResponsesConfig(mode=mode, max_new_tokens=LIMIT, batch_size=4)
    return Config(
        root=str(root / "runs"),
        device=Device.cpu,
        threads=1,
        target=TargetConfig(path=str(target), dtype=Dtype.float32),
        data=DataConfig(
            **({"responses": responses, "max_length": 200, "held_out_fraction": 0.0, "max_rejects": 0.0, "audit_documents": 0} | data)
        ),
    )


def prompts(*texts: str) -> list[dict[str, Any]]:
    return [{"id": f"p{n}", "messages": [{"role": "user", "content": t} for t in text.split("|")]} for n, text in enumerate(texts)]


def parts(document: Document) -> list[str]:
    return [TEMPLATE.decode(document.tokens[a:b]) for a, b in document.spans]


def rejects(cfg: Config) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (cfg.data_dir / "rejects.jsonl").read_text().splitlines()]


def results(cfg: Config) -> dict[str, Any]:
    return manifest.require(cfg.data_dir, "data", "prepare")["results"]


def test_each_user_turn_gets_one_answer_in_order(target: Path, tmp_path: Path, loads: list[str]) -> None:
    cfg = config(target, tmp_path, [*prompts("one|two|three"), {"prompt": "four", "response": "not the target's"}])
    prepare.run(cfg)
    first, second = read_documents(cfg.data_dir)
    assert parts(first) == ["re one<|im_end|>", "re two<|im_end|>", "re three<|im_end|>"]
    assert TEMPLATE.decode(first.tokens) == "\n".join(
        f"<|im_start|>user\n{word}<|im_end|>\n<|im_start|>assistant\nre {word}<|im_end|>" for word in ("one", "two", "three")
    )
    assert (first.id, first.source, second.id, second.source) == ("p0", "chats", "chats.jsonl:2", "chats")
    assert parts(second) == ["re four<|im_end|>"]
    assert loads == [target.name]


def test_fault_11_responses_in_the_data_are_replaced_by_the_target(target: Path, tmp_path: Path, loads: list[str]) -> None:
    rows = [
        {"prompt": "Hi", "response": "FOREIGN"},
        {"messages": [{"role": "user", "content": "Ho"}, {"role": "assistant", "content": "FOREIGN"}]},
    ]
    cfg = config(target, tmp_path, rows)
    prepare.run(cfg)
    assert [parts(d) for d in read_documents(cfg.data_dir)] == [["re Hi<|im_end|>"], ["re Ho<|im_end|>"]]
    assert all("FOREIGN" not in TEMPLATE.decode(d.tokens) for d in read_documents(cfg.data_dir))


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json", "model.safetensors"])
def test_fault_11_another_template_tokenizer_or_target_is_not_mixed_in(name: str, tmp_path: Path, loads: list[str]) -> None:
    cfg = config(tiny_llama(tmp_path / "tiny"), tmp_path, prompts("Hi", "Ho"))
    prepare.run(cfg)
    path = tmp_path / "tiny" / name
    if name == "model.safetensors":
        tiny_llama(tmp_path / "tiny", seed=1)
    else:
        path.write_text(path.read_text() + "\n")
    with pytest.raises(StaleError, match="target" if name.startswith("model") else "tokenizer and template"):
        prepare.run(cfg)
    cfg.on_stale = OnStale.redo
    prepare.run(cfg)
    assert len(FakeGenerator.prompts) == 4


def test_a_killed_run_goes_on_where_it_stopped(target: Path, tmp_path: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(target, tmp_path, prompts("a|b", "c|d", "e|f"))
    monkeypatch.setattr(FakeGenerator, "die_after", 4)
    with pytest.raises(Killed):
        prepare.run(cfg)
    with open(cfg.data_dir / "responses.jsonl", "ab") as f:
        f.write(b'{"id": "p0", "torn')
    monkeypatch.setattr(FakeGenerator, "die_after", None)
    prepare.run(cfg)
    assert len(FakeGenerator.prompts) == len(set(FakeGenerator.prompts)) == 6
    assert [parts(d) for d in read_documents(cfg.data_dir)] == [[f"re {x}<|im_end|>" for x in pair] for pair in ("ab", "cd", "ef")]
    prepare.run(cfg)
    (cfg.data_dir / "manifest.json").unlink()
    prepare.run(cfg)
    assert len(FakeGenerator.prompts) == 6
    assert len(loads) == 2  # not loaded where nothing is left to generate


def test_answer_at_the_limit_ends_its_document(target: Path, tmp_path: Path, loads: list[str]) -> None:
    cfg = config(target, tmp_path, prompts("x" * 40 + "|later", "Hi"))
    prepare.run(cfg)
    long, short = read_documents(cfg.data_dir)
    assert [b - a for a, b in long.spans] == [LIMIT]
    assert long.spans[0][1] == len(long.tokens)
    assert END not in long.tokens[long.spans[0][0] :]
    found = results(cfg)
    short_length = len(TEMPLATE.ids("re Hi")) + 1
    assert found["all"]["hit_limit_share"] == 0.5
    assert found["all"]["mean_response_length"] == (LIMIT + short_length) / 2
    assert found["unanswered_turns"] == {"an answer was cut at data.responses.max_new_tokens": 1}
    assert found["splits"]["train"]["tokens"] == len(long.tokens) + len(short.tokens)
    assert found["sources"]["chats"]["train"]["supervised_tokens"] == LIMIT + short_length


def test_fault_13_bad_records_are_counted_and_listed_and_the_rest_is_used(target: Path, tmp_path: Path, loads: list[str]) -> None:
    good = prompts(*(f"good {n}" for n in range(5)))
    bad = [b'{"prompt": "caf\xe9"}', b"{", {"prompt": ""}, {"prompt": "y" * 300}, {"conversations": [{"from": "bot", "value": "x"}]}]
    cfg = config(target, tmp_path, [good[0], *bad, *good[1:]], max_rejects=0.5)
    prepare.run(cfg)
    assert [d.id for d in read_documents(cfg.data_dir)] == ["p0", "p1", "p2", "p3", "p4"]
    listed = [(r["line"], r["reason"]) for r in rejects(cfg)]
    assert sorted(listed) == [(2, "not valid UTF-8"), (3, "not valid JSON"), (4, "empty"), (5, "over length"), (6, "unknown role")]
    assert all(r["file"] == str(tmp_path / "chats.jsonl") for r in rejects(cfg))
    assert sum(results(cfg)["rejects"].values()) == 5


def test_too_many_rejects_stop_the_job_before_the_model_is_loaded(target: Path, tmp_path: Path, loads: list[str]) -> None:
    rows = [*prompts("a", "b", "c"), b"{"]
    cfg = config(target, tmp_path, rows, max_rejects=0.24)
    with pytest.raises(UserError, match=r"1 of 4 records are rejected, more than data.max_rejects=0.24 allows: 1 not valid JSON") as error:
        prepare.run(cfg)
    assert "\n" not in str(error.value)
    assert "chats.jsonl:4" in str(error.value)
    assert loads == []
    assert [r["line"] for r in rejects(cfg)] == [4]
    prepare.run(config(target, tmp_path, rows, max_rejects=0.25))
    assert loads == [target.name]


def test_mended_data_are_not_stale_after_a_refusal(target: Path, tmp_path: Path, loads: list[str]) -> None:
    with pytest.raises(UserError, match="rejected"):
        prepare.run(config(target, tmp_path, [*prompts("a", "b"), b"{"]))
    cfg = config(target, tmp_path, prompts("a", "b"))
    prepare.run(cfg)
    assert rejects(cfg) == []


def test_fault_10_a_prompt_that_leaves_no_room_for_its_answer_is_rejected_before_generation(
    target: Path, tmp_path: Path, loads: list[str]
) -> None:
    room = 200 - LIMIT
    frame = len(TEMPLATE.ids("<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"))
    cfg = config(target, tmp_path, prompts("Z" * (room - frame), "Q" * (room - frame + 1)), max_rejects=0.5)
    prepare.run(cfg)
    assert [d.id for d in read_documents(cfg.data_dir)] == ["p0"]
    assert [(r["id"], r["reason"]) for r in rejects(cfg)] == [("p1", "over length")]
    assert len(FakeGenerator.prompts) == 1


def test_fault_10_no_document_without_supervision(target: Path, tmp_path: Path, loads: list[str]) -> None:
    """mode=keep, documents cut at every length around the answer: each is either supervised or rejected by name."""
    answer = [{"prompt": "Hi", "response": "W" * 30}, *({"prompt": "q" * n, "response": "V" * 30} for n in range(100, 200, 7))]
    cfg = config(target, tmp_path, answer, ResponseMode.keep, max_rejects=1.0)
    prepare.run(cfg)
    documents = read_documents(cfg.data_dir)
    assert len(documents) + len(rejects(cfg)) == len(answer)
    assert all(sum(b - a for a, b in d.spans) >= 3 and d.spans[-1][1] <= len(d.tokens) <= 200 for d in documents)
    assert {r["reason"] for r in rejects(cfg)} == {"over length"}
    assert results(cfg)["cut"] == sum(END not in d.tokens[d.spans[0][0] :] for d in documents) > 0
    assert loads == []


def test_kept_responses_need_no_model(target: Path, tmp_path: Path, loads: list[str]) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    cfg = config(target, tmp_path, [{"messages": chat * 2}, {"prompt": "Ho", "response": "No sir"}], ResponseMode.keep)
    prepare.run(cfg)
    assert [parts(d) for d in read_documents(cfg.data_dir)] == [["Yes<|im_end|>"] * 2, ["No sir<|im_end|>"]]
    assert loads == []


def test_fault_09_template_that_strips_thinking_is_refused_before_anything_is_spent(tmp_path: Path, loads: list[str]) -> None:
    tiny = tiny_llama(tmp_path / "tiny")
    (tiny / "chat_template.jinja").write_text(c.STRIPS_THINKING)
    for mode in ResponseMode:
        cfg = config(tiny, tmp_path, [{"messages": [{"role": r, "content": r} for r in ("user", "assistant") * 2]}], mode)
        with pytest.raises(UserError, match="strips or rewrites the thinking"):
            prepare.run(cfg)
    assert loads == []
    prepare.run(config(tiny, tmp_path, prompts("one turn", "is exact")))


def test_held_out_is_split_off_by_prompt_before_generation(target: Path, tmp_path: Path, loads: list[str]) -> None:
    long = " ".join(f"w{n}" for n in range(13))
    rows = prompts(*(f"prompt {n}" for n in range(18)), "Same", "same ", long, long + " more")
    seen = set()
    for seed in range(6):
        cfg = config(target, tmp_path, rows, held_out_fraction=0.5, max_length=300)
        cfg.seed, cfg.name = seed, f"run{seed}"
        prepare.run(cfg)
        documents = read_documents(cfg.data_dir)
        train, held_out = ([d for d in documents if d.split == s] for s in (TRAIN, HELD_OUT))
        assert documents == train + held_out
        assert len({d.id for d in documents}) == len(documents)
        assert {"p18", "p19"} & {d.id for d in documents} == {"p18"}
        assert not {d.id for d in train} >= {"p20"} or not {d.id for d in held_out} >= {"p21"}
        assert not {d.id for d in train} >= {"p21"} or not {d.id for d in held_out} >= {"p20"}
        dropped = results(cfg)["dropped"]
        assert sum(dropped.values()) == len(rows) - len(documents)
        seen.add(tuple(d.id for d in held_out))
    assert len(seen) == 6


def test_several_samples_of_training_prompts_and_one_greedy_answer_of_held_out_ones(target: Path, tmp_path: Path, loads: list[str]) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"id": "h", "prompt": "three"}) + "\n")
    rows = [*prompts("one", "two"), {"id": "p0~2", "prompt": "four"}]
    sampled = ResponsesConfig(max_new_tokens=LIMIT, batch_size=4, temperature=0.7, samples=3)
    cfg = config(target, tmp_path, rows, responses=sampled, held_out=[str(held)])
    prepare.run(cfg)
    asked = sorted(FakeGenerator.asked)
    names = ["p0", "p0~3", "p0~4", "p0~2", "p0~2~2", "p0~2~3", "p1", "p1~2", "p1~3"]
    assert asked == sorted([("h#0", 0.0), *((f"{name}#0", 0.7) for name in names)])
    assert [(d.id, d.split) for d in read_documents(cfg.data_dir)][-1] == ("h", HELD_OUT)
    assert results(cfg)["all"]["documents"] == 10


def test_held_out_files_are_used_and_their_prompts_leave_training(target: Path, tmp_path: Path, loads: list[str]) -> None:
    held_out = tmp_path / "dev.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("Hi", "hi", "Ho", "He")))
    cfg = config(target, tmp_path, prompts("ho", "hum", "hi"), held_out=[str(held_out)], held_out_max=2, held_out_fraction=0.5)
    prepare.run(cfg)
    documents = read_documents(cfg.data_dir)
    assert [d.id for d in documents if d.split == TRAIN] == ["p1"]
    assert len([d for d in documents if d.split == HELD_OUT]) == 2
    assert results(cfg)["dropped"] == {"held-out duplicate": 1, "held-out beyond data.held_out_max": 1, "shares a prompt with held-out": 2}


OWN = [{"id": f"own-{n}", "source": "own", "messages": [{"role": "user", "content": f"own question {n}"}]} for n in range(20)]


def test_self_source_holds_out_own_prompts_and_goes_on_writing(
    target: Path, tmp_path: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def write(
        generate: object, tokenizer: object, stop_ids: object, cfg: SelfConfig, known: set[str], done: Sequence[Round]
    ) -> Iterator[Round]:
        asked.append(len(done))
        assert {m["content"] for r in OWN for m in r["messages"]} <= known
        assert [r.attempts for r in done] == [2 * n + 1 for n in range(len(done))]
        for n in range(len(done), cfg.count):
            if len(asked) == 1 and n == 2:
                raise Killed
            yield Round([f"written {n}" if n % 2 else OWN[n + 1]["messages"][0]["content"].upper()], 2 * n + 1)

    monkeypatch.setattr("mtptrain.data.gather.own_prompts", lambda: OWN)
    monkeypatch.setattr(prepare, "own_prompts", lambda: OWN)
    monkeypatch.setattr(prepare, "write_user_turns", write)
    cfg = config(target, tmp_path, held_out_fraction=0.25, self_prompts=SelfConfig(count=6))
    with pytest.raises(Killed):
        prepare.run(cfg)
    prepare.run(cfg)
    assert asked == [0, 2]
    documents = read_documents(cfg.data_dir)
    held_out = [d for d in documents if d.split == HELD_OUT]
    assert [d.source for d in held_out] == ["own"] * 5
    # own-1, own-3 and own-5 were written again in capitals: dropped as duplicates of training or as held-out, whichever they are
    assert len([d for d in documents if d.split == TRAIN]) == 15 + 3
    assert [d.id for d in documents if d.source == "self"] == ["self-00002", "self-00004", "self-00006"]
    assert sum(results(cfg)["dropped"].values()) == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda cfg: setattr(cfg.data.responses, "mode", ResponseMode.keep), "data.responses.mode=keep: data.source=self"),
        (lambda cfg: setattr(cfg.data, "max_length", 4096), "data.max_length=4096: the target's max_position_embeddings is 1024"),
    ],
)
def test_options_that_cannot_work_are_refused_first(
    change: Callable[[Config], None], says: str, target: Path, tmp_path: Path, loads: list[str]
) -> None:
    cfg = config(target, tmp_path)
    change(cfg)
    with pytest.raises(UserError, match=says):
        prepare.run(cfg)
    assert loads == []
    assert not cfg.data_dir.exists()


def test_changed_data_are_stale_and_what_decides_nothing_is_not(target: Path, tmp_path: Path, loads: list[str]) -> None:
    cfg = config(target, tmp_path, prompts("Hi"))
    prepare.run(cfg)
    cfg.data.responses.batch_size = 1
    cfg.data.self_prompts.count += 1  # of source=self
    prepare.run(cfg)
    cfg.data.responses.max_new_tokens = 9
    with pytest.raises(StaleError, match=r"data.responses.max_new_tokens: 24 -> 9"):
        prepare.run(cfg)
    with pytest.raises(StaleError, match=r"data.train"):
        prepare.run(config(target, tmp_path, prompts("Ho")))


def test_ids_are_unique() -> None:
    records = [Record(id=i, source="s", messages=[]) for i in ("a", "a", "a~2", "b", "a", "a~2")]
    make_ids_unique(records)
    assert [r.id for r in records] == ["a", "a~3", "a~2", "b", "a~4", "a~2~2"]


class Visible(HTMLParser):
    """The text a browser would show, and inside which tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.marked = ""
        self._inside = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        self._inside = tag == "mark"

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        self.marked += data if self._inside else ""


def test_rendering_escapes_html_and_terminal_sequences() -> None:
    nasty = "<script>alert(1)</script> \x1b[31mred [bold]x[/bold] & é"
    tokens, spans = TEMPLATE.kept([{"role": "user", "content": nasty}, {"role": "assistant", "content": nasty}], None)
    document = Document(id="<b>\x1b", source="s", split=TRAIN, tokens=tokens, spans=spans)
    page = Visible(samples_html([document], TEMPLATE))
    shown = nasty.replace("\x1b", "␛") + "<|im_end|>"
    assert page.marked == shown
    assert not {"script", "b"} & set(page.tags)
    text = samples_text([document], TEMPLATE)
    assert f"⟦{shown}⟧" in text
    assert text.count("⟦") == 2  # the legend's and the span's
    assert "\x1b" not in text + samples_html([document], TEMPLATE)
    rich = coloured(document, TEMPLATE)
    assert [rich.plain[s.start : s.end] for s in rich.spans if "green" in str(s.style)] == [shown]
    assert "\x1b" not in rich.plain


def test_samples_are_the_first_twenty(target: Path, tmp_path: Path, loads: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    cfg = config(target, tmp_path, prompts(*(f"prompt {n}" for n in range(25))))
    prepare.run(cfg)
    text = (cfg.data_dir / "samples.txt").read_text()
    assert text.count("--- p") == 20
    assert "⟦re prompt 19<|im_end|>⟧" in text
    assert (cfg.data_dir / "samples.html").read_text().count("<mark>") == 20
    assert "re prompt 0<|im_end|>" in capsys.readouterr().out


def test_a_real_tiny_target_answers_greedily(target: Path, tmp_path: Path) -> None:
    """The stored spans are the argmax of the target's own logits, prompt by prompt, without any cache."""
    cfg = config(target, tmp_path, prompts("What is it?|Why?", "Hello", "Sort a list"), held_out_fraction=0.3)
    prepare.run(cfg)
    documents = read_documents(cfg.data_dir)
    assert sorted(d.id for d in documents) == ["p0", "p1", "p2"]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    for document in documents:
        with torch.no_grad():
            choice_T = model(input_ids=torch.tensor([document.tokens])).logits[0].argmax(-1).tolist()
        for start, end in document.spans:
            assert document.tokens[start:end] == choice_T[start - 1 : end - 1]
            assert end - start == LIMIT or document.tokens[end - 1] == load_tokenizer(target, False).eos_token_id


def test_training_needs_held_out_prompts_before_anything_is_generated(target: Path, tmp_path: Path, loads: list[str]) -> None:
    cfg = config(target, tmp_path, prompts("What is it?", "Hello"), held_out_fraction=0.0)
    with pytest.raises(UserError, match="no prompt is held out of 2"):
        prepare.run(cfg, for_training=True)
    assert loads == []
