import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from kvsweep.compression.artifacts import read_card
from kvsweep.compression.recorders import load_predictor
from kvsweep.harness.models.config import ModelConfig
from kvsweep.harness.settings import WEIGHTS
from kvsweep.harness.toy.tasks import TASKS, problems
from scripts.train.toy_tokenizer import build_tokenizer

STATED_ONCE = ("chain", "add", "regs", "groups")
MODELS = {
    "toy_qwen": STATED_ONCE,
    "toy_llama": STATED_ONCE,
    "toy_qwen_restated": (*STATED_ONCE, "restated"),
    "toy_llama_restated": (*STATED_ONCE, "restated"),
    "toy_qwen_windows": STATED_ONCE,
}
LABELS = ("answer", "far_max", "later", "answer_far_max")
HEADS = [
    (name, label) for name in MODELS for label in LABELS if label == "far_max" or name in ("toy_qwen", "toy_llama")
]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def greedy(model, tokenizer, question, max_new_tokens=576):
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.one_in(5)
def test_model_reasons_to_right_answers(name):
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS / name, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(WEIGHTS / name)
    right = 0
    for task in MODELS[name]:
        for problem in problems(task, count=2):
            text = greedy(model, tokenizer, problem.question)
            assert "</think>" in text
            right += text.endswith(f"\\boxed{{{problem.answer}}}<eos>")
    assert right >= 2 * len(MODELS[name]) - 2


@pytest.mark.parametrize("name", MODELS)
def test_files_are_small_and_told_of(name):
    folder = WEIGHTS / name
    assert (folder / "model.safetensors").stat().st_size <= 3_000_000
    record = json.loads((folder / "training.json").read_text())
    # The script had another place when the oldest weights were made.
    assert re.match(r"python scripts/(train/)?train_toy_models.py --arch ", record["command"])
    assert {"seed", "tokens", "final_loss", "accuracy_by_size", "versions"} <= record.keys()
    rows = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    assert rows[-1]["tokens"] == record["tokens"]


@pytest.mark.parametrize("name", MODELS)
def test_saved_tokenizer_is_the_built_one(name):
    saved, built = PreTrainedTokenizerFast.from_pretrained(WEIGHTS / name), build_tokenizer()
    assert saved.chat_template == built.chat_template
    assert saved.padding_side == "left"
    assert saved.get_vocab() == built.get_vocab()
    for task in TASKS:
        for problem in problems(task):
            assert saved.encode(problem.question) == built.encode(problem.question)


@pytest.mark.parametrize(("name", "label"), HEADS)
def test_predictor_belongs_to_its_model(name, label):
    folder = WEIGHTS / "predictors" / name / label
    assert (folder / "predictor.safetensors").stat().st_size <= 300_000
    card = read_card("predictor", folder)
    model = ModelConfig(name=name, title="", path=str(WEIGHTS / name))
    assert card["model_weights"] == model.identity()["weights"]
    assert "_".join(card["label"]) == label
    hidden_size = json.loads((WEIGHTS / name / "config.json").read_text())["hidden_size"]
    scores = load_predictor(folder)(torch.randn(2, 5, hidden_size))
    assert scores.shape == (2, 5)
    assert (scores > 0).all()


@pytest.mark.parametrize("name", MODELS)
def test_statistics_of_queries_belong_to_their_model(name):
    card = read_card("statistics", WEIGHTS / "statistics" / f"{name}.safetensors")
    model = ModelConfig(name=name, title="", path=str(WEIGHTS / name))
    assert card["model_weights"] == model.identity()["weights"]
    assert card["hidden_size"] == json.loads((WEIGHTS / name / "config.json").read_text())["hidden_size"]
    assert int(card["tokens"]) == 32_768
