"""Attacks by peft: every method of peft, with adapters away from identity."""

import copy
import random
import tempfile
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import peft
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.attacks.subject import Inapplicable, Subject, attack
from tests.helpers.tiny import CAUSAL, ENCODER_DECODER

TASKS = {
    "CausalLM": "CAUSAL_LM",
    "Seq2SeqLM": "SEQ_2_SEQ_LM",
    "SequenceClassification": "SEQ_CLS",
    "TokenClassification": "TOKEN_CLS",
}


def linear_names(subject: Subject) -> list[str]:
    """The names that the linear modules of the layers have in their parents."""
    return sorted(
        {
            path.rpartition(".")[2]
            for layer in subject.layers()
            for path, module in layer.named_modules()
            if isinstance(module, nn.Linear | Conv1D)
        }
    )


def some(rng: random.Random, names: list[str]) -> list[str]:
    if not names:
        raise Inapplicable("no linear modules")
    return rng.sample(names, rng.randrange(1, len(names) + 1))


def norm_names(subject: Subject) -> list[str]:
    return sorted({path for path, m in subject.inside.named_modules() if "Norm" in type(m).__name__ and path})


# A config for each method; the methods for linear modules share one way to make it.
PLAIN: dict[str, dict[str, Any]] = {
    "AdaLoraConfig": {"init_r": 3, "target_r": 2, "total_step": 10, "init_lora_weights": False},
    "AdamssConfig": {"r": 4, "num_subspaces": 2, "subspace_rank": 1},
    "BeftConfig": {},
    "BOFTConfig": {"boft_block_size": 4, "init_weights": False},
    "C3AConfig": {"block_size": 4, "init_weights": "gaussian"},
    "DeftConfig": {"r": 2, "init_weights": False},
    "DeloraConfig": {"r": 2, "init_weights": False},
    "FourierFTConfig": {"n_frequency": 10, "init_weights": False},
    "FrodConfig": {"progressbar": False, "init_weights": False},
    "GloraConfig": {"r": 2, "init_weights": False},
    "GraloraConfig": {"r": 4, "gralora_k": 2, "init_weights": False},
    "HiraConfig": {"r": 2, "init_weights": False},
    "HRAConfig": {"r": 2, "init_weights": False},
    "LilyConfig": {"r": 2, "init_weights": False},
    "LoHaConfig": {"r": 2, "init_weights": False},
    "LoKrConfig": {"r": 2, "init_weights": False},
    "MissConfig": {"r": 4, "init_weights": False},
    "OFTConfig": {"oft_block_size": 4, "r": 0, "init_weights": False},
    "OSFConfig": {"effective_rank": 4},
    "PeanutConfig": {"r": 2, "init_weights": False},
    "PolyConfig": {"r": 2, "n_tasks": 2, "n_skills": 2},
    "PsoftConfig": {"r": 2},
    "PveraConfig": {"r": 4, "init_weights": True},
    "RandLoraConfig": {"r": 4},
    "RoadConfig": {"group_size": 4, "variant": "road_1", "init_weights": False},
    "ShiraConfig": {"r": 2, "init_weights": False},
    "SupertuningConfig": {},
    "TinyLoraConfig": {"r": 2, "u": 4},
    "UniLoraConfig": {"r": 2, "theta_d_length": 32},
    "VBLoRAConfig": {"r": 2, "num_vectors": 8, "vector_length": 4, "topk": 2},
    "VeraConfig": {"r": 4},
    "WaveFTConfig": {"n_frequency": 10, "init_weights": False},
}
FAN_IN = ("AdaLoraConfig", "BOFTConfig", "DeftConfig", "FourierFTConfig", "FrodConfig", "GraloraConfig", "HiraConfig",
          "OFTConfig", "PsoftConfig", "PveraConfig", "RandLoraConfig", "ShiraConfig", "TinyLoraConfig", "UniLoraConfig",
          "VBLoRAConfig", "VeraConfig", "WaveFTConfig")  # fmt: skip


