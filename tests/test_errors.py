"""Bad input raises a clear NormscopeError and returns no numbers; the model is left unchanged."""

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModel

import normscope.models.registry
from normscope import Analyzer, NormscopeError, default_model
from normscope.models.encoders import BERT
from tests.helpers import layer_oracle
from tests.helpers.compare import assert_same, refused, state_of, with_implementation
from tests.helpers.oracle_parts import maps
from tests.helpers.tiny import BERT_FAMILIES, tiny
from tests.helpers.toys import SCOPES, TEXT, save_model, some_ids, toy_lens, toy_tokenizer

LONG = "the cat " * 40  # 82 tokens with the special ones; the model has 40 positions


@pytest.fixture
def lens(monkeypatch: pytest.MonkeyPatch) -> Analyzer:
    """An analyzer whose model must not be run."""

    def never(*args: Any, **kwargs: Any) -> None:
        pytest.fail("the model was run")

    monkeypatch.setattr("normscope.engine.run.trace", never)
    return toy_lens()


# --- inputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", " ", "\n\t \u2003", ("", ""), (" ", "\n")], ids=repr)
def test_empty_text(lens: Analyzer, text: Any) -> None:
    refused(lambda: lens.analyze(text), "empty")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "empty"),
        ((), "empty"),
        (["", " "], "empty"),
        ("str", "list of strings"),
        (["a", 5], "list of strings"),
        ([["a"]], "list of strings"),
        (5, "list of strings"),
        (b"a", "list of strings"),
    ],
    ids=repr,
)
def test_bad_words(lens: Analyzer, words: Any, part: str) -> None:
    refused(lambda: lens.analyze(words=words), part)


def test_one_input_is_needed(lens: Analyzer) -> None:
    refused(lambda: lens.analyze(), "words=[...]")
    refused(lambda: lens.analyze(None), "words=[...]")
    refused(lambda: lens.analyze(TEXT, words=["a"]), "Pass exactly one input")


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (5, "an int"),
        (1.5, "a float"),
        (b"bytes", "a bytes"),
        (["a", "cat"], "words=[...]"),
        ([["a", "cat"]], "words=[...]"),
        ([], "words=[...]"),
        ((1, 2), "a tuple"),
        ((TEXT, None), "a tuple"),
        ((), "an empty tuple"),
        ({"a", "b"}, "a set"),
        (some_ids(5), "not Tensor"),
        (object(), "an object"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_wrong_type(lens: Analyzer, given: Any, part: str) -> None:
    refused(lambda: lens.analyze(given), part)


@pytest.mark.parametrize("given", [("a cat",), ("a cat", "the dog", "it ran"), ("a",) * 8], ids=len)
def test_a_tuple_that_is_not_a_pair(lens: Analyzer, given: Any) -> None:
    """It would be read as the words of one sentence."""
    parts = ("one text" if len(given) == 1 else f"{len(given)} texts", "(a, b)", "words=[...]", "stream([...])")
    refused(lambda: lens.analyze(given), *parts)
    refused(lambda: lens.flow(given), *parts)
    refused(lambda: lens.estimate(given), *parts)
    refused(lambda: list(lens.stream(["a cat", given])), *parts)
    assert lens.estimate(words=given).tokens > 2  # words may be any sequence


IDS = [2, 7, 8, 3]


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({}, ["no input_ids"]),
        ({"attention_mask": [1, 1]}, ["no input_ids"]),
        ({"input_ids": None}, ["input_ids"]),
        ({"input_ids": IDS, "inputs_embeds": [1]}, ["inputs_embeds", "token_type_ids"]),
        ({"input_ids": IDS, "mask": IDS, "ids": IDS}, ["ids, mask", "attention_mask"]),
        ({"input_ids": IDS, 7: IDS}, ["7"]),
        ({"input_ids": []}, ["empty"]),
        ({"input_ids": [[]]}, ["empty"]),
        ({"input_ids": torch.empty(1, 0, dtype=torch.long)}, ["empty"]),
        ({"input_ids": torch.empty(0, 4, dtype=torch.long)}, ["empty"]),
        ({"input_ids": 5}, ["0 dimensions"]),
        ({"input_ids": [[IDS]]}, ["3 dimensions"]),
        ({"input_ids": [2.0, 7.0]}, ["integers", "float"]),
        ({"input_ids": [True, False]}, ["integers", "bool"]),
        ({"input_ids": torch.tensor([1j])}, ["integers", "complex"]),
        ({"input_ids": "abc"}, ["integers"]),
        ({"input_ids": ["a", "b"]}, ["integers"]),
        ({"input_ids": [[1, 2], [3]]}, ["rectangular"]),
        ({"input_ids": [2**70]}, ["input_ids"]),
        ({"input_ids": IDS, "attention_mask": [1, 1]}, ["attention_mask", "(1, 2)", "(1, 4)"]),
        ({"input_ids": [IDS, IDS], "attention_mask": [[1, 1, 1, 1]]}, ["(1, 4)", "(2, 4)"]),
        ({"input_ids": IDS, "token_type_ids": [0]}, ["token_type_ids", "(1, 1)"]),
        ({"input_ids": IDS, "attention_mask": [1, 2, 1, 1]}, ["zeros and ones"]),
        ({"input_ids": IDS, "attention_mask": [1, -1, 1, 1]}, ["zeros and ones"]),
        ({"input_ids": IDS, "attention_mask": [1.0, 0.5, 1.0, 1.0]}, ["attention_mask"]),
        ({"input_ids": IDS, "attention_mask": [1.0, float("nan"), 1.0, 1.0]}, ["attention_mask"]),
        ({"input_ids": IDS, "attention_mask": [0, 0, 0, 0]}, ["masks every token"]),
        ({"input_ids": [2, -1, 3]}, ["-1", "0 to 49"]),
        ({"input_ids": [2, 50, 3]}, ["50", "0 to 49"]),
        ({"input_ids": IDS, "token_type_ids": [0, 0, 2, 0]}, ["token_type_ids", "2 token types"]),
        ({"input_ids": IDS, "token_type_ids": [0, 0, -1, 0]}, ["token_type_ids", "2 token types"]),
        ({"input_ids": IDS, "position_ids": [0, 1, 2, 40]}, ["position_ids", "40 positions"]),
        ({"input_ids": [IDS, IDS]}, ["2 inputs", "stream"]),
    ],
    ids=str,
)
def test_bad_encoding(lens: Analyzer, given: Any, parts: list[str]) -> None:
    refused(lambda: lens.analyze(given), *parts)


