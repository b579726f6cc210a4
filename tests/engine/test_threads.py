"""Threads: one lock per model, plain forward passes stay correct and unrecorded, shared configs are restored."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from normscope import Analysis, Analyzer
from normscope.engine import batch as batch_module
from tests.helpers.compare import assert_same, state_of, with_implementation
from tests.helpers.tiny import BERT_FAMILIES, tiny
from tests.helpers.toys import some_ids

REPETITIONS = 25
TIMEOUT = 180  # seconds until something counts as stuck, however busy the machine is


def at_once(*jobs: Callable[[], Any]) -> list[Any]:
    """Run each job in its own thread, started together; the first exception is raised here."""
    barrier = threading.Barrier(len(jobs))

    def start(job: Callable[[], Any]) -> Any:
        barrier.wait(TIMEOUT)
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(TIMEOUT) for future in [pool.submit(start, job) for job in jobs]]


def repeated(lens: Analyzer, given: dict[str, Any], **options: Any) -> Callable[[], list[Analysis]]:
    return lambda: [lens.analyze(given, **options) for _ in range(REPETITIONS)]


def left_padded(model: PreTrainedModel) -> dict[str, Tensor]:
    """A batch whose masks matter: without them every output differs."""
    lengths = (9, 5, 2)
    ids = torch.stack([torch.nn.functional.pad(some_ids(n, seed=n), (9 - n, 0), value=11) for n in lengths])
    mask = torch.stack([torch.nn.functional.pad(torch.ones(n, dtype=torch.long), (9 - n, 0)) for n in lengths])
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def plain(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """The hidden states of a forward pass, at the real tokens."""
    return model(**batch).last_hidden_state[batch["attention_mask"].bool()]


@pytest.fixture(params=["eager", "sdpa"])
def attention(request: pytest.FixtureRequest) -> Iterator[str]:
    return request.param


@pytest.mark.parametrize("family", ["bert", "albert", "mpnet"])
def test_two_analyzers_of_one_model(family: str) -> None:
    model = tiny(family)
    first, second = Analyzer(model), Analyzer(model)
    a, b = {"input_ids": some_ids(12)}, {"input_ids": some_ids(5, seed=1)}
    expected = first.analyze(a, heads=True), second.analyze(b, layers=[1])
    before = state_of(model)
    found = at_once(repeated(first, a, heads=True), repeated(second, b, layers=[1]))
    for results, one in zip(found, expected, strict=True):
        for result in results:
            assert_same(result, one, 1e-12)
    assert state_of(model) == before


def test_one_analyzer_in_many_threads() -> None:
    model = tiny("bert")
    lens = Analyzer(model)
    given = [{"input_ids": some_ids(n, seed=n)} for n in (3, 8, 5, 14)]
    expected = [lens.analyze(one) for one in given]
    before = state_of(model)
    for results, one in zip(at_once(*(repeated(lens, item) for item in given)), expected, strict=True):
        for result in results:
            assert_same(result, one, 1e-12)
    assert state_of(model) == before


def test_working_memory_that_another_thread_took_first() -> None:
    class Taken(list[Any]):
        """Empty by the time that it is read."""

        def __len__(self) -> int:
            return 1

    lens = Analyzer(tiny("bert"))
    lens.workspace.free = Taken()
    assert lens.analyze({"input_ids": some_ids(4)}).scopes


def test_two_models_at_once() -> None:
    lenses = [Analyzer(tiny("bert", seed=seed)) for seed in (0, 1)]
    given = {"input_ids": some_ids(9)}
    expected = [lens.analyze(given) for lens in lenses]
    for results, one in zip(at_once(*(repeated(lens, given) for lens in lenses)), expected, strict=True):
        for result in results:
            assert_same(result, one, 1e-12)


@pytest.mark.parametrize("family", BERT_FAMILIES)
def test_plain_forward_in_the_middle_of_a_trace(family: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread runs the model while this one waits inside a layer, so the overlap is certain."""
    model = with_implementation(family, attention)
    lens = Analyzer(model)
    given = {"input_ids": some_ids(7)}
    batch = left_padded(model)
    expected, normal = lens.analyze(given, heads=True), plain(model, batch)
    before = state_of(model)
    outputs: list[Tensor] = []
    measure = batch_module.measure_layer

    def measure_meanwhile(*args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            outputs.append(pool.submit(plain, model, batch).result(TIMEOUT))
        return measure(*args, **kwargs)

    monkeypatch.setattr(batch_module, "measure_layer", measure_meanwhile)
    found = lens.analyze(given, heads=True)
    assert len(outputs) == lens.depth
    for output in outputs:
        assert torch.equal(output, normal)
    assert_same(found, expected, 1e-12)
    assert state_of(model) == before


def test_plain_forward_beside_many_traces(attention: str) -> None:
    model = with_implementation("bert", attention)
    lens = Analyzer(model)
    given = {"input_ids": some_ids(10)}
    batch = left_padded(model)
    expected, normal = lens.analyze(given), plain(model, batch)
    before = state_of(model)
    results, outputs = at_once(repeated(lens, given), lambda: [plain(model, batch) for _ in range(4 * REPETITIONS)])
    for result in results:
        assert_same(result, expected, 1e-12)
    for output in outputs:
        assert torch.equal(output, normal)
    assert state_of(model) == before


def test_forward_that_began_before_the_trace_and_ends_after_it(attention: str) -> None:
    """The mask is made by one attention implementation and used while another is in place."""
    model = with_implementation("bert", attention)
    lens = Analyzer(model)
    batch = left_padded(model)
    normal = plain(model, batch)
    inside, go_on = threading.Event(), threading.Event()

    def pause(*args: Any) -> None:
        if threading.current_thread().name.startswith("paused"):
            inside.set()
            go_on.wait(TIMEOUT)

    handle = model.encoder.layer[0].register_forward_pre_hook(pause)
    with ThreadPoolExecutor(1, thread_name_prefix="paused") as pool:
        future = pool.submit(plain, model, batch)
        assert inside.wait(TIMEOUT)
        lens.analyze({"input_ids": some_ids(4)}, progress=lambda done, total: go_on.set())
        assert torch.equal(future.result(TIMEOUT), normal)
    handle.remove()
    assert model.config._attn_implementation == attention


def sharing(config_of: PreTrainedModel) -> PreTrainedModel:
    """Another model with the very same config object."""
    model = type(config_of)(config_of.config).double().eval()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config = config_of.config
    return model


def test_two_models_with_one_config(attention: str) -> None:
    first = with_implementation("bert", attention)
    second = sharing(first)
    assert second.config is first.config
    lenses = [Analyzer(first), Analyzer(second)]
    given = {"input_ids": some_ids(6)}
    expected = [lens.analyze(given) for lens in lenses]
    before = [state_of(model) for model in (first, second)]
    for results, one in zip(at_once(*(repeated(lens, given) for lens in lenses)), expected, strict=True):
        for result in results:
            assert_same(result, one, 1e-12)
    assert [state_of(model) for model in (first, second)] == before
    assert first.config._attn_implementation == attention


def test_overlapping_traces_of_one_config(attention: str) -> None:
    """The first trace ends while the second is in the middle: the one that ends last restores the config."""
    first = with_implementation("bert", attention)
    second = sharing(first)
    given = {"input_ids": some_ids(6)}
    expected = Analyzer(second).analyze(given)
    inside, first_done = threading.Event(), threading.Event()

    def wait(done: int, total: int) -> None:
        inside.set()
        assert first_done.wait(TIMEOUT)

    with ThreadPoolExecutor(1) as pool:

        def while_first_runs(done: int, total: int) -> None:
            if done == 1:
                futures.append(pool.submit(Analyzer(second).analyze, given, progress=wait))
                assert inside.wait(TIMEOUT)

        futures: list[Any] = []
        Analyzer(first).analyze(given, progress=while_first_runs)
        assert first.config._attn_implementation != attention  # the second still runs
        first_done.set()
        assert_same(futures[0].result(TIMEOUT), expected, 1e-12)
    assert first.config._attn_implementation == attention


def test_failure_in_one_thread_does_not_disturb_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("bert")
    good, bad = Analyzer(model), Analyzer(model)
    given = {"input_ids": some_ids(8)}
    expected = good.analyze(given)
    before = state_of(model)

    def stop(done: int, total: int) -> None:
        raise RuntimeError("enough")

    def failing() -> int:
        failures = 0
        for _ in range(REPETITIONS):
            with pytest.raises(RuntimeError, match="enough"):
                bad.analyze(given, progress=stop)
            failures += 1
        return failures

    results, failures = at_once(repeated(good, given), failing)
    assert failures == REPETITIONS
    for result in results:
        assert_same(result, expected, 1e-12)
    assert state_of(model) == before


def test_analysis_inside_an_analysis() -> None:
    """A progress callback may run an analysis: the lock is reentrant, and the outer trace continues."""
    lens = Analyzer(tiny("bert"))
    outer, inner = {"input_ids": some_ids(8)}, {"input_ids": some_ids(5, seed=1)}
    expected = lens.analyze(outer), lens.analyze(inner)
    nested: list[Analysis] = []
    result = lens.analyze(outer, progress=lambda done, total: nested.append(lens.analyze(inner)))
    assert_same(result, expected[0], 1e-12)
    assert len(nested) == 2
    for one in nested:
        assert_same(one, expected[1], 1e-12)


@pytest.mark.parametrize("length", [8, 5], ids=["same length", "other length"])
def test_plain_forward_inside_an_analysis(length: int, attention: str) -> None:
    """A progress callback may run the model itself, in the thread that traces: that pass is not recorded either."""
    model = with_implementation("bert", attention)
    lens = Analyzer(model)
    given, batch = {"input_ids": some_ids(8)}, {"input_ids": some_ids(length, seed=1)[None]}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    expected, normal = lens.analyze(given), plain(model, batch)
    outputs: list[Tensor] = []

    def forward_once(done: int, total: int) -> None:
        if not outputs:
            outputs.append(normal)
            outputs[0] = plain(model, batch)

    assert_same(lens.analyze(given, progress=forward_once), expected, 1e-12)
    torch.testing.assert_close(outputs[0], normal)


def test_grad_mode_of_other_threads_is_their_own() -> None:
    model = tiny("bert")
    lens = Analyzer(model)
    batch = left_padded(model)
    modes: list[bool] = []

    def look(done: int, total: int) -> None:
        with ThreadPoolExecutor(1) as pool:
            modes.append(pool.submit(lambda: model(**batch).last_hidden_state.requires_grad).result(TIMEOUT))

    lens.analyze({"input_ids": some_ids(6)}, progress=look)
    assert modes == [True, True]
    assert torch.is_grad_enabled()