def method(rng: random.Random, subject: Subject, kind: str) -> Any:
    options = dict(PLAIN[kind])
    if kind in FAN_IN and subject.name == "gpt2":
        options["fan_in_fan_out"] = True
    try:
        return getattr(peft, kind)(target_modules=some(rng, linear_names(subject)), **options)
    except ImportError as error:  # AdaMSS wants scikit-learn
        raise Inapplicable(str(error)) from error


def lora(rng: random.Random, subject: Subject, names: list[str] | None = None, **options: Any) -> Any:
    return peft.LoraConfig(
        r=2,
        lora_alpha=4,
        lora_dropout=0.1,
        target_modules=some(rng, names or linear_names(subject)),
        init_lora_weights=False,
        fan_in_fan_out=subject.name == "gpt2",
        **options,
    )


@contextmanager
def quietly() -> Any:
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        yield


def adapt(rng: random.Random, subject: Subject, config: Any) -> Any:
    """Add adapters, away from their initial values, in evaluation mode and the model's precision."""

    def make() -> Any:
        try:
            return peft.get_peft_model(subject.inside, config)
        except Exception as error:
            raise Inapplicable(f"{type(config).__name__}: {error}") from error

    return wrap(rng, subject, make)


def wrap(rng: random.Random, subject: Subject, make: Callable[[], Any]) -> Any:
    """Replace the model by `make()`, which wraps it, and move all new parameters away from their initial values."""
    if subject.model is not subject.inside:
        raise Inapplicable("wrapped already")
    known = {id(p) for p in subject.inside.parameters()}
    with quietly():
        torch.manual_seed(rng.randrange(10**6))
        made = make()
        randomise(made, known)
    subject.model = made.to(subject.dtype).eval()
    return subject.model


@torch.no_grad()
def randomise(model: nn.Module, known: set[int]) -> None:
    for parameter in model.parameters():
        if id(parameter) not in known and parameter.is_floating_point():
            parameter.add_(0.2 * torch.randn(parameter.shape).to(parameter.dtype))


@attack(weight=6)
def adapter(rng: random.Random, subject: Subject) -> str:
    """Any method that adapts linear modules."""
    kind = rng.choice(list(PLAIN))
    config = method(rng, subject, kind)
    adapt(rng, subject, config)
    if kind == "PolyConfig" and rng.random() < 0.7:
        subject.encoding["task_ids"] = torch.tensor([rng.randrange(2)])
    return f"{kind.removesuffix('Config')} on {', '.join(sorted(config.target_modules))}"


@attack(weight=3)
def lora_adapter(rng: random.Random, subject: Subject) -> str:
    kind = rng.choice(["lora", "rslora", "dora", "bias", "pattern", "embeddings", "tokens", "saved", "layers", "alora"])
    embedding = next((p for p, m in subject.inside.named_modules() if m is subject.inside.get_input_embeddings()), "")
    if kind == "rslora":
        config = lora(rng, subject, use_rslora=True)
    elif kind == "dora":
        config = lora(rng, subject, use_dora=True)
    elif kind == "bias":
        config = lora(rng, subject, lora_bias=True)
    elif kind == "pattern":
        config = lora(
            rng, subject, rank_pattern={linear_names(subject)[0]: 3}, alpha_pattern={linear_names(subject)[-1]: 9}
        )
    elif kind == "embeddings":
        config = lora(rng, subject)
        config.target_modules = {*config.target_modules, embedding.rpartition(".")[2]}
    elif kind == "tokens":
        ids = subject.encoding["input_ids"][0].tolist() if "input_ids" in subject.encoding else [5]
        config = lora(rng, subject, trainable_token_indices=sorted({*ids[:2], 9} & set(range(50))))
    elif kind == "saved":
        config = lora(rng, subject, modules_to_save=[rng.choice([embedding.rpartition(".")[2], *norm_names(subject)])])
    elif kind == "layers":
        config = lora(rng, subject, layers_to_transform=[0])
    elif kind == "alora":
        tokens = [int(subject.encoding["input_ids"][0, 0])] if "input_ids" in subject.encoding else None
        config = lora(rng, subject, alora_invocation_tokens=tokens, task_type=TASKS.get(subject.head or ""))
    else:
        config = lora(rng, subject, task_type=TASKS.get(subject.head or ""))
    adapt(rng, subject, config)
    return f"LoRA ({kind}) on {', '.join(sorted(config.target_modules))}"