@pytest.mark.parametrize(("family", "key"), [("distilbert", "token_type_ids"), ("mpnet", "token_type_ids")])
def test_key_that_the_family_does_not_take(family: str, key: str) -> None:
    refused(lambda: Analyzer(tiny(family)).analyze({"input_ids": [5, 6], key: [0, 0]}), key)


@pytest.mark.parametrize("family", BERT_FAMILIES)
def test_vocabulary_of_every_family(family: str) -> None:
    lens = Analyzer(tiny(family))
    refused(lambda: lens.analyze({"input_ids": [5, 50]}), "50", "0 to 49")


def test_one_masked_input_of_a_batch(lens: Analyzer) -> None:
    given = {"input_ids": [IDS, IDS], "attention_mask": [[1, 1, 1, 1], [0, 0, 0, 0]]}
    refused(lambda: list(lens.stream(given)), "input 1")


@pytest.mark.parametrize("given", [LONG, (LONG, "a cat"), {"input_ids": some_ids(82)}], ids=["text", "pair", "ids"])
def test_too_long(lens: Analyzer, given: Any) -> None:
    length = "85" if isinstance(given, tuple) else "82"
    refused(lambda: lens.analyze(given), length, "40", "truncation=True")
    refused(lambda: lens.analyze(words=["cat"] * 41), "43", "40")


@pytest.mark.parametrize("family", BERT_FAMILIES)
def test_too_long_for_every_family(family: str) -> None:
    lens = Analyzer(tiny(family))
    longest = lens.loaded.limits.positions
    refused(lambda: lens.analyze({"input_ids": some_ids(longest + 1)}), str(longest + 1), str(longest))


