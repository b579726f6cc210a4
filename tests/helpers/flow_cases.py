"""Every tiny family with every head that transformers has for it, and an input for each."""

from functools import cache

from torch import Tensor
from transformers import PreTrainedModel

from normscope import Analyzer
from normscope.flow.maps import FrozenModel
from normscope.flow.output_head import freeze_with_output_head
from normscope.inputs.encode import encode
from normscope.inputs.item import Item
from tests.helpers.tiny import BERT_FAMILIES, ENCODER_DECODER, FAMILIES, FLOAT32_NORMS, inputs, task_heads, tiny

POST_NORM = (*BERT_FAMILIES, "opt-post", "deberta-v2")  # for models with one side
ONE_SIDED = tuple(name for name in FAMILIES if name not in ENCODER_DECODER)


def heads(name: str) -> tuple[str, ...]:
    """The heads of `task_heads`, plus more for encoder-decoders."""
    more = {"bart": ("MaskedLM", "SequenceClassification"), "t5": ("SequenceClassification", "TokenClassification")}
    return task_heads(name) + more.get(name, ())


CASES = [(name, head) for name in FAMILIES for head in heads(name)]
LANGUAGE = [(name, heads(name)[0]) for name in FAMILIES]  # one case of each family


def tolerance(name: str) -> float:
    return 1e-6 if name in FLOAT32_NORMS else 1e-9


def encoding(name: str, model: PreTrainedModel, head: str | None = None, length: int = 7) -> dict[str, Tensor]:
    given = inputs(name, model, length, 5)
    if head == "TokenClassification":  # T5: the encoder alone
        given = {key: value for key, value in given.items() if not key.startswith("decoder")}
    if head == "SequenceClassification" and name in ENCODER_DECODER:  # read at the end token of the source
        given["input_ids"][0, -1] = model.config.eos_token_id
        given["decoder_input_ids"] = given["input_ids"].clone()
        given["decoder_attention_mask"] = given["attention_mask"]
    return given


@cache
def open_case(name: str, head: str | None = None) -> tuple[Analyzer, dict[str, Tensor], Item, FrozenModel]:
    """A model, its input, the input as an item, and the model frozen at that input."""
    model = tiny(name, head)
    lens = Analyzer(model)
    given = encoding(name, model, head)
    (item,) = encode(lens.loaded, given)
    return lens, given, item, freeze_with_output_head(lens.loaded, item)


def place(frozen: FrozenModel) -> int:
    """A row of the logits that is neither the first nor the last, if there are several."""
    assert frozen.logits is not None
    return len(frozen.logits) // 2