@attack(weight=1.5)
def scaling_adapter(rng: random.Random, subject: Subject) -> str:
    """IA3 and LN tuning, which do not update a matrix."""
    if rng.random() < 0.5:
        names = some(rng, linear_names(subject))
        forward = [name for name in names if rng.random() < 0.5]
        adapt(rng, subject, peft.IA3Config(target_modules=names, feedforward_modules=forward, init_ia3_weights=False,
                                           fan_in_fan_out=subject.name == "gpt2"))  # fmt: skip
        return f"IA3 on {', '.join(names)}, before {', '.join(forward) or 'none'}"
    names = some(rng, norm_names(subject))
    adapt(rng, subject, peft.LNTuningConfig(target_modules=names))
    return f"LN tuning of {len(names)} norms"


@attack()
def trainable_tokens(rng: random.Random, subject: Subject) -> str:
    if "input_ids" not in subject.encoding:
        raise Inapplicable("no words")
    ids = sorted({n for n in subject.encoding["input_ids"][0].tolist() if 0 <= n < 50})[:2]
    path = next(p for p, m in subject.inside.named_modules() if m is subject.inside.get_input_embeddings())
    adapt(rng, subject, peft.TrainableTokensConfig(token_indices=ids, target_modules=[path.rpartition(".")[2]]))
    return f"trainable tokens {ids}"


@attack(weight=1.5, late=False)
def adapter_states(rng: random.Random, subject: Subject) -> str:
    """Two adapters, and one, both or none of them on, merged or not."""
    names = linear_names(subject)
    model = adapt(rng, subject, lora(rng, subject))
    kind = rng.choice(
        ["two", "second", "merged", "both merged", "disabled", "unloaded", "merged in", "weighted", "deleted"]
    )
    with quietly():
        torch.manual_seed(rng.randrange(10**6))
        try:
            model.add_adapter("second", lora(rng, subject, names))
            model.to(subject.dtype).eval()
            change_state(model, kind, subject)
        except Exception as error:
            raise Inapplicable(f"{kind}: {error}") from error
    subject.model.eval()
    return f"two LoRA adapters, {kind}"


def change_state(model: Any, kind: str, subject: Subject) -> None:
    if kind == "two":
        model.base_model.set_adapter(["default", "second"])
    elif kind == "second":
        model.set_adapter("second")
    elif kind == "merged":
        model.merge_adapter()
    elif kind == "both merged":
        model.base_model.set_adapter(["default", "second"])
        model.merge_adapter()
    elif kind == "disabled":
        model.base_model.disable_adapter_layers()
    elif kind == "unloaded":
        subject.model = model.unload()
    elif kind == "merged in":
        subject.model = model.merge_and_unload()
    elif kind == "weighted":
        model.add_weighted_adapter(["default", "second"], [0.5, 0.7], "third", combination_type="cat")
        model.set_adapter("third")
    else:
        model.delete_adapter("default")
        model.set_adapter("second")


@attack(late=False)
def mixed_adapters(rng: random.Random, subject: Subject) -> str:
    """Adapters of two kinds at once."""

    def make() -> Any:
        try:
            second = method(rng, subject, rng.choice(["LoHaConfig", "LoKrConfig", "OFTConfig"]))
            model = peft.get_peft_model(subject.inside, lora(rng, subject), mixed=True)
            model.add_adapter("second", second)
            model.set_adapter(["default", "second"])
        except Exception as error:
            raise Inapplicable(str(error)) from error
        return model

    wrap(rng, subject, make)
    return "LoRA and another adapter"