def test_text_without_tokenizer() -> None:
    for call in (lambda lens: lens.analyze(TEXT), lambda lens: lens.analyze(words=["a"])):
        refused(lambda call=call: call(Analyzer(tiny("bert"))), "tokenizer", "input_ids")


# --- selections and options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"scopes": "ATTNRESL-N"}, ["'ATTNRESL-N'", "ATTNRESLN-N", *SCOPES]),
        ({"scopes": ["layer", "nope"]}, ["'nope'", "aliases"]),
        ({"scopes": []}, ["No scope", *SCOPES]),
        ({"scopes": [3]}, ["int"]),
        ({"scopes": 3}, ["scope"]),
        ({"layers": 2}, ["layer 2", "0 to 1"]),
        ({"layers": [0, -3]}, ["layer -3", "0 to 1"]),
        ({"layers": []}, ["layers=[] is empty"]),
        ({"layers": True}, ["layer", "bool"]),
        ({"layers": [False]}, ["layer", "bool"]),
        ({"layers": [1.0]}, ["layer", "float"]),
        ({"layers": 1.0}, ["layer", "float"]),
        ({"layers": "1"}, ["layer", "str"]),
        ({"layers": [None]}, ["layer", "NoneType"]),
        ({"heads": 4}, ["head 4", "0 to 3"]),
        ({"heads": [1, -5]}, ["head -5", "0 to 3"]),
        ({"heads": []}, ["heads=[] is empty"]),
        ({"heads": ()}, ["heads=[] is empty"]),
        ({"heads": [True]}, ["head", "bool"]),
        ({"heads": [0.0]}, ["head", "float"]),
        ({"heads": 0.5}, ["head", "float"]),
        ({"heads": "all"}, ["head", "str"]),
        ({"rows": 11}, ["row 11", "0 to 10"]),
        ({"rows": [0, -12]}, ["row -12", "0 to 10"]),
        ({"rows": []}, ["rows=[] is empty"]),
        ({"rows": True}, ["row", "bool"]),
        ({"rows": [1.5]}, ["row", "float"]),
        ({"rows": 1.5}, ["row", "float"]),
        ({"rows": "0"}, ["row", "str"]),
        ({"gate": "nope"}, ["'nope'", "ig", "frozen", "tangent"]),
        ({"gate": None}, ["None", "ig"]),
        ({"value_bias": "nope"}, ["'nope'", "token", "remainder"]),
    ],
    ids=str,
)
def test_bad_option(lens: Analyzer, options: dict[str, Any], parts: list[str]) -> None:
    refused(lambda: lens.analyze(TEXT, **options), *parts)


def test_memory_budget(lens: Analyzer) -> None:
    small = Analyzer(lens.model, lens.tokenizer, memory_budget=1000)
    ways = ("layers=", "scopes=", "rows=", "heads=False", "batch_size", "truncation=True", "memory_budget")
    refused(lambda: small.analyze(TEXT), "11 tokens", "1 kB", *ways)
    refused(lambda: list(small.stream([TEXT])), "1 kB")
    cost = small.estimate(TEXT)
    assert cost.tokens == 11
    assert cost.memory > 1000
    assert "11 tokens" in str(cost)


@pytest.mark.parametrize("budget", ["1GB", 0, -1, 1.5, float("inf"), float("nan"), True, [1000]], ids=repr)
def test_bad_memory_budget(lens: Analyzer, budget: Any, tmp_path: Path) -> None:
    refused(lambda: Analyzer(lens.model, memory_budget=budget), "memory_budget", repr(budget), "bytes")
    refused(lambda: Analyzer.from_pretrained(tmp_path, memory_budget=budget), "memory_budget")


@pytest.mark.parametrize("budget", [8 * 10**9, 8e9, np.int64(8 * 10**9)], ids=repr)
def test_memory_budgets(lens: Analyzer, budget: Any) -> None:
    found = Analyzer(lens.model, memory_budget=budget).memory_budget
    assert (found, type(found)) == (8 * 10**9, int)


def test_estimate_refuses_what_analyze_refuses(lens: Analyzer) -> None:
    refused(lambda: lens.estimate(""), "empty")
    refused(lambda: lens.estimate(TEXT, scopes="nope"), "'nope'")
    refused(lambda: lens.estimate(LONG), "82", "40")
    refused(lambda: lens.estimate(TEXT, gate="nope"), "'nope'")
    refused(lambda: lens.estimate(TEXT, value_bias="nope"), "'nope'")


