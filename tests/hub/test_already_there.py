"""A push to a repository that holds something: the earlier model goes, the owner's files and words stay."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from finetune.cli.main import main
from finetune.errors import FinetuneError
from finetune.files import append_lines
from finetune.hub.already_there import marked_card, merged_card, obsolete_files
from finetune.hub.push import Destination, push
from finetune.hub.upload_files import Outgoing
from tests.support.hub import Hub
from tests.support.hub.card_rules import card_mistakes
from tests.support.hub.state import Blob, git_object
from tests.support.models.tiny import tiny_model
from tests.support.runs.finished import finished_run

REPO = "me/devils"
ADAPTER, MERGED = Destination(REPO, base="acme/tiny-llama"), Destination(REPO, base="acme/tiny-llama", merged=True)
OWNERS = (
    "---\nlicense: cc-by-nc-4.0\nlanguage: [de]\ndatasets: [me/my-own]\ntags: [devil]\nthumbnail: devil.png\n---\n"
    "# My devil\n\nHand-written: evaluation by three readers, contact, citation.\n"
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    """A finished run with an adapter and its merged model."""
    run = finished_run(tmp_path_factory.mktemp("finished"), tiny_llama)
    append_lines(run / "metrics.jsonl", [{"kind": "eval", "step": 2, "loss": 4.0, "perplexity": 54.6}])
    assert main(["merge", str(run), "--verify", "0", "--json"]) == 0
    return run


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def send(run: Path, hub: Hub, to: Destination) -> tuple[dict[str, Any], list[str]]:
    lines: list[str] = []
    return push(run, to, endpoint=hub.url, pause=lambda _: None, say=lines.append), lines


def put(hub: Hub, files: Mapping[str, bytes], branch: str = "main") -> None:
    if REPO not in hub.repositories:
        hub.add(REPO, private=True)
    repository = hub.repository(REPO)
    there = {**repository.files(branch), **{path: Blob(content) for path, content in files.items()}}
    repository.commit(branch, there, "by hand", "")


def names(hub: Hub, branch: str = "main") -> set[str]:
    return set(hub.repository(REPO).files(branch)) - {".gitattributes"}


def fetched(hub: Hub, folder: Path) -> Path:
    folder.mkdir()
    for name in hub.repository(REPO).files():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(hub.content(REPO, name))
    return folder


def logits(path: Path) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = AutoModelForCausalLM.from_pretrained(path)(torch.tensor([[1, 20, 30, 7, 81]])).logits
    return output


class TestFiles:
    @pytest.mark.thorough
    def test_merged_over_an_adapter_is_what_transformers_loads(self, run: Path, hub: Hub, tmp_path: Path) -> None:
        send(run, hub, ADAPTER)
        record, lines = send(run, hub, MERGED)
        assert record["removed"] == ["adapter_config.json", "adapter_model.safetensors"]
        assert any("removed there" in line and "adapter_config.json" in line for line in lines)
        assert torch.equal(logits(fetched(hub, tmp_path / "fetched")), logits(run / "merged"))
        assert send(run, hub, ADAPTER)[0]["removed"][0] == "config.json"
        assert "model.safetensors" not in names(hub)

    @pytest.mark.slow
    def test_shards_over_one_file_and_back(self, run: Path, hub: Hub, tmp_path: Path) -> None:
        send(run, hub, MERGED)
        one = shutil.copytree(run / "merged", tmp_path / "one")
        (run / "merged" / "model.safetensors").unlink()
        other = tiny_model(seed=5)
        other.save_pretrained(run / "merged", max_shard_size="300KB")
        shards = {path.name for path in (run / "merged").glob("model*.safetensors")}
        assert len(shards) > 1
        assert send(run, hub, MERGED)[0]["removed"] == ["model.safetensors"]
        assert torch.equal(logits(fetched(hub, tmp_path / "fetched")), logits(run / "merged"))
        shutil.rmtree(run / "merged")
        shutil.copytree(one, run / "merged")
        assert set(send(run, hub, MERGED)[0]["removed"]) == {*shards, "model.safetensors.index.json"}

    def test_every_kind_that_a_reader_takes_goes_and_the_owners_files_stay(self, run: Path, hub: Hub) -> None:
        earlier = (
            "pytorch_model.bin pytorch_model-00001-of-00002.bin pytorch_model.bin.index.json adapter_model.bin "
            "model.fp16.safetensors consolidated.00.pth consolidated.safetensors tf_model.h5 config.json "
            "generation_config.json hf_quant_config.json tekken.json spiece.model added_tokens.json tokenizer.model "
            "chat_template.json additional_chat_templates/tool_use.jinja q4_k_m.gguf gguf/q8.gguf onnx/model.onnx "
            "onnx/model.onnx_data"
        ).split()
        own = (
            "LICENSE NOTICE.md images/devil.png loss.png.txt data.csv data/model.safetensors notes.json "
            "eval/config.json handler.py training_args.bin config.yaml other/adapter_config.json"
        ).split()
        put(hub, dict.fromkeys([*earlier, *own], b"{}"))
        record, _ = send(run, hub, ADAPTER)
        assert sorted(record["removed"]) == sorted(earlier)
        assert set(own) <= names(hub)
        assert names(hub) == {*own, *(file["path"] for file in record["files"])}
        assert [commit.title for _, commit in hub.repository(REPO).history(record["commit"])].count("run: adapter") == 1

    @pytest.mark.slow
    def test_a_new_branch_begins_with_mains_files_and_loses_its_model(self, run: Path, hub: Hub) -> None:
        send(run, hub, MERGED)
        record, _ = send(run, hub, Destination(REPO, revision="v2"))
        assert "model.safetensors" in record["removed"]
        assert "model.safetensors" not in names(hub, "v2")
        assert "model.safetensors" in names(hub)

    @pytest.mark.parametrize("late", [pytest.param("adapter_model.bin", marks=pytest.mark.slow), "README.md"])
    def test_a_change_while_it_is_pushed_is_seen(self, run: Path, hub: Hub, late: str) -> None:
        """Somebody commits between the listing and the commit: the Hub refuses, and the next attempt looks again."""
        send(run, hub, MERGED)
        answer = hub.take_fault

        def and_somebody_commits(call: str) -> Any:
            if call == "preupload" and late not in changed:
                changed.append(late)
                put(hub, {late: OWNERS.encode()})
            return answer(call)

        changed: list[str] = []
        hub.take_fault = and_somebody_commits  # type: ignore[method-assign]
        record, lines = send(run, hub, ADAPTER)
        assert changed
        assert any("412" in line for line in lines)
        assert "adapter_model.bin" not in names(hub)
        if late == "README.md":
            assert "# My devil" in hub.content(REPO, "README.md").decode()
        assert record["state"] == "pushed"


class TestCard:
    def readme(self, hub: Hub) -> str:
        return hub.content(REPO, "README.md").decode()

    def test_a_hand_written_one_is_kept_and_gets_the_kits_part(self, run: Path, hub: Hub) -> None:
        put(hub, {"README.md": OWNERS.encode()})
        _, lines = send(run, hub, ADAPTER)
        text = self.readme(hub)
        card = ModelCard(text)
        assert (card.data.license, card.data.language, card.data.thumbnail) == ("cc-by-nc-4.0", ["de"], "devil.png")
        assert card.data.datasets == ["me/my-own"]
        assert {"devil", "lora", "finetune"} <= set(card.data.tags)
        assert (card.data.base_model, card.data.library_name) == ("acme/tiny-llama", "peft")
        assert card.text.index("three readers") < card.text.index("## How it was trained")
        assert any("the text that is there stays" in line for line in lines)
        assert any("license: cc-by-nc-4.0" in line for line in lines)
        assert card_mistakes(text) == []
        first = hub.repository(REPO).branches["main"]
        send(run, hub, ADAPTER)
        assert hub.repository(REPO).branches["main"] == first, "a second push of the same changes nothing"
        send(run, hub, MERGED)
        again = ModelCard(self.readme(hub))
        assert again.text.count("three readers") == again.text.count("## How it was trained") == 1
        assert (again.data.license, again.data.library_name) == ("cc-by-nc-4.0", "transformers")
        assert "PeftModel" not in again.text


HEAD = "---\nlicense: llama3.1\nbase_model: acme/llama\nlibrary_name: peft\ntags: [finetune, lora]\n---\n\n"
NEW = marked_card(f"{HEAD}# devils\n\nAn adapter.\n\n## How\n")
OTHER = marked_card(f"{HEAD.replace('peft', 'transformers').replace('llama3.1', 'mit')}# devils\n\nMerged.\n")


class TestCardAgain:
    """A second card over the kit's own."""

    def test_it_is_replaced_whole(self) -> None:
        assert merged_card(NEW, OTHER) == (OTHER, [])
        assert merged_card(NEW, NEW) == (NEW, [])

    @pytest.mark.parametrize("line_end", ["\n", "\r\n"])
    def test_an_edit_inside_is_noticed(self, line_end: str) -> None:
        edited = NEW.replace("## How", "Ask me.\n\n## How")
        text, notes = merged_card(edited.replace("\n", line_end), NEW)
        assert (text, len(notes)) == (edited, 1)
        assert "it stays as edited" in notes[0]
        text, notes = merged_card(text, OTHER)
        assert "the edited text stands below the new" in notes[0]
        assert text.index("Merged.") < text.index("finetune: end") < text.index("An adapter.") < text.index("Ask me.")
        assert merged_card(text, OTHER) == (text, [])

    def test_edited_metadata_win(self) -> None:
        text, notes = merged_card(NEW.replace("license: llama3.1", "license: gpl-3.0\nlanguage: fr"), OTHER)
        data = ModelCard(text).data
        assert (data.license, data.language, data.library_name) == ("gpl-3.0", "fr", "transformers")
        assert "license: gpl-3.0" in notes[0]
        assert text.count("Merged.") == 1
        assert "An adapter." not in text

    def test_text_around_the_marks_stays(self) -> None:
        head, begin, rest = NEW.partition("<!-- finetune writes")
        text, _ = merged_card(f"{head}Above.\n\n{begin}{rest}\nBelow.\n", OTHER)
        places = [text.index(word) for word in ("Above.", "<!-- finetune writes", "Merged.", "finetune: end", "Below.")]
        assert places == sorted(places)
        assert "An adapter." not in text

    def test_an_answer_that_quotes_the_marks_ends_nothing(self) -> None:
        quoting = marked_card(f"{HEAD}# devils\n\n<!-- finetune: end -->\n\nstill the kit's\n")
        assert merged_card(quoting, OTHER) == (OTHER, [])