@attack(weight=3, late=False)
def soft_prompt(rng: random.Random, subject: Subject) -> str:
    """Virtual tokens in front of the input, or virtual keys and values in front of those of every layer."""
    task = TASKS.get(subject.head or "", "FEATURE_EXTRACTION")
    n = rng.choice([1, 2, 3])
    common = {"task_type": task, "num_virtual_tokens": n}
    if subject.name in ENCODER_DECODER:
        common["num_transformer_submodules"] = rng.choice([1, 2])
    kind = rng.choice(["prompt", "prompt", "p-tuning", "prefix", "prefix", "multitask", "cpt", "cartridge"])
    if kind == "prompt":
        config = peft.PromptTuningConfig(**common)
    elif kind == "p-tuning":
        config = peft.PromptEncoderConfig(**common, encoder_hidden_size=8)
    elif kind == "prefix":
        config = peft.PrefixTuningConfig(**common, prefix_projection=rng.random() < 0.3, encoder_hidden_size=8)
    elif kind == "multitask":
        config = peft.MultitaskPromptTuningConfig(**common, num_tasks=2)
    elif kind == "cpt":
        if subject.head != "CausalLM":
            raise Inapplicable("CPT is for causal language models")
        config = peft.CPTConfig(
            task_type=task, cpt_token_ids=[5, 6, 7][:n], cpt_mask=[1] * n, cpt_tokens_type_mask=[1] * n
        )
    else:
        config = peft.CartridgeConfig(**common)
    adapt(rng, subject, config)
    subject.virtual = True
    if kind == "multitask" and rng.random() < 0.7:
        subject.encoding["task_ids"] = torch.tensor([rng.randrange(2)])
    return f"{kind} of {n}"


@attack(late=False)
def adaption_prompt(rng: random.Random, subject: Subject) -> str:
    if subject.name not in CAUSAL:
        raise Inapplicable("for causal models")
    adapt(rng, subject, peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, task_type="CAUSAL_LM"))
    return "adaption prompt"


@attack(weight=0.5, late=False)
def shadow(rng: random.Random, subject: Subject) -> str:
    """A small network beside the layers, which adds to the input of each."""
    if subject.name not in CAUSAL:
        raise Inapplicable("for causal models")
    config = peft.ShadowConfig(r=2, init_weights=False, task_type=TASKS.get(subject.head or ""))
    adapt(rng, subject, config)
    return "shadow"


@attack(weight=0.5, late=False)
def xlora(rng: random.Random, subject: Subject) -> str:
    """A mixture of LoRA adapters, whose shares depend on the input."""
    if subject.head not in TASKS or subject.model is not subject.inside:
        raise Inapplicable("it wants a task")
    task, names = TASKS[subject.head], some(rng, linear_names(subject))
    options = {"r": 2, "target_modules": names, "init_lora_weights": False, "fan_in_fan_out": subject.name == "gpt2"}
    subject.inside.config.use_cache = False
    with quietly(), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(rng.randrange(10**6))
        try:
            for n in range(2):
                one = peft.get_peft_model(copy.deepcopy(subject.inside), peft.LoraConfig(task_type=task, **options))
                one.save_pretrained(f"{folder}/{n}")
            adapters = {str(n): f"{folder}/{n}" for n in range(2)}
            config = peft.XLoraConfig(task_type=task, hidden_size=24, adapters=adapters, xlora_depth=1)
            made = peft.get_peft_model(subject.inside, config)
        except Exception as error:
            raise Inapplicable(f"X-LoRA: {error}") from error
    subject.model = made.to(subject.dtype).eval()
    return f"X-LoRA on {', '.join(sorted(names))}"


@attack(weight=0.7)
def injected(rng: random.Random, subject: Subject) -> str:
    """Adapters put into the model itself, with no PeftModel around it."""
    if subject.model is not subject.inside:
        raise Inapplicable("wrapped already")
    with quietly():
        torch.manual_seed(rng.randrange(10**6))
        config = lora(rng, subject)
        kind = rng.choice(["inject", "add_adapter"])
        try:
            if kind == "inject":
                peft.inject_adapter_in_model(config, subject.inside)
            else:
                subject.inside.add_adapter(config)
        except Exception as error:
            raise Inapplicable(str(error)) from error
    subject.inside.to(subject.dtype).eval()
    return f"LoRA by {kind} on {', '.join(sorted(config.target_modules))}"