def test_estimate_of_a_slow_gate(lens: Analyzer) -> None:
    assert lens.estimate(TEXT, gate="shapley").seconds > lens.estimate(TEXT).seconds


# --- models ----------------------------------------------------------------------------------------------------------


def test_training_mode() -> None:
    model = tiny("bert")
    result = Analyzer(model, toy_tokenizer()).analyze(TEXT)
    lens = Analyzer(model, toy_tokenizer())
    model.train()
    refused(lambda: Analyzer(model, toy_tokenizer()), "training mode", "model.eval()")
    refused(lambda: lens.analyze(TEXT), "training mode", "model.eval()")
    refused(lambda: list(lens.stream([TEXT])), "training mode", "model.eval()")
    refused(lambda: result.vectors("layer", 0), "training mode", "model.eval()")
    model.eval()
    assert_same(lens.analyze(TEXT), result, 1e-12)


def test_one_submodule_in_training_mode() -> None:
    model = tiny("bert")
    model.encoder.layer[1].output.dropout.train()
    refused(lambda: Analyzer(model).analyze({"input_ids": IDS}), "training mode", "model.eval()")
    assert model.encoder.layer[1].output.dropout.training


def test_unknown_family() -> None:
    config = AutoConfig.for_model("xlnet", d_model=8, n_head=2, n_layer=1, d_inner=8, vocab_size=20)
    names = (name for family in normscope.models.registry.FAMILIES for name in family.model_types)
    model = AutoModel.from_config(config).eval()
    refused(lambda: Analyzer(model, derive=False), "'xlnet'", "Known families", "derive", "register", *names)
    refused(lambda: Analyzer(model), "XLNetModel cannot be described", "layer.0 (XLNetLayer)", "no linear module")


@pytest.mark.parametrize("kind", ["rwkv", "mamba"])
def test_family_that_cannot_be_decomposed(kind: str) -> None:
    config = AutoConfig.for_model(kind, hidden_size=8, num_hidden_layers=2, vocab_size=20)
    refused(
        lambda: Analyzer(AutoModel.from_config(config).eval()), normscope.models.registry.REFUSED[kind], "decomposed"
    )


@pytest.mark.parametrize("model", [nn.Linear(2, 2), "bert-base-uncased", None, 5], ids=lambda m: type(m).__name__)
def test_not_a_pretrained_model(model: Any) -> None:
    refused(lambda: Analyzer(model), type(model).__name__, "from_pretrained")


def test_config_that_breaks_the_algebra() -> None:
    model = tiny("bert", is_decoder=True, add_cross_attention=True)
    refused(lambda: Analyzer(model), "add_cross_attention=True", "cross-attention")


def test_unchecked_config_attribute(monkeypatch: pytest.MonkeyPatch) -> None:
    family = replace(BERT, attributes=BERT.attributes - {"hidden_act"})
    monkeypatch.setattr(normscope.models.registry, "FAMILIES", (family,))
    Analyzer(tiny("bert"))
    refused(lambda: Analyzer(tiny("bert", hidden_act="relu")), "hidden_act='relu'", "default 'gelu'", "checked")


def test_family_whose_config_has_no_such_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normscope.models.registry, "_registered", [])
    normscope.models.registry.register_family(replace(BERT, name="Mine", positions="n_places"))
    refused(lambda: Analyzer(tiny("bert")), "BertConfig", "n_places", "Mine", "positions=None")
    normscope.models.registry.register_family(replace(BERT, name="Mine", positions=None))
    assert Analyzer(tiny("bert")).loaded.limits.positions is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64], ids=str)
def test_dtype(dtype: torch.dtype) -> None:
    refused(lambda: Analyzer(tiny("bert"), dtype=dtype), "float32 or float64", str(dtype).removeprefix("torch."))