MODEL = {"model.safetensors": "1", "metrics.jsonl": "2"}
MADE = {"q4.gguf": "3", "preprocessor_config.json": "4"}


class TestWhatGoes:
    """`obsolete_files` by itself: path -> hash there, and what is sent."""

    def sent(self, metrics: bytes) -> dict[str, Outgoing]:
        files = {"model.safetensors": b"weights", "metrics.jsonl": metrics, "README.md": b"card"}
        return {path: Outgoing(path, content) for path, content in files.items()}

    @pytest.mark.parametrize("large", [False, True])
    def test_conversions_of_this_run_stay(self, large: bool) -> None:
        metrics = b'{"step": 1}\n'
        listed = hashlib.sha256(metrics).hexdigest() if large else git_object("blob", metrics)
        there = MODEL | MADE | {"metrics.jsonl": listed}
        assert obsolete_files(there, self.sent(metrics), "") == ([], [])
        assert obsolete_files(there, self.sent(b"another"), "") == (sorted(MADE), [])

    def test_a_conversion_beside_no_model_stays_and_is_named(self) -> None:
        assert obsolete_files(MADE | {"config.json": "5"}, self.sent(b""), "") == (
            ["config.json"],
            sorted(MADE),
        )

    def test_pages_of_an_earlier_run_go_only_from_the_kits_own_repository(self) -> None:
        there = {"rewards.png": "1", "report.html": "2", "mine.png": "3"}
        assert obsolete_files(there, self.sent(b""), "# mine") == ([], [])
        assert obsolete_files(there, self.sent(b""), NEW) == (["report.html", "rewards.png"], [])