def test_dtype_as_a_string() -> None:
    """Accepted or refused as a string, but not with "run in float32 or float64, not float32"."""
    try:
        assert Analyzer(tiny("bert"), dtype="float32").dtype == torch.float32  # type: ignore[arg-type]
    except NormscopeError as error:
        assert "str" in str(error)  # noqa: PT017


def test_tokenizer_of_another_model() -> None:
    refused(lambda: Analyzer(tiny("bert", vocab_size=20), toy_tokenizer()), "21", "20", "does not belong")


@pytest.mark.parametrize("tokenizer", ["bert-base-uncased", 5, {}, str.split], ids=repr)
def test_not_a_tokenizer(tokenizer: Any) -> None:
    refused(lambda: Analyzer(tiny("bert"), tokenizer), "tokenizer", "AutoTokenizer")


def put(parameter: Any, value: float) -> None:
    with torch.no_grad():
        parameter.view(-1)[0] = value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize(
    "path", ["attention.self.value.weight", "attention.output.LayerNorm.bias", "intermediate.dense.bias"]
)
def test_damaged_layer_is_named(path: str, layer: int, value: float) -> None:
    model = tiny("bert", num_hidden_layers=3)
    put(model.encoder.layer[layer].get_parameter(path), value)
    refused(lambda: Analyzer(model).analyze({"input_ids": IDS}), f"Layer {layer}", "NaN or infinite")


@pytest.mark.parametrize("family", BERT_FAMILIES)
def test_damaged_layer_of_every_family(family: str) -> None:
    model = tiny(family)
    norms = [m for m in model.base_model.modules() if isinstance(m, nn.LayerNorm)]
    put(norms[-1].bias, float("nan"))  # ALBERT's layers share one module: the first call already shows it
    layer = 0 if family == "albert" else 1
    refused(lambda: Analyzer(model).analyze({"input_ids": IDS}), f"Layer {layer}", "NaN or infinite")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damaged_embedding(value: float) -> None:
    model = tiny("bert")
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[7, 0] = value
    lens = Analyzer(model)
    refused(lambda: lens.analyze({"input_ids": IDS}), "embeddings", "NaN or infinite")
    assert lens.analyze({"input_ids": [5, 6]}).tokens == ("5", "6")  # harmless unless it is used


def test_relu_hides_an_infinite_bias_from_the_model_but_not_from_us() -> None:
    model = tiny("bert", hidden_act="relu")
    put(model.encoder.layer[1].intermediate.dense.bias, float("-inf"))
    refused(lambda: Analyzer(model).analyze({"input_ids": IDS}), "layer 1")


def test_model_that_computes_something_else() -> None:
    """Contributions that do not add up to the model's own vector are not a decomposition of it."""

    class Doubled(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = tiny("bert")
    norm = Doubled(24, dtype=torch.float64).eval()
    norm.load_state_dict(model.encoder.layer[1].attention.output.LayerNorm.state_dict())
    model.encoder.layer[1].attention.output.LayerNorm = norm
    refused(lambda: Analyzer(model).analyze({"input_ids": IDS}), "attention.output.LayerNorm", "layer 1", "family")


@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_model_with_a_part_missing(change: str) -> None:
    model = tiny("bert")
    if change == "deleted":
        del model.encoder.layer[1].output.LayerNorm
    else:
        model.encoder.layer[1].output.LayerNorm = nn.Tanh().eval()
    before = state_of(model)
    refused(lambda: Analyzer(model).analyze({"input_ids": IDS}), "LayerNorm")
    assert state_of(model) == before


def test_identity_instead_of_a_norm() -> None:
    """As in ModernBERT before its first attention: the values do not change, and the names stay."""
    model = tiny("bert")
    model.encoder.layer[1].output.LayerNorm = nn.Identity().eval()
    result = Analyzer(model).analyze({"input_ids": IDS})
    assert result.scopes == SCOPES
    assert float(result.completeness[SCOPES[-1]].max()) < 1e-12
    assert torch.equal(result[SCOPES[-1]][1], result[SCOPES[-2]][1])
    (layers,) = layer_oracle.oracle(model, {"input_ids": torch.tensor([IDS])}).values()
    for n, layer in enumerate(layers):
        for scope, expected in maps(layer).items():
            torch.testing.assert_close(result[scope][n], expected, rtol=1e-9, atol=1e-14)


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete checkpoint with its tokenizer."""
    return save_model(tmp_path / "model")


def test_from_pretrained(folder: Path) -> None:
    lens = Analyzer.from_pretrained(folder)
    result = lens.analyze(TEXT)
    assert result["layer"].dtype == torch.float32
    assert str(result.info["model"]).endswith("model")
    assert not lens.model.training
    double = Analyzer.from_pretrained(str(folder), dtype=torch.float64, device="cpu").analyze(TEXT)
    assert double["layer"].dtype == torch.float64
    torch.testing.assert_close(result["layer"].double(), double["layer"], rtol=1e-3, atol=1e-4)


def test_missing_folder(tmp_path: Path) -> None:
    refused(lambda: Analyzer.from_pretrained(tmp_path / "missing"), "missing", "config.json")


def test_empty_folder(tmp_path: Path) -> None:
    refused(lambda: Analyzer.from_pretrained(tmp_path), str(tmp_path), "config.json")


@pytest.mark.parametrize(
    "config",
    ["{garbage", "", "[]", "{}", "5", '{"model_type": "nope"}', '{"model_type": "bert", "hidden_size": "x"}'],
)
def test_garbage_config(folder: Path, config: str) -> None:
    (folder / "config.json").write_text(config)
    refused(lambda: Analyzer.from_pretrained(folder), str(folder))


@pytest.mark.parametrize("size", [0, 7, 500, -100])
def test_truncated_weights(folder: Path, size: int) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    refused(lambda: Analyzer.from_pretrained(folder), str(folder))


def test_weights_missing_from_the_checkpoint(folder: Path) -> None:
    """transformers would fill them with random numbers; only the pooler may be missing, which nothing here reads."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file({k: v for k, v in weights.items() if "pooler" not in k}, path, metadata={"format": "pt"})
    Analyzer.from_pretrained(folder).analyze(TEXT)
    save_file({k: v for k, v in weights.items() if "layer.1.output" not in k}, path, metadata={"format": "pt"})
    refused(lambda: Analyzer.from_pretrained(folder), "encoder.layer.1.output")


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_pickle_is_never_read(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(tmp_path / "exploded")))
    refused(lambda: Analyzer.from_pretrained(folder), "model.safetensors")
    assert not (tmp_path / "exploded").exists()


def test_damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    refused(lambda: Analyzer.from_pretrained(folder), str(folder))


def test_missing_tokenizer(folder: Path) -> None:
    """A tokenizer with missing files is refused, instead of an empty one or one that maps every word to [UNK]."""
    for path in folder.glob("tokenizer*"):
        path.unlink()
    refused(lambda: Analyzer.from_pretrained(folder).analyze(TEXT), "tokenizer")


def test_half_precision_is_refused_on_loading(folder: Path) -> None:
    refused(lambda: Analyzer.from_pretrained(folder, dtype=torch.float16), "float32 or float64", "float16")


def test_unknown_device(folder: Path) -> None:
    refused(lambda: Analyzer.from_pretrained(folder, device="nope"), "'nope'")


def test_unsupported_checkpoint(tmp_path: Path) -> None:
    config = AutoConfig.for_model("xlnet", d_model=8, n_head=2, n_layer=1, d_inner=8, vocab_size=25)
    AutoModel.from_config(config).save_pretrained(tmp_path)
    toy_tokenizer().save_pretrained(tmp_path)
    refused(lambda: Analyzer.from_pretrained(tmp_path), "XLNetModel cannot be described")


def test_missing_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "find_spec", lambda name: None)
    refused(default_model.find, "pip install", default_model.PACKAGE)


def test_default_model_package_without_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(default_model, "find_spec", lambda name: Spec)
    refused(default_model.find, "pip install")


def test_default_model_loads() -> None:
    try:
        path = default_model.find()
    except NormscopeError as error:
        pytest.skip(str(error))
    lens = Analyzer.from_pretrained(path)
    result = lens.analyze("Colin plays tennis.", rows=[-1])
    assert result.scopes == SCOPES
    assert result["layer"].shape == (6, 1, len(result.columns))
    assert all(float(error.max()) < 1e-5 for error in result.completeness.values())
    refused(lambda: lens.analyze("a " * 600), "602", "512", "truncation=True")
    refused(lambda: lens.analyze(" "), "empty")
    assert len(lens.analyze("a " * 600, truncation=True, scopes="weights", layers=0, rows=0).columns) == 512