RESULT = {
    "task": {"type": "text-generation"},
    "dataset": {"type": "me/test", "name": "my test"},
    "metrics": [{"type": "accuracy", "value": 0.5}],
}


@pytest.mark.parametrize(
    ("there", "kept"),
    [
        pytest.param("", {"license": "llama3.1"}, id="empty"),
        pytest.param("# Mine\n\ntext\n", {"license": "llama3.1"}, id="no metadata"),
        pytest.param("---\n---\n# Mine\n", {"license": "llama3.1"}, id="empty metadata"),
        pytest.param("---\nlicense: other\nlicense_name: mine\n---\n", {"license_name": "mine"}, id="a name"),
        pytest.param("---\ntags: chat\n---\n# Mine\n", {"tags": ["chat", "finetune", "lora"]}, id="one tag"),
        pytest.param("---\ntags: [qlora, x]\n---\n", {"tags": ["x", "finetune", "lora"]}, id="a tag of the kit"),
        pytest.param("---\nbase_model: acme/old\n---\n", {"base_model": "acme/llama"}, id="another base"),
        pytest.param(
            f"---\nmodel-index: {json.dumps([{'name': 'x', 'results': [RESULT]}])}\n---\n",
            {"model-index": [{"name": "x", "results": [RESULT]}]}, id="results",
        ),
        pytest.param("---\ninference: true\nwidget: [{text: Hi}]\n---\n", {"inference": True}, id="other keys"),
        pytest.param("\ufeff---\nlicense: mit\n---\n# Mine\n", {"license": "mit"}, id="a byte order mark"),
    ],
)  # fmt: skip
def test_every_kind_of_card(there: str, kept: dict[str, Any]) -> None:
    merged, _ = merged_card(there, NEW)
    data = ModelCard(merged).data.to_dict()
    assert kept.items() <= data.items()
    assert "An adapter." in merged
    assert ("# Mine" in merged) == ("# Mine" in there)
    assert merged_card(merged, NEW)[0] == merged, "the second push changes nothing"


def test_metadata_that_cannot_be_read_stop_the_push() -> None:
    with pytest.raises(
        FinetuneError, match=r"README.md on the Hub: its metadata cannot be read: .*correct them"
    ) as caught:
        merged_card("---\nlicense: [mit\n---\n# mine\n", NEW)
    assert "\n" not in str(caught.value)