# --- the model is left as it was found -------------------------------------------------------------------------------


@pytest.fixture(params=["eager", "sdpa"])
def attention(request: pytest.FixtureRequest) -> Iterator[str]:
    return request.param


@pytest.mark.parametrize("family", BERT_FAMILIES)
def test_left_as_found(family: str, attention: str) -> None:
    model = with_implementation(family, attention)
    model.base_model.embeddings.requires_grad_(False)
    called: list[int] = []
    model.register_forward_hook(lambda *args: called.append(1))  # the user's own hook stays
    before = state_of(model)
    random = torch.random.get_rng_state()
    lens = Analyzer(model)
    result = lens.analyze({"input_ids": some_ids(6)}, heads=True)
    result.vectors("layer", 0)
    list(lens.stream([{"input_ids": some_ids(4)}, {"input_ids": some_ids(6)}]))
    assert state_of(model) == before
    assert torch.equal(torch.random.get_rng_state(), random)
    assert not result["layer"].requires_grad
    assert len(called) == 2 + 4  # twice for the proof; hooked models are not batched


@pytest.mark.parametrize("target", ["batch.measure_layer", "run.layer_vectors"])
@pytest.mark.parametrize("family", BERT_FAMILIES)
def test_left_as_found_after_an_exception(
    family: str, attention: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_implementation(family, attention)
    lens = Analyzer(model)
    given = {"input_ids": some_ids(6)}
    expected = lens.analyze(given)
    before = state_of(model)
    calls = 0

    def broken(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        raise KeyboardInterrupt("in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(f"normscope.engine.{target}", broken)
        with pytest.raises(KeyboardInterrupt):
            lens.analyze(given) if target == "batch.measure_layer" else expected.vectors("layer", 1)
    assert calls == 1
    assert state_of(model) == before
    assert_same(lens.analyze(given), expected, 1e-12)


def test_left_as_found_after_a_refusal(attention: str) -> None:
    model = with_implementation("bert", attention)
    put(model.encoder.layer[1].output.dense.bias, float("nan"))
    hooks, implementation = state_of(model)["hooks"], model.config._attn_implementation
    refused(lambda: Analyzer(model).analyze({"input_ids": IDS}), "Layer 1")
    assert state_of(model)["hooks"] == hooks
    assert model.config._attn_implementation == implementation


def test_left_as_found_when_progress_raises() -> None:
    model = tiny("bert")
    before = state_of(model)

    def stop(done: int, total: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        Analyzer(model).analyze({"input_ids": IDS}, progress=stop)
    assert state_of(model) == before


def test_abandoned_stream_leaves_the_model_alone() -> None:
    model = tiny("bert")
    before = state_of(model)
    results = Analyzer(model).stream([{"input_ids": some_ids(n)} for n in (3, 5, 4)], batch_size=1)
    next(results)
    assert state_of(model) == before
    results.close()
    assert state_of(model) == before


@pytest.mark.parametrize("family", BERT_FAMILIES)
def test_attention_backend_changes_nothing(family: str) -> None:
    eager, sdpa = with_implementation(family, "eager"), with_implementation(family, "sdpa")
    given = {"input_ids": [some_ids(7).tolist()] * 2, "attention_mask": [[1] * 7, [0, 0, 1, 1, 0, 1, 1]]}
    found = zip(Analyzer(eager).stream(given, heads=True), Analyzer(sdpa).stream(given, heads=True), strict=True)
    for a, b in found:
        assert_same(a, b)


def test_a_check_takes_nan_for_the_largest_error() -> None:
    from normscope import checking

    nan = torch.tensor([[0.0, float("nan")]])
    assert checking._largest_error(nan) == float("inf")
    assert checking._largest_difference(nan, torch.ones(1, 2)) == float("inf")
    assert checking._weight_sum_error(nan, toy_lens().loaded.stacks[0]) == float("inf")
